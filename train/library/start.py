"""Where a library training's initial weights come from, and what that means for its promise.

Weights may come from records too, so a certificate must state their origin. `start` is a run directory or an export,
whose ledger says what it promised on which records; or `Public("why")`, a reason that the certificate repeats; or None
for random weights. That they are random is tested: the function that makes the model is called under two seeds. A
tensor that is the same both times is not random, and neither is one that was computed from tensors which the function
did not make: a few records, chosen at random, differ from seed to seed, too. Tensors that were not read from `start`
are tested in the same way. For all others the certificate states weights of unknown origin.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from murmuration.accounting.ledger.lines import PublicUse
from murmuration.train.config.section import RecipeError
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.engines.base import digests_of
from murmuration.train.self_test.held import OF_MODULES

if TYPE_CHECKING:
    from murmuration.train.recipe.warm_start import WarmStart

SEEDS = (1, 2)
MOST_ALIKE = 6.0
"""Standard deviations by which two independent draws of a tensor may correlate; the odds of more are 2e-9."""
INNER = "inner."
"""Prefix of the module's tensor names in checkpoints of runs that were given a `loss` function."""


@dataclass(frozen=True)
class Public:
    """Initial weights on which nobody's privacy depends, and why; the certificate repeats the reason.

    >>> Public("DINOv2, published with arXiv 2304.07193")
    Public(why='DINOv2, published with arXiv 2304.07193')
    """

    why: str

    def __post_init__(self) -> None:
        if not self.why.strip() or not self.why.isprintable():
            raise RecipeError('start=Public("…") needs a reason that can be printed, such as where they were published')


@dataclass(frozen=True)
class Started:
    """A model with its initial weights, and what a ledger has to say about these."""

    model: nn.Module
    weights: WarmStart | None = None
    use: PublicUse | None = None
    """What the ledger calls weights that have no ledger of their own; None if there are none."""
    why: str = ""
    unexplained: frozenset[str] = frozenset()
    """Tensors that neither proved to be random nor were read from a run or export."""

    def checked(self, records: str) -> WarmStart | None:
        """The weights' own run or export; refused if it used the records of this digest."""
        if (weights := self.weights) is None:
            return None
        if records in weights.protected:
            raise RecipeError(
                f"{weights.path} was trained on the very records of this run, and what it spent would have to be "
                "added; continue that run, or start from other weights"
            )
        if records in weights.without_noise or weights.undeclared is not None:
            raise RecipeError(
                f"{weights.path} used records without noise ({weights.undeclared or 'these very ones'}); start from "
                "other weights"
            )
        return weights

    def uses(self, saved: bool) -> dict[PublicUse, str]:
        """Digests of the weights that have no ledger of their own. `saved`: a checkpoint has all that a run had; but
        buffers that no checkpoint holds are the program's own again."""
        if not saved:
            return {} if self.use is None else {self.use: _digest(self.model.state_dict(), self.why)}
        held = self.model.state_dict().keys()
        unsaved = {name: tensor for name, tensor in _tensors(self.model).items() if name in self.unexplained - held}
        return {"unknown-weights": _digest(unsaved, self.why)} if unsaved else {}


def started(
    model: nn.Module | Callable[[], nn.Module], start: str | Path | Public | None, ranks: Ranks
) -> Started:  # fmt: skip
    if not callable(model):
        raise RecipeError(f"model= must be a module or a function that makes one, but is a {type(model).__name__}")
    made = model
    if not isinstance(made, nn.Module):
        # The same weights on every rank: their generators may be in different states, so the main rank draws the seed.
        seed = ranks.on_main(lambda: int(torch.randint(2**62, ())))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            made = _made(made)
    if isinstance(start, Public):
        return Started(made, use="weights", why=start.why)
    unknown = _unexplained(model, made)
    weights = None
    if start is not None:
        from murmuration.train.recipe.warm_start import WarmStart  # with all models of ours

        weights = WarmStart.at(Path(start))
        unknown -= _fill(made, weights)
    foreign = bool(unknown) or (weights is not None and weights.foreign)
    return Started(made, weights, use="unknown-weights" if foreign else None, unexplained=frozenset(unknown))


def _unexplained(model: nn.Module | Callable[[], nn.Module], made: nn.Module) -> set[str]:
    """The tensors that neither proved to be random nor are simple. For a module made beforehand, nothing is proved."""
    found: list[dict[str, Tensor]] = []
    for seed in SEEDS if not isinstance(model, nn.Module) else ():
        with torch.random.fork_rng(), _MadeHere() as here:
            torch.manual_seed(seed)
            again = _made(model)
        found.append({name: tensor for name, tensor in _tensors(again).items() if here.has(tensor)})
    return {
        name
        for name, tensor in _tensors(made).items()
        if not _simple(tensor)
        and not (found and all(name in each for each in found) and _drawn(*(each[name] for each in found)))
    }


