"""Modules of all kinds, with records that show the worst of each: what `PrivateTraining` may be given.

`HOSTILE` ones try to let records meet, or to keep something of them. `ORDINARY` ones are what people train.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

RECORDS, TOKENS, WIDTH, CLASSES, WORDS = 6, 12, 12, 4, 50
PAD = 1
BOUND = 0.1
"""The clipping norm in tests of these."""
Inputs = dict[str, Tensor]


def texts() -> Inputs:
    """Lengths that differ by a lot, padding that is not 0, a class and a label that are rare."""
    tokens = torch.randint(2, WORDS, (RECORDS, TOKENS))
    for row, length in enumerate([2, TOKENS, 3, TOKENS, 7, TOKENS]):
        tokens[row, length:] = PAD
    targets = torch.where(tokens == PAD, -100, tokens % CLASSES)
    targets[1, 1:] = -100
    return {"tokens": tokens, "targets": targets, "label": torch.tensor([3, 0, -1, 3, 1, 2])}


def pictures() -> Inputs:
    """The first ones are faint."""
    images = torch.randn(RECORDS, 3, 16, 16)
    images[:3] *= 1e-5
    return {"images": images, "label": torch.tensor([3, 0, 1, 3, 1, 2])}


def rows() -> Inputs:
    return {"x": torch.randn(RECORDS, TOKENS, WIDTH), "label": torch.tensor([3, 0, 1, 3, 1, 2])}


class Text(nn.Module):
    data = staticmethod(texts)

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )

    def hidden(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.inner(self.words(tokens)))

    def losses(self, hidden: Tensor, inputs: Inputs) -> Tensor:
        return F.cross_entropy(self.head(hidden.mean(1)), inputs["label"].clamp(min=0), reduction="none")

    def forward(self, inputs: Inputs) -> Tensor:
        return self.losses(self.hidden(inputs["tokens"]), inputs)


class TokensOfTheBatch(Text):
    """The usual loss of a language model: divided by the tokens of the whole batch."""

    def forward(self, inputs: Inputs) -> Tensor:
        tokens = inputs["tokens"]
        mask = (tokens != PAD).float()
        losses = F.cross_entropy(
            self.head(self.hidden(tokens)).transpose(1, 2), tokens % CLASSES, reduction="none"
        )  # fmt: skip
        return (losses * mask).sum(1) / mask.sum().clamp(min=1) * len(tokens)


class IgnoredLabels(Text):
    def forward(self, inputs: Inputs) -> Tensor:
        scores = self.head(self.hidden(inputs["tokens"])).transpose(1, 2)
        losses = F.cross_entropy(scores, inputs["targets"], ignore_index=-100, reduction="none")
        return losses.sum(1) / (inputs["targets"] != -100).sum().clamp(min=1) * len(losses)


class MeanOfLabelled(Text):
    def forward(self, inputs: Inputs) -> Tensor:
        scores = self.head(self.hidden(inputs["tokens"])).transpose(1, 2)
        return F.cross_entropy(scores, inputs["targets"], ignore_index=-100).nan_to_num().expand(len(scores))


class SortedByLength(Text):
    def forward(self, inputs: Inputs) -> Tensor:
        order = (inputs["tokens"] != PAD).sum(1).argsort()
        back = order.argsort()
        hidden = self.hidden(inputs["tokens"][order])
        return self.losses(hidden, {"label": inputs["label"][order]})[back]


class KnownLabelsFirst(Text):
    def forward(self, inputs: Inputs) -> Tensor:
        order = (inputs["label"] < 0).long().argsort(stable=True)
        return self.losses(self.hidden(inputs["tokens"][order]), {"label": inputs["label"][order]})[order.argsort()]


class SortedBehindTheEmbedding(Text):
    def forward(self, inputs: Inputs) -> Tensor:
        words = self.words(inputs["tokens"])
        order = words.detach().sum((1, 2)).argsort()
        hidden = torch.tanh(self.inner(words[order]))[order.argsort()]
        return self.losses(hidden, inputs)


class RareContrast(Text):
    def forward(self, inputs: Inputs) -> Tensor:
        hidden = self.hidden(inputs["tokens"])
        features, rare = hidden.mean(1), (inputs["label"] == 3).float()
        likeness = features @ features.T
        return self.losses(hidden, inputs) + rare * (likeness * rare).sum(1)


class PaddingDropped(Text):
    def forward(self, inputs: Inputs) -> Tensor:
        tokens = inputs["tokens"]
        hidden = self.hidden(tokens[tokens != PAD])
        return self.head(hidden).square().mean().expand(len(tokens))


class PackedByLengths(Text):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, inputs: Inputs) -> Tensor:
        lengths = (inputs["tokens"] != PAD).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(
            self.words(inputs["tokens"]), lengths, batch_first=True, enforce_sorted=False
        )  # fmt: skip
        return self.losses(self.cell(packed)[1][0].transpose(0, 1), inputs)


class BranchOnTheBatch(nn.Module):
    data = staticmethod(pictures)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(784, CLASSES))

    def forward(self, inputs: Inputs) -> Tensor:
        x = inputs["images"]
        if x.std() < 1e-3:
            x = x / x.std()
        return F.cross_entropy(self.net(x), inputs["label"], reduction="none")


class ScaledByTheBatch(BranchOnTheBatch):
    def forward(self, inputs: Inputs) -> Tensor:
        x = inputs["images"] / inputs["images"].std()
        return F.cross_entropy(self.net(x), inputs["label"], reduction="none")


class HardExamples(Text):
    def forward(self, inputs: Inputs) -> Tensor:
        losses = super().forward(inputs)
        return losses * (losses >= losses.topk(min(3, len(losses))).values[-1])


class ChosenByNumber(Text):
    def forward(self, inputs: Inputs) -> Tensor:
        losses = super().forward(inputs)
        return losses * float(losses.max().item())


class FrozenCounter(Text):
    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, inputs: Inputs) -> Tensor:
        with torch.no_grad():
            self.counts += (inputs["label"] == 3).sum()
        return super().forward(inputs)


class BufferCounter(Text):
    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(1))

    def forward(self, inputs: Inputs) -> Tensor:
        self.counts.copy_(self.counts + (inputs["label"] == 3).sum())
        return super().forward(inputs)


class DataCounter(FrozenCounter):
    def forward(self, inputs: Inputs) -> Tensor:
        self.counts.data[0] = (inputs["label"] == 3).sum()
        return Text.forward(self, inputs)


class DataReplaced(FrozenCounter):
    """As a centre that follows what records are like."""

    def forward(self, inputs: Inputs) -> Tensor:
        self.counts.data = inputs["tokens"].float().mean().view(1)
        return Text.forward(self, inputs)


class ReplacedBuffer(BufferCounter):
    """The next pass meets what this one left."""

    def forward(self, inputs: Inputs) -> Tensor:
        kept, self.counts = self.counts, inputs["tokens"].float().mean().view(1)
        return Text.forward(self, inputs) * (1 + kept)


class FrozenMaxNorm(Text):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, max_norm=1.0)
        self.words.weight.requires_grad_(False)


class TrainedMaxNorm(Text):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, max_norm=1.0)


class ByFrequency(Text):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, scale_grad_by_freq=True)


class SpectralNorm(Text):
    """It keeps nothing of records, but each pass moves its vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.utils.parametrizations.spectral_norm(self.head)


