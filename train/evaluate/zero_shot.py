"""Zero-shot labels of a captioner: by the least surprising name, or by the name that it writes itself (label_trie)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from murmuration.accounting.strict_json import JsonError, parse
from murmuration.data.decode.class_list import ClassList
from murmuration.data.text.encoder import TextEncoder
from murmuration.evaluation.interval import share
from murmuration.evaluation.label_trie import stops_of, trie_of, written_names
from murmuration.evaluation.text import CaptionModel, Text
from murmuration.evaluation.zero_shot import score_labels
from murmuration.model.captioner import Captioner
from murmuration.train.evaluate.errors import EvaluationError
from murmuration.train.evaluate.result import Outcome
from murmuration.train.evaluate.session import Chosen, Session, numbered

Way = Literal["label", "trie"]
TEMPLATES = ("this is a photo of a {}", "a photo of a {}")
"""The published prompt, and a shorter one for tokenizers that do not know all of its words."""
TRIE_RECORDS = 10_000
"""Drawn from all records unless another number is asked for, as published."""
Answer = Callable[[Tensor, Tensor], np.ndarray]
"""Images and their classes -> which of them are named right."""
NAMES = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class ZeroShotSettings:
    way: Way
    label: str
    templates: tuple[str, ...]
    names: Path | None
    """JSON: class to list of its names; None: the class's own name, with spaces for underscores."""


def read_names(path: Path | None, classes: ClassList) -> NAMES:
    """The names of each class, in the order of the classes."""
    if path is None:
        return tuple((name.replace("_", " "),) for name in classes.names)
    try:
        found = parse(path.read_bytes())
    except (OSError, JsonError) as error:
        raise EvaluationError(f"--names {path} cannot be read ({error}); write {{class: [name, …]}} as JSON") from None
    if not isinstance(found, dict):
        raise EvaluationError(f"--names {path} has no object; write {{class: [name, …]}} as JSON")
    if lacking := [name for name in classes.names if name not in found]:
        raise EvaluationError(f"--names {path} has nothing for the class {lacking[0]!r}; add it")
    named = []
    for name in classes.names:
        given = [found[name]] if isinstance(found[name], str) else found[name]
        if not isinstance(given, list) or not given or not all(isinstance(each, str) and each for each in given):
            raise EvaluationError(f"--names {path}: the names of {name!r} are no list of texts; write one")
        named.append(tuple(given))
    return tuple(named)


def unknown_words(words: str, text: Text) -> list[str]:
    def unknown(word: str) -> bool:
        ids = text.words(word)
        return not ids or text.unk in ids

    return [word for word in dict.fromkeys(words.replace("{}", " ").split()) if unknown(word)]


def usual_template(text: Text) -> str:
    """The first of TEMPLATES of which the tokenizer knows every word."""
    known = next((template for template in TEMPLATES if not unknown_words(template, text)), None)
    if known is None:
        lacking = ", ".join(map(repr, unknown_words(TEMPLATES[-1], text)))
        raise EvaluationError(
            f"the tokenizer does not know {lacking} of the usual {TEMPLATES[-1]!r}; give --template in words that the "
            "captions of its training have"
        )
    return known


def check_templates(templates: tuple[str, ...], way: Way) -> None:
    for template in templates:
        if template.count("{}") != 1:
            raise EvaluationError(f"--template {template!r} must contain {{}} once, where the name stands; add it")
        if way == "trie" and not template.endswith("{}"):
            raise EvaluationError(f"--template {template!r}: a trie writes the name last; end it with {{}}")
    if way == "trie" and len(templates) > 1:
        raise EvaluationError("a trie has one prompt; give one --template")


