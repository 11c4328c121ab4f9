"""The run directory of a library training: what its ledger is told, and what its certificate says."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from murmuration.accounting.adaptive import AdaptiveError
from murmuration.accounting.errors import PlanError
from murmuration.accounting.keys import hkdf, load
from murmuration.accounting.ledger.chain import LedgerError
from murmuration.accounting.ledger.heads import logs_of
from murmuration.accounting.ledger.lines import NAMED
from murmuration.accounting.make_plan import make_plan
from murmuration.accounting.plan import PrivacyPlan
from murmuration.train.clip.rule import ClipRule
from murmuration.train.config.optimizer import Optimizer
from murmuration.train.core import kept_of_record, largest_micro_batch
from murmuration.train.distributed.ranks import Ranks
from murmuration.train.engines.choose import EngineSettings
from murmuration.train.library.records import OwnRecords
from murmuration.train.library.settings import Settings
from murmuration.train.library.start import Started
from murmuration.train.optim.torch_optimizer import MakeOptimizer, described
from murmuration.train.planner.drowned import drowned
from murmuration.train.planner.rows import Batch
from murmuration.train.private_phase import PrivatePhase
from murmuration.train.storage.checkpoint import Keep
from murmuration.train.storage.micro_batch_file import found_once
from murmuration.train.storage.open_run import open_run
from murmuration.train.storage.run_dir import RunDir

if TYPE_CHECKING:
    from murmuration.accounting.certificate.verify import Verdict
    from murmuration.train.storage.sibling_runs import RunLog

PHASE, NAME = 0, "training"
NUMBERS = (
    "In an epoch of random allocation, or a block of steps with correlated noise, a record takes part once, by its "
    "number, and the run was continued within one: that the program gave each record the same number as before is its "
    "own word (`order`)."
)
RESTORED = (  # with a `registry`, what every certificate says is enough
    "This run has no log outside its directory. Its secret file tells how long the ledger is and loses the keys of "
    "each step before the step's weights can be seen, so a ledger or a secret folder that is restored alone is "
    "refused. A whole run directory that is restored in place (secret folder, ledger and checkpoints together) cannot "
    "be told from the original: its steps may then be made again under the same keys, and are charged once."
)
NO_LOG = "The records are known by the name and number that the program gave them; other runs on them are not known."
LOGGED = (
    "The records are known by the name and number that the program gave them; other runs on them are those that were "
    "told the same `registry`."
)
DEVIATIONS = [
    "The training loop is a program of the user's own: what it computes from private records beside the private step, "
    "or makes of the summaries that steps return, is not covered.",
    "Records are read by the user's own code. That each item is made of its own record alone (no mixture with others, "
    "no memory of what was read before) was not looked at.",
    "The model is the user's own. Its forward() was given one record at a time, by construction, and could write "
    "nothing of it into a tensor that records share. Weights, buffers and the attributes of its modules were compared "
    "before and after every step; what it may keep elsewhere in Python (a global list, a file), or do through private "
    "interfaces of PyTorch, was not looked at.",
]


class OwnRun:
    def __init__(
        self, settings: Settings, records: OwnRecords, begun: Started, model: nn.Module, ranks: Ranks
    ) -> None:  # fmt: skip
        """`model`: the whole module, with the function of its losses."""
        self.settings, self.records, self.begun, self.model, self.ranks = settings, records, begun, model, ranks
        self.data = _digest_of_name(settings.dataset)
        self.engine = EngineSettings(settings.engine, 1, settings.zero, settings.shard_over)
        self.trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
        self.log: RunLog | None = None
        if settings.registry is not None:
            from murmuration.train.storage.sibling_runs import RunLog  # imports the files of indexes

            Path(settings.registry).mkdir(parents=True, exist_ok=True)
            self.log = RunLog.beside(Path(settings.registry))
        folder = RunDir(Path(settings.run_dir))
        self.open = open_run(
            folder, folder.root.name, ranks, Keep(settings.keep_checkpoints),
            {name: version(name) for name in ("torch", "dp-accounting")}, debug_seed=settings.debug_seed,
            new_segment=settings.new_segment, record_digests=NAMED,
        )  # fmt: skip
        self.finished = self.open.secret is None
        """Nothing is drawn any more."""

    def declare(self, steps: int, batch: float) -> PrivacyPlan:
        """The plan; what else the ledger must know before the first step is in it. On all ranks together."""
        self.loaded = None if self.finished else self.open.latest()
        self.done = 0 if self.loaded is None else self.loaded.position.step
        self.plan: PrivacyPlan = self.ranks.on_main(lambda: self._declare(steps, batch))
        return self.plan

    def _declare(self, steps: int, batch: float) -> PrivacyPlan:
        run, settings, begun, first = self.open, self.settings, self.begun, self.loaded is None
        if self.log is None and not self.finished and (noted := logs_of(run.folder.root)):
            # Of steps that it is not told, it could not say later that they were made before.
            raise LedgerError(
                f"this run is logged in {noted[0].logs[0].parent}, which must know each of its steps; give the same "
                "registry=, or the folder to which it was moved"
            )
        request = settings.privacy.request(self.records.n, steps, exact=settings.computation.noise == "exact")

        def make(known: PrivacyPlan | None) -> PrivacyPlan:
            # Keyed: who belongs together is as private as the records.
            table = known.units.table if known is not None and known.units is not None else ""
            if run.secret is not None and self.records.table is not None:
                table = hkdf(run.key.secret, f"units|{self.records.digest_of_units}").hex()
            try:
                return make_plan(replace(request, expected_batch=batch, units=self.records.unit(table)), known)
            except AdaptiveError as error:
                raise PlanError(str(error)) from None

        public = begun.uses(saved=not first)
        public |= {use: _digest_of_name(name) for use, name in settings.public.items()}
        weights = begun.checked(self.data) if first else None  # what a checkpoint has comes from there
        plan = run.declare(
            PHASE, NAME, make, self.log, self.data, public=public,
            without_noise=() if weights is None else weights.without_noise,
            origins=() if weights is None else weights.origins, words=("keep_key",) if settings.keep_key else (),
        )  # fmt: skip
        if (warning := drowned(plan, self.trained, settings.privacy.noise_multiplier is None)) is not None:
            run.say(f"warning: {warning}")
        if first and not run.writer.history.finished and (names := sorted(begun.unexplained)):
            run.say(
                f"warning: the certificate will say FOREIGN WEIGHTS, since {', '.join(names[:3])} ({len(names)} "
                "tensors) are not shown to be random; give model= as a function that makes it, and start= or "
                'Public("why") for what is not random'
            )
        run.tell_objection()
        return plan

    def build(self, optimizer: Optimizer | MakeOptimizer) -> PrivatePhase:
        """Under keys with which no step was made, unless it is made again as it was."""
        run, settings, privacy = self.open, self.settings, self.settings.privacy
        clip = privacy.clip
        if self.loaded is not None:
            self.model.load_state_dict(self.loaded.state_dict(self.model.state_dict()))
        rule_of = partial(ClipRule.of, self.plan, clip.kind, clip.gamma, grouping=clip.grouping)
        micro_batch = settings.micro_batch
        if micro_batch == "auto":
            micro_batch, _ = found_once(run.folder.root, self.ranks, lambda: self._micro_batch(rule_of(micro_batch=1)))
        rule = rule_of(micro_batch=micro_batch)
        named = optimizer.model_dump() if isinstance(optimizer, Optimizer) else described(optimizer)
        shapes = {name: list(each.shape) for name, each in self.model.named_parameters()}
        computed = settings.computation.identity
        identity = [type(self.begun.model).__qualname__, shapes, repr(rule), named, computed, micro_batch]
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self.ranks.require_same("the model and the arguments of the training", digest)
        segment = self.ranks.on_main(
            lambda: run.segment(
                PHASE, NAME, digest, self.data, self.done, "their weights may have been seen", self._why_anew()
            )
        )
        keys = run.derive(PHASE, segment, self.done)
        self.read_key = keys("augmentation")
        phase = PrivatePhase(
            self.plan, self.model, rule, optimizer, keys, self.ranks,
            replace(self.engine, micro_batch=micro_batch), settings.computation,
            begun_after=segment.from_step,
            probes=privacy.loss_probes, manifest=self.loaded and self.loaded.manifest,
        )  # fmt: skip
        self.ranks.on_main(lambda: run.remember(self._order))
        return phase

    def _micro_batch(self, rule: ClipRule) -> int:
        computation, world = self.settings.computation, self.ranks.world
        trial = self.model, rule, computation, self.records.synthetic
        if self.ranks.device.type == "cuda":
            return largest_micro_batch(*trial, max(1, math.ceil(self.plan.divisor / world)), self.ranks)
        gradients = 0.0 if computation.clip_engine == "book-keeping" else 4.0 * self.trained
        kept = max(self.ranks.gather(kept_of_record(*trial)))  # one number for all, even if hosts differ
        return Batch.drawn(self.plan).on_processors(world, kept + gradients, self.trained)

    @property
    def _order(self) -> str | None:
        return None if self.settings.order is None else hashlib.sha256(self.settings.order.encode()).hexdigest()

    def _why_anew(self) -> str | None:
        """Why an interrupted epoch or block does not continue: records take part in it once, by number."""
        if self.plan.noise.bands > 1 and (self._order is None or self.done % self.plan.noise.bands):
            return "the keys of a block's earlier steps are gone, and later ones need them"
        if self.plan.sampling.steps_of_a_key > 1 and (
            self._order is None or load(self.open.folder.key).order != self._order
        ):
            return "the program does not say, or not the same, in which order it numbers the records"
        return None

    def finish(self) -> Verdict:
        """Certifies, destroys the run key, and verifies. The last step is saved."""
        from murmuration.train.storage.certify import Told, finish  # with certificates and their pages

        newest, settings = self.open.newest(), self.settings

        def told() -> Told:
            trained = sum(each.numel() for each in self.begun.model.parameters())
            return Told(
                f"{type(self.begun.model).__qualname__}, {trained:,} parameters", self.engine, {NAME: self.data},
                settings.about_data, settings.about_owner,
            )  # fmt: skip

        logs = [] if self.log is None else [self.log]
        return self.ranks.on_main(
            lambda: finish(self.open, logs, newest, told, deviations=self._deviations(), keep_key=settings.keep_key)
        )

    def _deviations(self) -> list[str]:
        logged = self.log is not None and self.log.unknown_to_others(self.open.writer.history.run_id) is None
        stated = [*DEVIATIONS, LOGGED] if logged else [*DEVIATIONS, NO_LOG, RESTORED]
        stated += [NUMBERS] if self._continued_within() else []
        return stated + ([f"The initial weights are public because: {why}"] if (why := self.begun.why) else [])

    def _continued_within(self) -> bool:
        together = self.plan.sampling.period
        acts = self.open.writer.ledger.entries.acts
        return any(entry.kind == "resume" and entry.fields["step"] % together for entry in acts)


def _digest_of_name(dataset: str) -> str:
    return hashlib.sha256(dataset.encode()).hexdigest()
