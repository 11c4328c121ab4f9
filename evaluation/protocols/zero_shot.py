"""Zero-shot labels of a captioner: by the least surprising name, or by the name that it writes itself (label_trie)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from murmuration.data.text.encoder import TextEncoder
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.measures.interval import share
from murmuration.evaluation.models.weights import open_text
from murmuration.evaluation.session.result import Outcome
from murmuration.evaluation.session.session import Chosen, Session, Work, numbered
from murmuration.model.captioner import Captioner
from murmuration.train.measures.class_names import ClassNames, read_class_names, require_room, tokens_of, unknown_words
from murmuration.train.measures.zero_shot import class_scores

FULL_STOP = "."


Way = Literal["label", "trie"]
TEMPLATES = ("this is a photo of a {}", "a photo of a {}")
"""The published prompt, and a shorter one for tokenizers that do not know all of its words."""
TRIE_RECORDS = 10_000
"""Drawn from all records unless another number is asked for, as published."""
Answer = Callable[[Tensor, Tensor], np.ndarray]
"""Images and their classes -> which of them are named right."""


def usual_template(text: TextEncoder) -> str:
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


def run(session: Session, work: Work) -> Outcome:
    arguments, way = work.arguments, work.arguments.way
    chosen = Chosen.of(work.records["test"], arguments.records or (TRIE_RECORDS if way == "trie" else None))
    text = open_text(session.subject, session.model, arguments.tokenizer)
    templates = tuple(arguments.template or (usual_template(text),))
    model = session.model.model
    if not isinstance(model, Captioner):
        raise EvaluationError("zero-shot labels are read from captions, and this model writes none; name a captioner")
    classes = numbered(chosen, work.classes, arguments.label)
    names = read_class_names(arguments.names, classes.names, "--names")
    check_templates(templates, way)
    answer = (_by_trie if way == "trie" else _by_label)(model, names, templates, text)
    count = len(classes.names)

    def act(ids: np.ndarray, inputs: dict[str, Tensor], before: int) -> list[Any]:
        labels = inputs["labels"]
        return list(zip(labels.tolist(), answer(inputs["images"], labels).tolist(), strict=True))

    told = {
        "way": way, "label": arguments.label, "classes": count, "templates": list(templates),
        "names": sum(map(len, names)), "tokenizer": text.digest,
    }  # fmt: skip
    result = session.result("zero-shot", told, {"test": chosen})
    spec = session.labelled(arguments.label, classes, count)
    answers = session.answers(result, chosen, spec, act, depends_on=names)
    seen = np.bincount([label for _, (label, _) in answers], minlength=count)
    right = np.bincount([label for _, (label, correct) in answers if correct], minlength=count)
    result.add("accuracy", share(int(right.sum()), int(seen.sum())))
    table = [["class", "right", "of"]]
    table += [[classes.names[each], str(right[each]), str(seen[each])] for each in range(count) if seen[each]]
    return Outcome(result, table=table)


def _by_label(model: Captioner, names: ClassNames, templates: tuple[str, ...], text: TextEncoder) -> Answer:
    for template, name in product(templates, (name for each in names for name in each)):
        require_room(len(tokens_of(template.format(name), text)) + 1, model.shape.text_length)

    def correct(images: Tensor, labels: Tensor) -> np.ndarray:
        best = class_scores(model, images, names, templates, text).argmin(dim=1)
        return (best == labels).cpu().numpy()

    return correct


def _by_trie(model: Captioner, names: ClassNames, templates: tuple[str, ...], text: TextEncoder) -> Answer:
    tokens = [{tokens_of(name, text) for name in each} for each in names]
    root = trie_of([name for each in tokens for name in each])
    opening = templates[0].removesuffix("{}").strip()
    prompt = [text.start, *(tokens_of(opening, text) if opening else ())]
    require_room(len(prompt) + max(len(name) for each in tokens for name in each), model.shape.text_length)
    stops = stops_of(text)

    def correct(images: Tensor, labels: Tensor) -> np.ndarray:
        found = written_names(model, images, prompt, root, stops)
        return np.array([name in tokens[label] for name, label in zip(found, labels.tolist(), strict=True)], dtype=bool)

    return correct


# Zero-shot labels written token by token: of all tokens, only those that continue a label's name may follow.
#
# The names' tokens form a trie. From the prompt on, the most probable of the current node's children is taken; where
# a name ends, the model may also stop, by the end token, a full stop or padding. The answer is right if the written
# tokens are one of the true class's names.


@dataclass
class Node:
    children: dict[int, Node] = field(default_factory=dict)
    ends: bool = False
    """Whether a name ends here."""


def trie_of(names: Sequence[tuple[int, ...]]) -> Node:
    root = Node()
    for name in names:
        node = root
        for token in name:
            node = node.children.setdefault(token, Node())
        node.ends = True
    return root


def stops_of(text: TextEncoder) -> tuple[int, ...]:
    """The tokens that may follow a whole name."""
    stop = text.words(FULL_STOP)
    return (text.end, text.pad, *(stop if len(stop) == 1 and stop[0] != text.unk else ()))


@torch.no_grad()
def written_names(
    model: Captioner, images: Tensor, prompt: Sequence[int], root: Node, stops: Sequence[int]
) -> list[tuple[int, ...]]:
    """The tokens of the name that is written for each image; `prompt` begins with the start token."""
    memory = model.encode_images(images)
    nodes: list[Node] = [root] * len(images)
    written: list[list[int]] = [[] for _ in images]
    waiting = list(range(len(images))) if root.children else []
    while waiting:
        tokens = torch.tensor([[*prompt, *written[row]] for row in waiting], device=images.device)
        logits = model.decode(memory[waiting], tokens)[:, -1].float()
        going = []
        for row, scores in zip(waiting, logits, strict=True):
            node = nodes[row]
            allowed = [*sorted(node.children), *(sorted(stops) if node.ends else ())]
            taken = allowed[int(scores[allowed].argmax())]
            # A token that both continues the name and may end it continues it.
            if taken in node.children:
                nodes[row] = node.children[taken]
                written[row].append(taken)
                if nodes[row].children:
                    going.append(row)
        waiting = going
    return [tuple(tokens) for tokens in written]