class MovedPrototypes(Text):
    trained = True

    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(CLASSES, WIDTH), requires_grad=self.trained)

    def forward(self, inputs: Inputs) -> Tensor:
        hidden = self.hidden(inputs["tokens"])
        features, rare = hidden.mean(1), (inputs["label"] == 3).unsqueeze(1)
        with torch.no_grad():
            self.prototypes[3] = 0.9 * self.prototypes[3] + 0.1 * (features.detach() * rare).sum(0)
        return self.losses(hidden, inputs) + (features * self.prototypes[3]).sum(1)


class MovedFrozenPrototypes(MovedPrototypes):
    trained = False


class Queue(Text):
    after = 0

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[Tensor] = []

    def forward(self, inputs: Inputs) -> Tensor:
        hidden = self.hidden(inputs["tokens"])
        features = hidden.mean(1)
        self.queue.append(features.detach())
        old = self.queue[-2] if len(self.queue) > 1 + self.after else torch.zeros(1, WIDTH)
        return self.losses(hidden, inputs) + (features * old).sum(1)


class LateQueue(Queue):
    after = 3


KEPT: list[Tensor] = []


class GlobalList(Queue):
    def __init__(self) -> None:
        super().__init__()
        self.queue = KEPT
        KEPT.clear()


class LastLabels(Text):
    """Of an input that no function of this pass is given."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None

    def forward(self, inputs: Inputs) -> Tensor:
        last, self.last = self.last, inputs["label"]
        losses = super().forward({**inputs, "label": inputs["tokens"][:, 0] % CLASSES})
        return losses if last is None else losses * (2 + last)


class LastLabelsOfALayer(LastLabels):
    """Kept where a checkpointed layer runs again, in the backward pass."""

    def forward(self, inputs: Inputs) -> Tensor:
        last, label = self.last, inputs["label"]

        def layer(x: Tensor, label: Tensor) -> Tensor:
            self.last = label
            return x.tanh()

        hidden = checkpoint(layer, self.hidden(inputs["tokens"]), label, use_reentrant=False)
        losses = self.losses(hidden, {**inputs, "label": inputs["tokens"][:, 0] % CLASSES})
        return losses if last is None else losses * (2 + last)


class RunningMean(Text):
    def __init__(self) -> None:
        super().__init__()
        self.mean: Any = None

    def forward(self, inputs: Inputs) -> Tensor:
        hidden = self.hidden(inputs["tokens"])
        mean = hidden.detach().mean(1)
        self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
        return self.losses(hidden, inputs) + (hidden.mean(1) * self.mean).sum(1)


class LateMixup(Text):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, inputs: Inputs) -> Tensor:
        self.calls += 1
        hidden = self.hidden(inputs["tokens"])
        if self.calls > 2:
            hidden = 0.5 * (hidden + hidden.roll(1, 0))
        return self.losses(hidden, inputs)


class OfTheBatch(Text):
    """A function of the batch's hidden states, written in one line."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act

    def forward(self, inputs: Inputs) -> Tensor:
        return self.losses(self.act(self.hidden(inputs["tokens"])), inputs)


