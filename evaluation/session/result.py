"""What an evaluation leaves: result.json, which says how each number came about, and one page that shows it.

Nothing in either depends on when or how fast it was made, so that a repeated evaluation gives the same bytes.
"""

from __future__ import annotations

import csv
import io
import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from murmuration.accounting.certificate.verify import CertificateError, verify
from murmuration.accounting.durable import atomic
from murmuration.accounting.epsilon.accountant import show_delta, show_epsilon
from murmuration.accounting.escaping import html_page
from murmuration.accounting.ledger.history import History
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.measures.interval import Estimate, mean, spread
from murmuration.evaluation.models.subject import Subject

RESULT, PAGE = "result.json", "result.html"
FORMAT = "murmuration-evaluation/1"
PACKAGES = (
    "murmuration", "torch", "numpy", "scipy", "pillow", "timm", "tokenizers", "torchvision", "transformers",
    "pycocotools",
)  # fmt: skip


@dataclass
class Result:
    protocol: str
    settings: dict[str, Any]
    model: dict[str, Any]
    certificate: dict[str, Any] | None
    data: dict[str, Any]
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    private: bool = False
    """Computed from records that a run protects: for the owner alone."""

    def add(self, name: str, found: Estimate) -> None:
        self.numbers[name] = asdict(found)

    def add_draws(self, name: str, values: Sequence[float]) -> None:
        """The mean over several draws of what was learnt from, with the draws' standard deviation."""
        self.numbers[name] = asdict(mean(values)) | {"std": spread(values), "draws": list(values)}

    def as_dict(self) -> dict[str, Any]:
        told = asdict(self)
        if not told.pop("private"):
            return {"format": FORMAT, **told, "versions": _versions()}
        return {"format": FORMAT, "private": True, **told, "versions": _versions()}


@dataclass(frozen=True)
class Tile:
    """A picture of the gallery, as PNG in base64, with two lines below it."""

    png: str
    text: str
    small: str = ""


@dataclass(frozen=True)
class Outcome:
    """A result, and what only its page shows: a gallery, and a table whose first row is its head."""

    result: Result
    tiles: list[Tile] = field(default_factory=list)
    table: list[list[str]] = field(default_factory=list)
    table_title: str = "By class"


def page_of(outcome: Outcome) -> str:
    """The page that shows a result, in one file."""
    result = outcome.result
    parts = {"model": result.model, **{f"data, {name}": part for name, part in result.data.items()}}
    parts["settings"] = result.settings
    return html_page(
        Path(__file__).parent / "result.html.jinja",
        title=f"{result.protocol} of {result.model['what']}",
        statement=statement(result),
        numbers=[(name, shown(number)) for name, number in result.numbers.items()],
        about=[(name, ", ".join(f"{key} {value}" for key, value in part.items())) for name, part in parts.items()],
        notes=result.notes,
        tiles=outcome.tiles,
        table=outcome.table,
        table_title=outcome.table_title,
        document=json.dumps(result.as_dict(), indent=2, ensure_ascii=False),
    )


def write(outcome: Outcome, out: Path) -> None:
    """The page is written first, so that a result never lacks its page. Names of files need not be text."""
    result = outcome.result
    mode = 0o600 if result.private else 0o644
    with atomic(out / PAGE, mode) as file:
        file.write(page_of(outcome).encode("utf-8", "backslashreplace"))
    with atomic(out / RESULT, mode) as file:
        file.write(json.dumps(result.as_dict(), indent=2).encode() + b"\n")


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]], mode: int = 0o644) -> None:
    """Lines end in a bare line feed on every system."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(header)
    lines.writerows(rows)
    with atomic(path, mode) as file:
        file.write(text.getvalue().encode("utf-8", "backslashreplace"))


def read(path: Path) -> dict[str, Any]:
    """A result that was written earlier; `path` may be its folder."""
    path = path / RESULT if path.is_dir() else path
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise EvaluationError(f"{path} cannot be read ({error.strerror}); name a {RESULT} of an evaluation") from None
    except (ValueError, RecursionError):
        raise EvaluationError(f"{path} is not JSON; name a {RESULT} of an evaluation") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise EvaluationError(f"{path} is no result of an evaluation; name a {RESULT}")
    return found


def shown(number: dict[str, Any]) -> str:
    """0.775 (0.737 … 0.809, n = 512), or with the draws' standard deviation 0.775 ± 0.012 (0.745 … 0.805, 3 draws)"""
    interval = f"{number['low']:.4f} … {number['high']:.4f}"
    if number["n"] == 1 and number["low"] == number["high"]:  # one value tells nothing of its error
        return f"{number['value']:.4f} (no interval, {'1 draw' if 'draws' in number else 'n = 1'})"
    if "draws" in number:
        return f"{number['value']:.4f} ± {number['std']:.4f} ({interval}, {number['n']} draws)"
    return f"{number['value']:.4f} ({interval}, n = {number['n']:,})"


def certificate_of(subject: Subject, certified: bool) -> tuple[dict[str, Any] | None, list[str]]:
    """What the certificate beside the weights claims, if it holds and is theirs; and what is to be said about it."""
    folder = subject.certified
    if not (folder / "certificate.json").is_file():
        return None, []
    if not certified:
        return None, ["The certificate beside the weights does not name their tensors, so it says nothing about them."]
    try:
        verdict = verify(folder)
    except (CertificateError, OSError, ValueError) as error:
        return None, [f"The certificate beside the weights does not hold: {error}"]
    claimed = verdict.certified if verdict.claimed is None else verdict.claimed
    private = verdict.objection is None
    told = {"private": private, "epsilon": claimed if private else None, "delta": verdict.delta_claimed}
    told |= {"run": verdict.run, "objection": verdict.objection, **_planned(folder)}
    return told | ({"refuted": verdict.refuted[0]} if verdict.refuted else {}), []


def _planned(folder: Path) -> dict[str, Any]:
    """Batch and n of the last private phase, from the ledger beside the certificate: public constants."""
    plans = History.read(folder / "ledger.jsonl")[0].plans
    if not plans:
        return {}
    plan = plans[max(plans)]
    return {"batch": round(plan.divisor), "records": plan.records}


def statement(result: Result) -> str:
    found = result.certificate
    if result.private:
        return "PRIVATE: computed from training records without noise. For the owner alone."
    if found is None:
        return "No certificate names these weights."
    if not found["private"]:
        return str(found["objection"])
    if refuted := found.get("refuted"):
        return f"REFUTED by the run's own audit: {refuted}."
    return f"Certified: ε = {show_epsilon(found['epsilon'])} at δ = {show_delta(found['delta'])}."


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"  # the project itself, in a checkout
    return found