def label_scores(model: CaptionModel, images: Tensor, names: NAMES, templates: tuple[str, ...], text: Text) -> Tensor:
    """[B, classes] of nats per token, lower is better: the mean over templates, of the best of each class's names.

    As DP-Cap does, the mean is taken over the tokens of prompt and name together.
    """
    flat = [name for each in names for name in each]
    total: Tensor | None = None
    for template in templates:
        before, after = template.split("{}")
        scores = score_labels(
            model, images, before.strip(), [name + after for name in flat], text, count_prompt=True
        )  # fmt: skip
        total = scores if total is None else total + scores
    assert total is not None
    parts = (total / len(templates)).split([len(each) for each in names], dim=1)
    return torch.stack([part.min(dim=1).values for part in parts], dim=1)


def run_zero_shot(
    session: Session, chosen: Chosen, classes: ClassList | None, settings: ZeroShotSettings, text: TextEncoder
) -> Outcome:
    model = session.model.model
    if not isinstance(model, Captioner):
        raise EvaluationError("zero-shot labels are read from captions, and this model writes none; name a captioner")
    classes = numbered(chosen, classes, settings.label)
    names = read_names(settings.names, classes)
    check_templates(settings.templates, settings.way)
    answer = (
        _by_trie(model, names, settings, text) if settings.way == "trie" else _by_label(model, names, settings, text)
    )
    count = len(classes.names)
    right, seen = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)

    def act(ids: np.ndarray, inputs: dict[str, Tensor]) -> None:
        labels = inputs["labels"]
        correct = answer(inputs["images"], labels)
        np.add.at(seen, labels.cpu().numpy(), 1)
        np.add.at(right, labels.cpu().numpy()[correct], 1)

    told = {
        "way": settings.way, "label": settings.label, "classes": count, "templates": list(settings.templates),
        "names": sum(map(len, names)), "tokenizer": text.digest,
    }  # fmt: skip
    result = session.result("zero-shot", told, {"test": chosen})
    spec = session.labelled(settings.label, classes, count)
    result.data["test"]["unreadable"] = session.each(chosen, spec, "zero-shot", act)
    result.add("accuracy", share(int(right.sum()), int(seen.sum())))
    table = [["class", "right", "of"]]
    table += [[classes.names[each], str(right[each]), str(seen[each])] for each in range(count) if seen[each]]
    return Outcome(result, table=table)


def _by_label(model: Captioner, names: NAMES, settings: ZeroShotSettings, text: TextEncoder) -> Answer:
    for template, name in product(settings.templates, (name for each in names for name in each)):
        _require_room(model, len(_tokens(template.format(name), text)) + 1)

    def correct(images: Tensor, labels: Tensor) -> np.ndarray:
        best = label_scores(model, images, names, settings.templates, text).argmin(dim=1)
        return (best == labels).cpu().numpy()

    return correct


def _by_trie(model: Captioner, names: NAMES, settings: ZeroShotSettings, text: TextEncoder) -> Answer:
    tokens = [{_tokens(name, text) for name in each} for each in names]
    root = trie_of([name for each in tokens for name in each])
    opening = settings.templates[0].removesuffix("{}").strip()
    prompt = [text.start, *(_tokens(opening, text) if opening else ())]
    _require_room(model, len(prompt) + max(len(name) for each in tokens for name in each))
    stops = stops_of(text)

    def correct(images: Tensor, labels: Tensor) -> np.ndarray:
        found = written_names(model, images, prompt, root, stops)
        return np.array([name in tokens[label] for name, label in zip(found, labels.tolist(), strict=True)], dtype=bool)

    return correct


def _tokens(words: str, text: Text) -> tuple[int, ...]:
    ids = tuple(text.words(words))
    if not ids or text.unk in ids:
        lacking = ", ".join(map(repr, unknown_words(words, text))) or "all"
        raise EvaluationError(
            f"the tokenizer does not know {lacking} of {words!r}; give --template and --names in other words"
        )
    return ids


def _require_room(model: Captioner, tokens: int) -> None:
    if tokens > model.shape.text_length:
        raise EvaluationError(
            f"prompt and name have up to {tokens} tokens, and the model reads {model.shape.text_length}; shorten them"
        )
