"""Zero-shot labels written token by token: of all tokens, only those that continue a label's name may follow.

The names' tokens form a trie. From the prompt on, the most probable of the current node's children is taken; where a
name ends, the model may also stop, by the end token, a full stop or padding. The answer is right if the written tokens
are one of the true class's names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from murmuration.data.text.encoder import TextEncoder
from murmuration.model.captioner import Captioner

FULL_STOP = "."


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