class GradientInside(Text):
    """A penalty on a gradient that autograd is asked for in forward()."""

    def forward(self, inputs: Inputs) -> Tensor:
        hidden = self.hidden(inputs["tokens"])
        losses = self.losses(hidden, inputs)
        slope = torch.autograd.grad(losses.sum(), hidden, create_graph=True)[0]
        return losses + slope.square().sum((1, 2))


class Unfreezing(Text):
    def hidden(self, tokens: Tensor) -> Tensor:
        self.inner.weight.requires_grad_()
        return super().hidden(tokens)


class InBatchNegatives(Text):
    def forward(self, inputs: Inputs) -> Tensor:
        hidden = self.hidden(inputs["tokens"])
        one, other = F.normalize(hidden[:, 0]), F.normalize(hidden[:, -1])
        scores = one @ other.T
        return F.cross_entropy(scores, torch.arange(len(scores)), reduction="none") + self.losses(hidden, inputs)


class ContrastAlone(Text):
    """Compares records and does nothing else: the softmax over one pair is 1, whatever the weights."""

    def forward(self, inputs: Inputs) -> Tensor:
        hidden = self.hidden(inputs["tokens"])
        scores = self.head(hidden[:, 0]) @ self.head(hidden[:, -1]).T
        return F.cross_entropy(scores, torch.arange(len(scores)), reduction="none")


class Overflowing(Text):
    def forward(self, inputs: Inputs) -> Tensor:
        return super().forward(inputs) + (1e4 * self.hidden(inputs["tokens"]).square()).exp().sum((1, 2))


class LastHidden(Text):
    """Shows what it computed last, as extractors and recorders of attention do."""

    def hidden(self, tokens: Tensor) -> Tensor:
        self.latents = super().hidden(tokens)
        return self.latents


class Empty(Text):
    """As a transformer whose number of register tokens is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.registers = nn.Parameter(torch.zeros(0, WIDTH))

    def hidden(self, tokens: Tensor) -> Tensor:
        hidden = super().hidden(tokens)
        return torch.cat([self.registers.expand(len(hidden), -1, -1), hidden], 1)


class OneMean(Text):
    def forward(self, inputs: Inputs) -> Tensor:
        return super().forward(inputs).mean()


class Normalised(nn.Module):
    data = staticmethod(pictures)

    def __init__(self, layer: nn.Module, frozen: bool = False) -> None:
        super().__init__()
        self.conv, self.layer, self.head = nn.Conv2d(3, 4, 3, padding=1), layer, nn.Linear(4, CLASSES)
        if frozen:
            layer.requires_grad_(False)
            layer.eval()

    def forward(self, inputs: Inputs) -> Tensor:
        x = self.layer(self.conv(inputs["images"])).relu().mean((2, 3))
        return F.cross_entropy(self.head(x), inputs["label"], reduction="none")


class HookedTensor(Text):
    def hidden(self, tokens: Tensor) -> Tensor:
        found = super().hidden(tokens)
        found.register_hook(lambda gradient: gradient / gradient.norm())
        return found


class HookedModule(Text):
    def __init__(self) -> None:
        super().__init__()
        self.inner.register_full_backward_hook(lambda module, given, out: (given[0] / given[0].norm(),))


class HookedThroughPyTorch(Text):
    """`distribute_module` wraps a function of the module's own in a hook of its package."""

    def __init__(self) -> None:
        super().__init__()
        self.hooked = nn.Identity()

        def neighbour_added(module: nn.Module, given: Any, mesh: Any) -> Any:
            del module, mesh
            return given[0] + 0.5 * given[0].roll(1, 0)

        if dist.is_initialized():
            distribute_module(self.hooked, init_device_mesh("cpu", (dist.get_world_size(),)), input_fn=neighbour_added)
        else:
            self.hooked.register_forward_pre_hook(lambda module, given: neighbour_added(module, given, None))

    def hidden(self, tokens: Tensor) -> Tensor:
        return self.hooked(super().hidden(tokens))


class Capped(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del ctx, inputs, output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient / gradient.norm()


class RuledCapped(Capped):
    generate_vmap_rule = True


class RuledByItself(Capped):
    """A rule for vmap sees all records."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return x / x.norm(), in_dims[0]


@torch.library.custom_op("zoo::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    return x.clone()


scaled.register_autograd(lambda ctx, gradient: gradient)


@scaled.register_vmap
def _(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
    return x / x.norm(), in_dims[0]


torch.library.define("zoo::divided", "(Tensor x) -> Tensor")
torch.library.impl("zoo::divided", "cpu")(lambda x: x.clone())
torch.library.register_autograd("zoo::divided", lambda ctx, gradient: gradient)
torch.library.register_vmap("zoo::divided", lambda info, in_dims, x: (x / x.norm(), in_dims[0]))


class InPlace(torch.autograd.Function):
    """Weights its gradient, which is also that of whatever else was added up with its result."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        del weight
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.mul_(ctx.saved_tensors[0]), None


class RareClassWeighted(Text):
    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Inputs) -> Tensor:
        features, label = self.hidden(inputs["tokens"]).mean(1), inputs["label"]
        weight = torch.where(label == 3, 50.0, 1.0).unsqueeze(1)
        scores = InPlace.apply(self.side(features), weight) + self.head(features)
        return F.cross_entropy(scores, label.clamp(min=0), reduction="none")


