"""Weights to start from: a run directory or an export of ours, or a file of released weights; and their provenance.

Weights are made from records, too. A ledger beside them says which ones, and which ones went into the weights that its
own run started from. Weights trained on the very records that this run protects are refused: their epsilon would have
to be added to this run's. Sets with other digests may still share people, so every other origin goes into this run's
ledger and certificate. Exported safetensors say the same in their metadata, in case they are copied away from their
ledger. For files without any such information, the config's word is taken, and the certificate repeats it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from murmuration.accounting.certificate.attached import lists_tensors_of
from murmuration.accounting.certificate.provenance import Provenance, ProvenanceError
from murmuration.accounting.errors import RunError
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.ledger.history import History
from murmuration.accounting.ledger.lines import Origin
from murmuration.data.store.place import Place, Shard
from murmuration.model.build import take_encoder
from murmuration.model.load_report import LoadReport, WeightsError
from murmuration.model.trainable import merged
from murmuration.model.warm_start import initialise_from, initialise_with
from murmuration.train.recipe.weights_at_hand import EXPORTED, WarmStartError, require_weights
from murmuration.train.storage.checkpoint import CheckpointError, Checkpoints, Loaded
from murmuration.train.storage.checkpoint_read import hash_of
from murmuration.train.storage.run_dir import RunDir


@dataclass(frozen=True)
class NoRecords:
    """Stands in for the index of a phase without records; its digest identifies what the phase has instead."""

    manifest_digest: str
    folder: Path = Path()
    shards: Sequence[Shard] = ()
    records: int = 0
    excluded_digest: str = ""

    def left_out(self, record: int) -> bool:
        return False

    def locate(self, record: int) -> tuple[Place, int, int]:
        raise IndexError(f"there is no record {record}: the phase has none")

    def owner(self, record: int) -> str:
        raise IndexError(f"there is no record {record}: the phase has none")

    def members(self, record: int, raw: bytes) -> dict[str, bytes]:
        raise IndexError(f"there is no record {record}: the phase has none")

    def check_unchanged(self, *, contents: bool = False) -> None:
        del contents


@dataclass(frozen=True)
class WarmStart:
    """An identified source of weights: `digest` is that of a file, or of a checkpoint's manifest."""

    path: Path
    digest: str
    protected: frozenset[str]
    """Digests of the records that private phases protected, in all runs that led to these weights."""
    origins: tuple[Origin, ...]
    """Those runs, as this run's ledger will name them."""
    undeclared: str | None
    """Why the run that made the weights was not private in what it trained on; None where no reason is known."""
    take_head: bool | None = None
    """Whether a classifier takes its head from these weights, too (model.warm_start)."""
    foreign: bool = False
    """No certificate or ledger names these very tensors (what lies beside or in the file may be another run's, or
    somebody's invention, and only adds to what is known of it), or their run began with such weights."""
    without_noise: frozenset[str] = frozenset()
    """Digests of the records that the runs which made the weights used as public."""

    @staticmethod
    def at(path: Path, take_head: bool | None = None) -> WarmStart:
        require_weights(path)
        ledger = path / "ledger.jsonl" if path.is_dir() else path.parent / "ledger.jsonl"
        try:
            history = History.read(ledger)[0] if ledger.is_file() else None
            known = [] if history is None else [Provenance.of(history)]
            inside = Provenance.inside(path / EXPORTED if path.is_dir() else path)
        except (LedgerError, ProvenanceError) as error:
            raise WarmStartError(f"{path}: {error}") from None
        if history is not None and path.is_dir() and not (path / EXPORTED).is_file():
            _require_its_own(path, history)
        # Both count, where both exist: another run's ledger may lie beside a file that was copied.
        known += [inside] if inside is not None else []
        origins = tuple(dict.fromkeys(origin for each in known for origin in each.origins))
        objections = [each.undeclared for each in known if each.undeclared is not None]
        protected = frozenset(digest for origin in origins for digest in origin.protected)
        undeclared = objections[0] if objections else None
        # What began with weights of unknown origin is no better known than those were.
        unknown = history is not None and any(line.use == "unknown-weights" for line in history.public_uses)
        foreign = unknown or not _made_by(path, ledger.parent)
        public = frozenset(digest for each in known for digest in each.without_noise)
        return WarmStart(path, _digest(path), protected, origins, undeclared, take_head, foreign, public)

    def fill(self, model: nn.Module) -> LoadReport:
        """Puts the weights into the model, as far as they fit; the report says what became of every tensor."""
        try:
            if self.path.is_dir() and not (self.path / EXPORTED).is_file():
                note = {"run": self.path.name}
                return initialise_with(model, _newest(self.path).weights(), note, take_head=self.take_head)
            return initialise_from(model, self.path, take_head=self.take_head)
        except WeightsError as error:
            raise WarmStartError(f"{self.path}: {error}") from None


def _require_its_own(root: Path, history: History) -> None:
    """Weights of another run would be taken under the promise of this one, and begin even a run on their own records:
    each checkpoint is in the ledger before the pointer names it."""
    newest = _newest(root)
    if newest.digest not in {mark.digest for mark in history.checkpoints}:
        raise WarmStartError(
            f"{root}: its ledger names no such checkpoint as {newest.position.folder}, so that may be another run's; "
            "restore the checkpoints of this run"
        )


def _made_by(path: Path, beside: Path) -> bool:
    """Whether the ledger beside the weights is that of the run which made them: its checkpoints are its own, and a
    file must have the tensors that a signed certificate lists."""
    if not (beside / "ledger.jsonl").is_file():
        return False
    if path.is_dir() and not (path / EXPORTED).is_file():
        return True
    file = path / EXPORTED if path.is_dir() else path
    try:
        return lists_tensors_of(beside, file)
    except (RunError, OSError, ValueError, KeyError, TypeError):
        return False


def hand_over(state: Mapping[str, Tensor], model: nn.Module) -> str:
    """Hands over all tensors if the two models have the same ones, otherwise the encoder's; says in words which."""
    state = merged(state)
    own = model.state_dict()
    if state.keys() == own.keys() and all(state[name].shape == own[name].shape for name in own):
        model.load_state_dict(state)
        return f"all {len(own)} tensors"
    try:
        taken = take_encoder(state, model)
    except WeightsError as error:
        raise WarmStartError(str(error)) from None
    return f"the encoder's {len(taken)} tensors of {len(own)}"


def _newest(root: Path) -> Loaded:
    folder = RunDir(root).checkpoints
    try:
        loaded = Checkpoints.newest(folder)
    except CheckpointError as error:
        raise WarmStartError(str(error)) from None
    if loaded is None:
        raise WarmStartError(f"{folder} has no finished checkpoint; name a run that has one")
    return loaded


def _digest(path: Path) -> str:
    if path.is_dir() and not (path / EXPORTED).is_file():
        return _newest(path).digest
    return hash_of(path / EXPORTED if path.is_dir() else path)
