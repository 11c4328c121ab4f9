"""The certificate of a run: composed from its ledger, written as JSON, Markdown and HTML, and verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from murmuration.accounting.certificate.pages import html_page, html_sections, markdown, pages
from murmuration.accounting.certificate.statement import FORMAT, compose
from murmuration.accounting.certificate.verify import CertificateError, Verdict, verify
from murmuration.accounting.durable import atomic

__all__ = [
    "FORMAT", "CertificateError", "Verdict", "compose", "html_page", "html_sections", "markdown", "verify", "write",
]  # fmt: skip


def write(certificate: dict[str, Any], run_dir: Path) -> None:
    """Writes each file atomically and durably. JSON comes last: its presence means that all of them are there."""
    document = json.dumps(certificate, indent=2, ensure_ascii=False) + "\n"
    files = pages(certificate) | {"certificate.json": document.encode("utf-8", "backslashreplace")}
    for name, content in files.items():
        with atomic(run_dir / name) as file:
            file.write(content)