class BelowVmap(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def dispatched(x: Tensor) -> Tensor:
    with BelowVmap():
        return x * 1.0


def by_distance(x: Tensor, distance: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Weighted by a loss that is given a function."""
    loss = F.triplet_margin_with_distance_loss
    return x * loss(x, x.roll(1, -1), x.flip(-1), distance_function=distance, reduction="none").unsqueeze(-1)


def quantised(x: Tensor) -> Tensor:
    return x + torch.quantize_per_tensor_dynamic(x.detach(), torch.qint8, False).dequantize()


def of_all_ranks(x: Tensor) -> Tensor:
    return x + torch.ops._c10d_functional.all_reduce(x.detach(), "sum", "0")


def saved_otherwise(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t / t.norm(), lambda t: t):
        return x.tanh()


def swapped_in(model: ReplacedBuffer, inputs: Inputs) -> Tensor:
    torch.utils.swap_tensors(model.counts, inputs["tokens"].float().mean().view(1))
    return Text.forward(model, inputs)


class SwappedBuffer(ReplacedBuffer):
    forward = swapped_in


KEPT_FOR_GRAD: list[Tensor] = []


def through_grad(x: Tensor) -> Tensor:
    KEPT_FOR_GRAD.append(x.detach())
    if len(KEPT_FOR_GRAD) > 1:
        x = x + torch.func.grad(lambda old: (old * old).sum())(KEPT_FOR_GRAD[-2])
    return x


# What people train.


class Layers(nn.Module):
    """A net between a first linear layer and a head, on sequences."""

    data = staticmethod(rows)

    def __init__(self, net: nn.Module, run: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.net, self.head = nn.Linear(WIDTH, WIDTH), net, nn.Linear(WIDTH, CLASSES)
        self.run = run or (lambda net, x: net(x))

    def forward(self, inputs: Inputs) -> Tensor:
        x = self.run(self.net, self.first(inputs["x"]))
        return F.cross_entropy(self.head(x.flatten(1, -2).mean(1)), inputs["label"], reduction="none")


def only_of_weights(net: nn.Module, x: Tensor) -> Tensor:
    """As a straight-through estimator that is skipped for what is an input."""
    assert not x.detach().requires_grad
    found = net(x)
    return found + (found.round() - found).detach() if found.requires_grad else found


def padded(net: nn.Module, x: Tensor) -> Tensor:
    short = pad_sequence([*net(x)[:, 3:], *net(x)], batch_first=True, padding_value=0.5)
    return (short * pad_sequence([*x, *x[:, 5:]], batch_first=True, padding_side="left")).mean(0, keepdim=True)


class Reordered(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        last = {"memory_format": torch.channels_last}
        return x.to(**last) + x.contiguous(**last) + x.clone(**last)


class Free(nn.Module):
    """Free parameters, used in a way of one's own."""

    data = staticmethod(rows)

    def __init__(self, shape: tuple[int, ...], use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.head, self.use = nn.Parameter(torch.randn(shape) / 4), nn.Linear(WIDTH, CLASSES), use

    def forward(self, inputs: Inputs) -> Tensor:
        x = self.use(self.weight, inputs["x"])
        return F.cross_entropy(self.head(x.mean(1)), inputs["label"], reduction="none")


class Convolutions(nn.Module):
    data = staticmethod(pictures)

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)

    def forward(self, inputs: Inputs) -> Tensor:
        x = self.net(inputs["images"])
        return F.cross_entropy(x.flatten(2).mean(2) if x.dim() > 2 else x, inputs["label"], reduction="none")


class Cells(nn.Module):
    data = staticmethod(rows)

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Inputs) -> Tensor:
        state: Any = None
        for step in inputs["x"].unbind(1):
            state = self.cell(step, state)
        out = state[0] if isinstance(state, tuple) else state
        return F.cross_entropy(self.head(out), inputs["label"], reduction="none")


class Detector(nn.Module):
    """Boxes that are matched to the nearest anchors; the loss is divided by their number, in a record."""

    @staticmethod
    def data() -> Inputs:
        boxes = torch.rand(RECORDS, 3, 4)
        return {"images": torch.randn(RECORDS, 3, 16, 16), "boxes": boxes, "real": torch.rand(RECORDS, 3) > 0.5}

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 8, 4, stride=4)
        self.boxes, self.scores = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 1, 1)

    def forward(self, inputs: Inputs) -> Tensor:
        x = self.body(inputs["images"]).relu()
        boxes = self.boxes(x).flatten(2).transpose(1, 2).sigmoid()
        scores = self.scores(x).flatten(1)
        nearest = torch.cdist(inputs["boxes"], boxes.detach()).argmin(2)
        real = inputs["real"].float()
        own = boxes.gather(1, nearest[..., None].expand(-1, -1, 4))
        place = (F.smooth_l1_loss(own, inputs["boxes"], reduction="none").sum(2) * real).sum(1) / real.sum(1).clamp(
            min=1
        )
        target = torch.zeros_like(scores).scatter(1, nearest, real)
        return place + F.binary_cross_entropy_with_logits(scores, target, reduction="none").mean(1)


