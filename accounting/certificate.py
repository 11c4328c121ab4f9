"""The certificate of a run: composed from its ledger, written as JSON, Markdown and HTML, and verified."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from accounting.pages import html_page, markdown
from accounting.statement import FORMAT, compose
from accounting.verify import CertificateError, Verdict, verify

__all__ = ["FORMAT", "CertificateError", "Verdict", "compose", "html_page", "markdown", "verify", "write"]


def write(certificate: dict[str, Any], run_dir: Path) -> None:
    """Each file whole or absent, and on disk when this returns. JSON last: its presence means that all are there."""
    for name, text in (
        ("certificate.html", html_page(certificate)),
        ("certificate.md", markdown(certificate)),
        ("certificate.json", json.dumps(certificate, indent=2, ensure_ascii=False) + "\n"),
    ):
        temporary = run_dir / f".{name}.tmp"
        # Halves of characters, which names of files may hold, are written as JSON writes them.
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(run_dir / name)
    folder = os.open(run_dir, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
