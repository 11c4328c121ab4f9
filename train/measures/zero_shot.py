"""Zero-shot labels from a captioner: which label, written after a prompt, is the least surprising?

Why teacher forcing: every label is scored with the same image and prompt by the mean cross-entropy of its
own tokens, so labels of different lengths are comparable, and nothing is sampled. The image is encoded once and its
memory shared by all labels. Axes are predicted in order, each prompt holding the words already predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from murmuration.data.text.encoder import TextEncoder
from murmuration.model.captioner import Captioner
from murmuration.train.measures.class_names import ClassNames

PROMPT = "a photo of a"


@torch.no_grad()
def score_labels(
    model: Captioner,
    images: Tensor,
    prompts: str | Sequence[str],
    labels: Sequence[str],
    text: TextEncoder,
    *,
    rows: int = 256,
    count_prompt: bool = False,
) -> Tensor:
    """[B, labels] of mean cross-entropy in nats, lower is better; `prompts` is one text or one per image.

    `rows` bounds the (image, label) pairs decoded at once. `count_prompt` takes the mean over prompt and
    label tokens together, as DP-Cap's per-label protocol does.
    """
    each = [prompts] * len(images) if isinstance(prompts, str) else list(prompts)
    if len(each) != len(images):
        raise ValueError(f"got {len(each)} prompts for {len(images)} images; pass one prompt, or one per image.")
    if not labels:
        raise ValueError("there are no labels to score; pass at least one.")
    endings = [_ids(text, label) for label in labels]
    scores = []
    per_batch = max(1, rows // len(labels))
    for start in range(0, len(images), per_batch):
        openings = [[text.start, *text.words(prompt)] for prompt in each[start : start + per_batch]]
        memory = model.encode_images(images[start : start + per_batch])
        scores.append(_score(model, memory, openings, endings, text.pad, count_prompt))
    return torch.cat(scores) if scores else images.new_zeros(0, len(labels))


def _ids(text: TextEncoder, label: str) -> list[int]:
    ids = text.words(label)
    # An unknown word would be scored as <unk>, the same for every such label: a silent tie.
    if not ids or text.unk in ids:
        raise ValueError(f'the tokenizer has no tokens for the label "{label}"; use words of its vocabulary.')
    return ids


def _score(
    model: Captioner,
    memory: Tensor,
    openings: list[list[int]],
    endings: list[list[int]],
    pad: int,
    whole: bool,
) -> Tensor:
    """One decoder pass over every (image, label) pair of a chunk."""
    rows = [(opening, ending) for opening in openings for ending in endings]
    width = max(len(opening) + len(ending) for opening, ending in rows)
    tokens = torch.full((len(rows), width), pad, dtype=torch.int64)
    counted = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (opening, ending) in enumerate(rows):
        stop = len(opening) + len(ending)
        tokens[row, :stop] = torch.tensor(opening + ending)
        counted[row, 1 if whole else len(opening) : stop] = True
    tokens, counted = tokens.to(memory.device), counted.to(memory.device)[:, 1:]
    logits = model.decode(memory.repeat_interleave(len(endings), dim=0), tokens[:, :-1])
    entropy = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    total = torch.where(counted, entropy.view(counted.shape), 0.0).sum(dim=1)
    return (total / counted.sum(dim=1)).view(len(openings), len(endings))


def class_scores(
    model: Captioner, images: Tensor, names: ClassNames, templates: tuple[str, ...], text: TextEncoder
) -> Tensor:
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


def zero_shot(
    model: Captioner,
    images: Tensor,
    labels_per_axis: Mapping[str, Sequence[str]],
    text: TextEncoder,
    *,
    prompt: str = PROMPT,
) -> dict[str, Tensor]:
    """Axis -> predicted label numbers [B], in the axes' order (for example colour, then shape).

    The first axis is asked after `prompt`; each later one after `prompt` and the labels predicted so far.
    """
    prompts = [prompt] * len(images)
    predicted: dict[str, Tensor] = {}
    for axis, labels in labels_per_axis.items():
        best = score_labels(model, images, prompts, labels, text).argmin(dim=1)
        predicted[axis] = best
        prompts = [f"{before} {labels[number]}" for before, number in zip(prompts, best.tolist(), strict=True)]
    return predicted