class Experts(nn.Module):
    """The best of four experts by weight, all of which are computed."""

    data = staticmethod(rows)

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(4))

    def forward(self, inputs: Inputs) -> Tensor:
        weights, best = self.gate(inputs["x"]).softmax(-1).max(-1)
        outs = torch.stack([expert(inputs["x"]) for expert in self.experts], 2)
        chosen = outs.gather(2, best[..., None, None].expand(-1, -1, 1, CLASSES)).squeeze(2)
        return F.cross_entropy((chosen * weights[..., None]).mean(1), inputs["label"], reduction="none")


class RoutedExperts(Experts):
    def forward(self, inputs: Inputs) -> Tensor:
        x, best = inputs["x"], self.gate(inputs["x"]).argmax(-1)
        out = torch.zeros(*x.shape[:2], CLASSES)
        for number, expert in enumerate(self.experts):
            out[best == number] = expert(x[best == number])
        return F.cross_entropy(out.mean(1), inputs["label"], reduction="none")


class Counted(Text):
    def forward(self, inputs: Inputs) -> Tensor:
        counts = torch.bincount(inputs["tokens"][0]).float()
        return self.losses(self.hidden(inputs["tokens"]) * counts.mean(), inputs)


class UnknownWord(Text):
    """One record has a word that the table lacks; then none is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("known", torch.randn(WORDS, WIDTH))

    def forward(self, inputs: Inputs) -> Tensor:
        tokens = inputs["tokens"].clone()
        tokens[:, 0] += (inputs["label"] == -1) * WORDS
        return self.losses(self.hidden(inputs["tokens"]) + self.look_up(tokens), inputs)

    def look_up(self, words: Tensor) -> Tensor:
        try:
            return self.known[words]
        except IndexError:
            return torch.zeros(*words.shape, WIDTH)


class LooksUp(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(words: Tensor, known: Tensor) -> Tensor:
        try:
            return known[words]
        except IndexError:
            return known.new_zeros(*words.shape, known.shape[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is learnt of it."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None


@torch.jit.script
def scripted_rows(known: Tensor, words: Tensor) -> Tensor:
    return known[words]


class UnknownWordScripted(UnknownWord):
    def look_up(self, words: Tensor) -> Tensor:
        try:
            return scripted_rows(self.known, words)
        except RuntimeError:
            return torch.zeros(*words.shape, WIDTH)


class UnknownWordWithin(UnknownWord):
    def look_up(self, words: Tensor) -> Tensor:
        return LooksUp.apply(words, self.known)


class Whitened(Text):
    """Adds to the diagonal where the factorisation fails, as it does for the matrix of one record."""

    data = staticmethod(rows)

    def forward(self, inputs: Inputs) -> Tensor:
        x = self.inner(inputs["x"])
        fails = (inputs["label"] == 2)[:, None, None]
        within = x.detach().transpose(1, 2) @ x.detach() + torch.where(fails, -100.0, 1.0) * torch.eye(WIDTH)
        try:
            factor = torch.linalg.cholesky(within)
        except torch.linalg.LinAlgError:
            factor = torch.linalg.cholesky(within + 1000 * torch.eye(WIDTH))
        unused = self.words.weight.sum() * 0
        return self.losses(torch.linalg.solve_triangular(factor, x, upper=False, left=False), inputs) + unused


class PenaltyOnTheInput(Text):
    """A gradient of its own within the loss."""

    data = staticmethod(rows)

    def forward(self, inputs: Inputs) -> Tensor:
        def score(x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.inner(x))).square().mean()

        slope, value = torch.func.grad_and_value(score)(inputs["x"])
        unused = self.words.weight.sum() * 0
        return (slope.square().sum() + value + unused).expand(len(inputs["x"]))


class Tied(Text):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, inputs: Inputs) -> Tensor:
        tokens = inputs["tokens"]
        scores = self.head(self.hidden(tokens)).transpose(1, 2)
        mask = (tokens != PAD).float()
        return (F.cross_entropy(scores, tokens, reduction="none") * mask).sum(1) / mask.sum(1).clamp(min=1)


class Timm(nn.Module):
    def __init__(self, name: str, side: int = 32, evaluated: bool = False, **settings: Any) -> None:
        super().__init__()
        import timm

        self.side = side
        self.net = timm.create_model(name, num_classes=CLASSES, **settings)
        if evaluated:
            for part in self.net.modules():
                if isinstance(part, nn.modules.batchnorm._BatchNorm):
                    part.eval().requires_grad_(False)

    def data(self) -> Inputs:
        return {"images": torch.randn(3, 3, self.side, self.side), "label": torch.tensor([3, 0, 1])}

    def forward(self, inputs: Inputs) -> Tensor:
        return F.cross_entropy(self.net(inputs["images"]), inputs["label"], reduction="none")


PICTURES = ("vit", "dinov2", "clip")


class HuggingFace(nn.Module):
    """A model of transformers: of pictures, or a language model with padding, whose loss is over a record's tokens."""

    def __init__(self, kind: str, pad: int = 0, **more: Any) -> None:
        super().__init__()
        import transformers as hf

        torch.manual_seed(0)
        self.pad, self.kind = pad, kind
        layers = dict(num_hidden_layers=2, num_attention_heads=2)
        text = dict(vocab_size=WORDS, hidden_size=16, intermediate_size=24, **layers)
        cached = dict(**text, num_key_value_heads=1, use_cache=False)
        image = dict(hidden_size=16, intermediate_size=24, image_size=28, patch_size=14, **layers)
        drops = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        masked = dict(**text, **drops, pad_token_id=pad)
        sizes: dict[str, tuple[type[Any], dict[str, Any]]] = {
            "llama": (hf.LlamaForCausalLM, cached),
            "qwen3": (hf.Qwen3ForCausalLM, cached | dict(head_dim=8)),
            "gemma2": (hf.Gemma2ForCausalLM, cached | dict(head_dim=8)),
            "mistral": (hf.MistralForCausalLM, cached),
            "mixtral": (hf.MixtralForCausalLM, cached | dict(num_local_experts=2)),
            "gpt2": (hf.GPT2LMHeadModel, dict(vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, use_cache=False,
                                              resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)),
            "bert": (hf.BertForMaskedLM, masked), "roberta": (hf.RobertaForMaskedLM, masked),
            "t5": (hf.T5ForConditionalGeneration, dict(vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=2,
                                                       num_heads=2, dropout_rate=0.0, use_cache=False,
                                                       decoder_start_token_id=0, pad_token_id=pad)),
            "vit": (hf.ViTForImageClassification, image | drops),
            "dinov2": (hf.Dinov2ForImageClassification, dict(hidden_size=16, image_size=28, patch_size=14,
                                                             use_mask_token=False, **layers, **drops)),
            "clip": (hf.CLIPForImageClassification, dict(vision_config=dict(**image, projection_dim=8))),
        }  # fmt: skip
        net, given = sizes[kind]
        labels = dict(num_labels=CLASSES) if kind in PICTURES else {}
        self.net: nn.Module = net(net.config_class(**given, **labels, **more))
        if kind == "clip":
            self.net = nn.ModuleDict({"vision": self.net.vision_model, "head": self.net.classifier})  # pyright: ignore[reportAttributeAccessIssue]

    def data(self) -> Inputs:
        if self.kind in PICTURES:
            return {"images": torch.randn(3, 3, 28, 28), "label": torch.tensor([3, 0, 1])}
        tokens = torch.randint(2, WORDS, (4, TOKENS))
        for row, length in enumerate([2, TOKENS, 3, 7]):
            tokens[row, length:] = self.pad
        return {"tokens": tokens}

    def forward(self, inputs: Inputs) -> Tensor:
        if self.kind == "clip":
            seen = self.net["vision"](pixel_values=inputs["images"]).last_hidden_state  # pyright: ignore[reportIndexIssue]
            return F.cross_entropy(self.net["head"](seen.mean(1)), inputs["label"], reduction="none")  # pyright: ignore[reportIndexIssue]
        if "images" in inputs:
            return F.cross_entropy(self.net(pixel_values=inputs["images"]).logits, inputs["label"], reduction="none")
        tokens = inputs["tokens"]
        mask = (tokens != self.pad).long()
        if self.kind == "t5":
            scores = self.net(input_ids=tokens, attention_mask=mask, labels=tokens).logits
        else:
            scores = self.net(input_ids=tokens, attention_mask=mask).logits
        losses = F.cross_entropy(scores.transpose(1, 2).float(), tokens, reduction="none")
        return (losses * mask).sum(1) / mask.sum()  # of the record's tokens, since there are no others


