"""Whether nothing but the private step changes a program's model, and the model keeps nothing of a record."""

from __future__ import annotations

from torch import nn

from murmuration.accounting.ledger.chain import LedgerError
from murmuration.train.clip.isolated import kept_of_records
from murmuration.train.engines.base import modes_of
from murmuration.train.self_test.held import Held
from murmuration.train.self_test.self_test import SelfTestError


class Unchanged:
    def __init__(self, model: nn.Module) -> None:
        self._model, self._held, self._modes = model, Held.by(model), modes_of(model)
        self._kept = kept_of_records()
        """Tensors of records that other parts of the program hold, which are none of this model's."""
        self._proved = False

    def before_proof(self) -> None:
        self._kept = kept_of_records()
        if (changed := self._held.changed(Held.by(self._model))) is not None:
            raise SelfTestError(
                f"{changed} changed since the training was opened, so the ledger does not know what it began with; "
                "give the model as it is to begin"
            )

    def proved(self) -> None:
        if kept := kept_of_records() - self._kept:
            raise SelfTestError(
                f"{len(kept)} tensors of the self-test's records are still held somewhere; let forward() keep nothing, "
                "not in a list outside the model either"
            )
        self._modes, self._held, self._proved = modes_of(self._model), Held.by(self._model), True

    def require(self) -> None:
        if self._proved and (changed := self._held.changed(Held.by(self._model))):
            raise LedgerError(
                f"{changed} changed outside of the private step, without noise; let nothing but the step change the "
                "model, and forward() keep nothing"
            )

    def before_step(self) -> None:
        self.require()
        if modes_of(self._model) != self._modes:
            raise SelfTestError(
                "a module was switched between training and evaluation since prove(), which tested it as it was; "
                "switch it before"
            )

    def after_step(self) -> None:
        """But for the weights that the update moved."""
        now = Held.by(self._model)
        if changed := self._held.but_for_trained().changed(now.but_for_trained()):
            raise LedgerError(
                f"{changed} changed while the model was trained, without noise; let forward() write into nothing and "
                "keep nothing"
            )
        self._held = now

    def before_save(self) -> None:
        self.require()
        if kept := kept_of_records() - self._kept:
            raise LedgerError(f"{len(kept)} tensors of records are still held somewhere; let forward() keep nothing")
