"""README.md of an export: what the model is, what is promised of it, what was measured, and how to load it.

Everything in it stands in the certificate, in the checkpoint or in the command; nothing is written twice by hand.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from murmuration.accounting.certificate.evidence import refutations
from murmuration.accounting.escaping import markdown_page, printable
from murmuration.accounting.unit import noun_of
from murmuration.model.captioner import Captioner
from murmuration.model.classifier import Classifier
from murmuration.model.language_model import LanguageModel
from murmuration.train.export.finished import Finished
from murmuration.train.export.forms import Loading
from murmuration.train.measures.shares import TITLES
from murmuration.train.recipe.held_out import LOSS, SIGNAL

NAME = "README.md"
UNKNOWN = "unknown"
LICENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")


def write_card(
    out: Path, finished: Finished, loading: Loading, certificate: Mapping[str, Any], measured: Mapping[str, float],
    licence: str, chosen: bool = False,
) -> None:  # fmt: skip
    """`chosen`: among checkpoints, by one of the measurements."""
    claim, about = certificate["claim"], certificate.get("about") or {}
    page = markdown_page(
        Path(__file__).with_name("model_card.md.jinja"),
        licence=Markup(licence),
        loading=loading,
        program=Markup(loading.program.replace("DIR", ".")),
        task=Markup(_task(finished)),
        run=str(certificate["run"]),
        what=_what(finished),
        promise=str(claim["statement"]),
        refuted=refutations(dict(certificate)),
        signer=Markup(certificate["signature"]["public_key"]),
        private=bool(claim["private"]),
        unit=str(certificate["unit"]),
        one=noun_of(str(certificate["unit"])),
        neighbours=str(certificate["adjacency"]),
        data=str(about.get("data") or "not stated (the config's about section)"),
        measured=[(_title(name), f"{value:.4f}") for name, value in measured.items() if name != SIGNAL],
        chosen=chosen,
        pixels=None if finished.model.shape.reads_texts else _pixels(finished),
        closer=finished.closer,
        classes=len(finished.class_names),
    )
    (out / NAME).write_text(page, encoding="utf-8")


def _task(finished: Finished) -> str:
    if isinstance(finished.model, LanguageModel):
        return "text-generation"
    if finished.model.shape.sees_and_writes:
        return "image-text-to-text"
    return "image-classification" if isinstance(finished.model, Classifier) else "image-feature-extraction"


def _what(finished: Finished) -> str:
    shape = finished.model.shape
    sees = f"texts of {shape.text_length} tokens" if shape.reads_texts else f"pictures of {shape.image_size} pixels"
    tensors = sum(parameter.numel() for parameter in finished.model.parameters())
    if shape.named is not None:
        body = str(shape.named)
    elif shape.resnet is not None:
        body = f"ResNet, {shape.encoder.width} features"
    else:
        body = (
            f"vision transformer of {shape.encoder.depth} blocks, width {shape.encoder.width}, {shape.encoder.heads} "
            f"heads, patches of {shape.patch_size} pixels"
        )
    if isinstance(finished.model, Classifier):
        kind = f"classifier of {shape.head.classes} classes"
    elif isinstance(finished.model, LanguageModel):
        kind = "language model"
    else:
        kind = "image captioner" if isinstance(finished.model, Captioner) else "masked autoencoder"
    return (
        f"{kind[0].upper()}{kind[1:]}: {body}; {sees}; {tensors:,} parameters. "
        f"The last phase trained {finished.trained:,} weights"
    )


def _pixels(finished: Finished) -> str:
    seen, size = finished.seen, finished.model.shape.image_size
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (seen.mean, seen.std))
    return (
        f"upright, in RGB; the shorter side resized to {seen.shorter_side(size)} (bicubic), the middle {size} x {size} "
        f"cut out, values from 0 to 1 less the mean ({mean}), divided by ({std})"
    )


def _title(name: str) -> str:
    known = {LOSS: "loss on public held-out records", **TITLES}
    return known.get(name, printable(name.replace("_", " ")))