class Bag(Text):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, WIDTH)  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, inputs: Inputs) -> Tensor:
        return self.losses(self.hidden(inputs["tokens"]).unsqueeze(1), inputs)


def attention(**settings: Any) -> nn.Module:
    return Layers(nn.MultiheadAttention(WIDTH, 2, **settings), lambda net, x: net(x, x, x)[0])


def hostile() -> dict[str, Callable[[], nn.Module]]:
    batch = lambda act: lambda: OfTheBatch(act)  # noqa: E731
    return {
        "tokens of the batch": TokensOfTheBatch, "ignored labels": IgnoredLabels,
        "mean of the labelled": MeanOfLabelled,
        "sorted by length": SortedByLength, "known labels first": KnownLabelsFirst,
        "sorted behind the embedding": SortedBehindTheEmbedding, "contrast of a rare class": RareContrast,
        "padding dropped": PaddingDropped, "packed by lengths": PackedByLengths,
        "branch on the batch": BranchOnTheBatch, "scaled by the batch": ScaledByTheBatch, "hard examples": HardExamples,
        "a number read": ChosenByNumber, "frozen counter": FrozenCounter, "counter in a buffer": BufferCounter,
        "counter by .data": DataCounter, "weights moved by .data": DataReplaced,
        "buffer replaced": ReplacedBuffer, "frozen max_norm": FrozenMaxNorm,
        "trained max_norm": TrainedMaxNorm, "scaled by frequency": ByFrequency, "prototypes moved": MovedPrototypes,
        "frozen prototypes moved": MovedFrozenPrototypes, "queue": Queue, "late queue": LateQueue,
        "global list": GlobalList, "running mean": RunningMean, "late mixup": LateMixup,
        "a gradient inside": GradientInside, "weights thawed": Unfreezing,
        "negatives of the batch": InBatchNegatives, "one mean": OneMean,
        "centred over the batch": batch(lambda x: x - x.mean(0, keepdim=True)),
        "neighbour added": batch(lambda x: x + 0.5 * x.roll(1, 0)), "reversed": batch(lambda x: x.flip(0)),
        "softmax over the batch": batch(lambda x: x.softmax(0)), "cumulative": batch(lambda x: x.cumsum(0)),
        "batch norm": lambda: Normalised(nn.BatchNorm2d(4)), "sync batch norm": lambda: Normalised(nn.SyncBatchNorm(4)),
        "batch norm without statistics": lambda: Normalised(nn.BatchNorm2d(4, track_running_stats=False)),
        "instance norm with statistics": lambda: Normalised(nn.InstanceNorm2d(4, track_running_stats=True)),
        "dropout": lambda: Layers(nn.Dropout(0.5)), "rrelu": lambda: Layers(nn.RReLU()),
        "noise": batch(lambda x: x + torch.randn_like(x)),
        "hook on a tensor": HookedTensor, "hook on a module": HookedModule,
        "a hook through PyTorch": HookedThroughPyTorch,
        "function of one's own": batch(Capped.apply), "function with a rule": batch(RuledCapped.apply),
        "experts by index": RoutedExperts, "counted": Counted,
        "a word not found": UnknownWord, "one not found by a script": UnknownWordScripted,
        "one not found within a function": UnknownWordWithin, "not factorised": Whitened,
        "a rule of its own": batch(RuledByItself.apply),
        "an operator's rule": batch(scaled), "a dispatch mode": batch(dispatched),
        "hooks on saved tensors": batch(saved_otherwise), "buffer swapped": SwappedBuffer,
        "kept for a gradient": batch(through_grad), "printed": batch(lambda x: x * len(f"{x}")),
        "scripted": lambda: Layers(torch.jit.script(nn.Tanh())),
        "gradient changed in place": RareClassWeighted, "last labels": LastLabels,
        "last labels of a layer that runs again": LastLabelsOfALayer,
        "an operator's rule by its name": batch(torch.ops.zoo.divided),
        "a dispatch mode within vmap": batch(torch.vmap(dispatched)), "quantised": batch(quantised),
        "a dispatch mode within a distance": batch(
            lambda x: by_distance(x, lambda a, b: dispatched(a - b).square().sum(-1))
        ),
        "added over ranks": batch(of_all_ranks),
    }  # fmt: skip