class _MadeHere(TorchDispatchMode):
    """Knows which tensors were made in this context, of nothing but numbers and of one another."""

    DRAWS = frozenset({"normal_", "uniform_", "zero_", "fill_", "random_", "exponential_", "log_normal_", "cauchy_"})

    def __init__(self) -> None:
        super().__init__()
        self._own: dict[int, UntypedStorage] = {}
        """By address, which is theirs as long as they are held here."""

    def has(self, tensor: Tensor) -> bool:
        return not tensor.numel() or tensor.untyped_storage()._cdata in self._own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, made = ([x for x in pytree.tree_leaves(each) if isinstance(x, Tensor)] for each in ((args, kwargs), out))
        drawn = func._schema.name.rpartition(":")[2] in self.DRAWS and len(given) == 1
        if all(map(self.has, given)) or (drawn and given[0].nbytes == given[0].untyped_storage().nbytes()):
            self._own |= {x.untyped_storage()._cdata: x.untyped_storage() for x in made}
        else:
            for x in made if func._schema.is_mutable else ():
                self._own.pop(x.untyped_storage()._cdata, None)
        return out


def _made(make: Callable[[], nn.Module]) -> nn.Module:
    found = make()
    if not isinstance(found, nn.Module):
        raise RecipeError(f"model= must be a module or a function that makes one, but made a {type(found).__name__}")
    return found


def _drawn(one: Tensor, other: Tensor) -> bool:
    """Whether all elements are random numbers, or a 0 or ±1. Neither a table of weights from elsewhere to which random
    rows were added is, nor weights that were shaken a little. Random numbers are equal now and then, the more often the
    coarser they are."""
    if one.shape != other.shape or torch.equal(one, other):
        return False
    x, y = ((each.double() - each.double().mean()).flatten() for each in (one, other))
    if abs(float(x @ y)) > MOST_ALIKE * float(x.norm() * y.norm()) / math.sqrt(len(x)):
        return False
    kept = int(((one == other) & (one != 0) & (one != 1) & (one != -1)).sum())
    spacing = torch.finfo(one.dtype).eps if one.is_floating_point() else 0.0
    return kept <= 16 * spacing * one.numel() + (2 if one.numel() > 1000 else 0)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """With the buffers that no checkpoint holds, and tensors and arrays in attributes: they shape a release, too."""
    held = {
        f"{path}{'.' if path else ''}{name}{pytree.keystr(place)}": torch.as_tensor(value).detach()
        for path, module in model.named_modules()
        for name, attribute in vars(module).items()
        if name not in OF_MODULES
        for place, value in pytree.tree_leaves_with_path(attribute)
        if isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.dtype.kind in "biufc")
    }
    return {**held, **dict(model.named_buffers()), **model.state_dict()}


def _simple(tensor: Tensor) -> bool:
    """Whether all elements are one round number, as in freshly made layers. A mean of records is not round."""
    if not tensor.numel() or bool((tensor != tensor.flatten()[:1]).any()):
        return not tensor.numel()
    value = tensor.flatten()[0]
    return bool(value == torch.tensor(float(f"{value.item():.1e}"), dtype=tensor.dtype, device=tensor.device))


def _fill(model: nn.Module, weights: WarmStart) -> set[str]:
    """Takes the tensors by name, all that the model has of the same shape, and at least one; returns their names."""
    from murmuration.model.trainable import merged
    from murmuration.train.recipe.warm_start import EXPORTED
    from murmuration.train.storage.checkpoint import Checkpoints
    from murmuration.train.storage.run_dir import RunDir

    if (file := weights.path / EXPORTED if weights.path.is_dir() else weights.path).is_file():
        from safetensors.torch import load_file

        state: Mapping[str, Tensor] = load_file(file)
    else:
        loaded = Checkpoints.newest(RunDir(weights.path).checkpoints)
        if loaded is None:
            raise RecipeError(f"{weights.path} has no finished checkpoint; name a run that has one")
        state = loaded.weights()
    own = model.state_dict()
    state = {name if name in own else name.removeprefix(INNER): tensor for name, tensor in state.items()}
    if not state.keys() <= own.keys():
        state = merged(state)  # adapters, or the sums of a head, of a recipe's phase
    fitting = {name: tensor for name, tensor in state.items() if name in own and own[name].shape == tensor.shape}
    if not fitting:
        raise RecipeError(f"{weights.path} has no tensor of a name and shape of the model's; start from other weights")
    model.load_state_dict(fitting, strict=False)
    return set(fitting)


def _digest(state: Mapping[str, Tensor], why: str) -> str:
    told = "\n".join(f"{name} {digest}" for name, digest in sorted(digests_of(dict(state)).items()))
    return hashlib.sha256(f"{why}\n{told}".encode()).hexdigest()