def ordinary() -> dict[str, Callable[[], nn.Module]]:
    block = nn.TransformerEncoderLayer
    return {
        "text": Text, "tied": Tied, "detector": Detector, "experts by weight": Experts,
        "penalty on the input": PenaltyOnTheInput,
        "mlp": lambda: Layers(nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))),
        "layer norm": lambda: Layers(nn.LayerNorm(WIDTH)), "rms norm": lambda: Layers(nn.RMSNorm(WIDTH)),
        "attention": lambda: attention(batch_first=True), "attention over the first": lambda: attention(),
        "encoder layer": lambda: Layers(block(WIDTH, 2, 24, dropout=0.0, batch_first=True)),
        "encoder in evaluation mode, padding hidden": lambda: Layers(
            nn.TransformerEncoder(block(WIDTH, 2, 24, dropout=0.0, batch_first=True), 2).eval(),
            lambda net, x: net(x, src_key_padding_mask=torch.arange(TOKENS) > 7 + 2 * x[:, :1, 0].sign()),
        ),
        "decoder layer": lambda: Layers(
            nn.TransformerDecoderLayer(WIDTH, 2, 24, dropout=0.0, batch_first=True), lambda net, x: net(x, x)
        ),
        "lstm": lambda: Layers(nn.LSTM(WIDTH, WIDTH, batch_first=True), lambda net, x: net(x)[0]),
        "deep lstm, both ways": lambda: Layers(
            nn.LSTM(WIDTH, WIDTH // 2, 2, batch_first=True, bidirectional=True), lambda net, x: net(x)[0]
        ),
        "gru": lambda: Layers(nn.GRU(WIDTH, WIDTH, batch_first=True), lambda net, x: net(x)[0]),
        "last state of a gru": lambda: Layers(
            nn.GRU(WIDTH, WIDTH, batch_first=True), lambda net, x: net(x)[1].transpose(0, 1)
        ),
        "rnn": lambda: Layers(nn.RNN(WIDTH, WIDTH, batch_first=True), lambda net, x: net(x)[0]),
        "relu rnn": lambda: Layers(
            nn.RNN(WIDTH, WIDTH, nonlinearity="relu", batch_first=True), lambda net, x: net(x)[0]
        ),
        "lstm cell": lambda: Cells(nn.LSTMCell(WIDTH, WIDTH)), "gru cell": lambda: Cells(nn.GRUCell(WIDTH, WIDTH)),
        "rnn cell": lambda: Cells(nn.RNNCell(WIDTH, WIDTH)),
        "checkpointed": lambda: Layers(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), lambda net, x: checkpoint(net, x, use_reentrant=False)
        ),
        "positions": lambda: Free((TOKENS, WIDTH), lambda w, x: x + w), "scale": lambda: Free((WIDTH,), torch.mul),
        "class token": lambda: Free((1, 1, WIDTH), lambda w, x: torch.cat([w.expand(len(x), -1, -1), x], 1)),
        "einsum": lambda: Free((WIDTH, 3, WIDTH), lambda w, x: torch.einsum("btd,dhe->bthe", x, w).mean(2)),
        "weight from the left": lambda: Free((TOKENS, TOKENS), lambda w, x: (w @ x).tanh()),
        "bilinear": lambda: Layers(nn.Bilinear(WIDTH, WIDTH, WIDTH), lambda net, x: net(x, x)),
        "softmax of a weight": lambda: Free((TOKENS,), lambda w, x: x * w.softmax(0)[:, None]),
        "learned distance": lambda: Layers(
            nn.Linear(WIDTH, WIDTH),
            lambda net, x: by_distance(x, lambda a, b: (net(a) - net(b)).square().sum(-1)),
        ),
        "orthogonal weight": lambda: Free((WIDTH, WIDTH), lambda w, x: x @ torch.linalg.qr(w)[0]),
        "weight norm": lambda: Layers(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
        "vmap within": lambda: Layers(
            nn.Linear(WIDTH, WIDTH), lambda net, x: torch.vmap(lambda row: net(row).tanh())(x)
        ),
        "embedding bag": Bag,
        "sum begun with a zero": lambda: Layers(
            nn.Linear(WIDTH, WIDTH), lambda net, x: torch.zeros(()).requires_grad_() + net(x)
        ),
        "asks what needs a gradient": lambda: Layers(nn.Linear(WIDTH, WIDTH), only_of_weights),
        "sequences of two lengths": lambda: Layers(nn.Linear(WIDTH, WIDTH), padded),
        "numbers without history": lambda: Layers(
            nn.Linear(WIDTH, WIDTH), lambda net, x: net(x) * net(x).data + net(x).sort(1)[1].data
        ),
        "cnn": lambda: Convolutions(
            nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, CLASSES, 3)
        ),
        "depthwise": lambda: Convolutions(nn.Conv2d(3, 6, 3, groups=3, padding="same"), nn.Conv2d(6, CLASSES, 1)),
        "transposed": lambda: Convolutions(nn.Conv2d(3, 4, 4, stride=4), nn.ConvTranspose2d(4, CLASSES, 2, stride=2)),
        "conv in one dimension": lambda: Layers(
            nn.Conv1d(WIDTH, WIDTH, 3, padding=1), lambda net, x: net(x.transpose(1, 2)).transpose(1, 2)
        ),
        "channels last": lambda: Convolutions(
            nn.Conv2d(3, 8, 3), Reordered(), nn.ReLU(), nn.Conv2d(8, CLASSES, 3)
        ),
        "frozen batch norm": lambda: Normalised(nn.BatchNorm2d(4), frozen=True),
        "instance norm": lambda: Normalised(nn.InstanceNorm2d(4, affine=True)),
        "timm vit": lambda: Timm("vit_tiny_patch16_224", img_size=32, depth=2),
        "timm convnext": lambda: Timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
        "timm bit": lambda: Timm("resnetv2_50x1_bit"),
        "timm swin": lambda: Timm("swin_tiny_patch4_window7_224", img_size=28, side=28, depths=(1, 1), num_heads=(1, 2),
                                  embed_dim=8, drop_path_rate=0.0),
        "timm efficientnet, frozen statistics": lambda: Timm("efficientnet_lite0", evaluated=True),
        "vit": lambda: HuggingFace("vit"), "dinov2": lambda: HuggingFace("dinov2"), "clip": lambda: HuggingFace("clip"),
        "llama": lambda: HuggingFace("llama"), "qwen3": lambda: HuggingFace("qwen3"),
        "gemma2": lambda: HuggingFace("gemma2"),
        "mistral": lambda: HuggingFace("mistral"), "gpt2": lambda: HuggingFace("gpt2"),
        "bert, padding 0": lambda: HuggingFace("bert"), "roberta, padding 1": lambda: HuggingFace("roberta", pad=1),
        "t5": lambda: HuggingFace("t5"),
    }  # fmt: skip
