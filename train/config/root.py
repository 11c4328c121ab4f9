"""The one JSON file that describes a run completely.

DeepSpeed's own keys stay at top level (those that cannot weaken the guarantee); ours are `about`, `model`, `phases`
and `run`. Unknown keys are refused here, keys that would break privacy in `refused.py`, both before any compute.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from murmuration.accounting.noise import NoiseKind
from murmuration.model.named import LIBRARIES
from murmuration.model.settings import ModelSettings, SettingsError
from murmuration.train.config.data import CheckpointData
from murmuration.train.config.optimizer import ZeroOptimization
from murmuration.train.config.phase import STATISTICS, WHITENED, Evaluation, Phase, ZeroShot
from murmuration.train.config.privacy import Tuning
from murmuration.train.config.section import Keeping, Section

__all__ = ["About", "Config", "Evaluation", "Phase", "Run", "ZeroShot", "json_schema"]


class About(Section):
    """For people; not part of the run's identity."""

    command: str = Field(default="", description="How to start it.")
    hardware: str = Field(default="", description="Intended hardware.")
    cost: str = Field(default="", description="Time it takes.")
    expect: str = Field(default="", description="Expected result.")
    source: str = Field(default="", description="Paper or idea.")
    data: str = Field(default="", description="What the private records are; certified.")
    owner: str = Field(default="", description="Who is responsible; certified.")


AUTO, GIVEN = "auto", "number"  # how the micro-batch is given


WITNESS_URLS = ("https://", "http://")
"""How a witness begins that is no command."""


class Run(Keeping):
    engine: Literal["deepspeed", "fsdp2", "local"] = Field(
        default="deepspeed",
        description="fsdp2: PyTorch's fully_shard; local: one plain process.",
    )
    shard_over: int | None = Field(
        default=None,
        ge=2,
        description="fsdp2: ranks per copy of the weights (HSDP); null: all.",
    )
    clip_engine: Literal["book-keeping", "reference", "opacus"] = Field(
        default="book-keeping",
        description="reference, opacus: to check small models.",
    )
    clip_memory: Literal["lean", "fast"] = Field(
        default="lean", description="fast: up to 1.5 times the memory, for small models."
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32",
        description="Of matrix products in layers alone.",
    )
    noise: NoiseKind = Field(
        default="aes",
        description="chacha20: drawn on the device; exact: free of floating-point rounding, half as fast.",
    )
    cuda_graph: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: on a GPU below ZeRO-3, replays private micro-batches, unless C is adaptive.",
    )
    compile: Literal["off", "blocks"] = Field(
        default="off",
        description="blocks: compiles repeated blocks; phases without privacy need a stage below 3.",
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="Saves memory with adapters and long texts; steps take up to 1.5 times as long.",
    )
    dir: str | None = Field(default=None, description="Run directory; null: `runs/<config name>`.")
    registry: str | None = Field(
        default=None,
        description="Common log of runs, for read-only data, URLs and copies.",
    )
    witness: str | None = Field(
        default=None,
        description="URL or command that gets the ledger's head at every checkpoint.",
    )
    log_every: int = Field(default=10, gt=0, description="Steps between console lines.")
    private_curves: bool = Field(
        default=False,
        description="Curves without noise for the owner; decisions based on them are outside the claim.",
    )
    audit: bool = Field(
        default=False,
        description="Audits the recipe after the run, as evidence in the certificate.",
    )
    keep_key: bool = Field(
        default=False,
        description="Keeps the final secret file, which can sign but gives no key of a released step.",
    )
    tuned_on_private_data: Tuning | None = Field(
        default=None, description="Declares choices by outputs of private runs."
    )
    debug_seed: int | None = Field(default=None, description="Repeatable keys; NOT PRIVATE.")

    @model_validator(mode="after")
    def _engine_fits(self) -> Run:
        if self.clip_engine != "book-keeping" and self.precision != "fp32":
            raise ValueError(f'run.clip_engine = "{self.clip_engine}" works only in fp32; set run.precision to "fp32"')
        if self.witness is not None and not self.witness.strip():
            raise ValueError("run.witness is empty; name a URL or a command, or leave it out")
        if self.shard_over is not None and self.engine != "fsdp2":
            raise ValueError(
                f'run.shard_over is for run.engine = "fsdp2", not "{self.engine}"; leave it out, or use "fsdp2"'
            )
        return self


MicroBatchRows = Annotated[
    Annotated[int, Field(gt=0), Tag(GIVEN)] | Annotated[Literal["auto"], Tag(AUTO)],
    Discriminator(lambda given: AUTO if given == AUTO else GIVEN),
]


_READ = {
    "path": True, "tokenizer": True, "classes": True, "exclude_classes": True, "reading": True,
    "expected_records": True, "expected_units": True,
}  # fmt: skip
OF_NO_RELEASE: Mapping[str, Any] = {
    "schema_path": True, "about": True, "steps_per_print": True, "wall_clock_breakdown": True,
    "zero_optimization": True,
    "model": {"pixels": True},  # what it comes to, with the weights that the run starts from, is among the contents
    "phases": {
        "__all__": {
            "data": _READ,
            "mixing": {"data": _READ},
            "features": {"folder": True},
            "evaluation": {"path": True, "public": True, "real": True, "zero_shot": {"class_names": True}},
            "monitor": True,
        }
    },
    "run": dict.fromkeys((
        "engine", "shard_over", "cuda_graph", "dir", "registry", "witness", "log_every", "private_curves",
        "audit", "keep_key", "tuned_on_private_data", "debug_seed", "checkpoint_every", "checkpoint_lag",
        "keep_checkpoints", "keep_every", "keep_best", "stall_seconds", "stop_after_minutes",
    ), True),
}  # fmt: skip
"""Keys that shape nothing of what a phase releases, in pydantic's form: how it is computed and kept, and paths, for
which digests of their contents stand."""


class Config(Section):
    """A whole run."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, title="Murmuration run")

    schema_path: str | None = Field(default=None, alias="$schema", description="ds_configs/schema.json, for editors.")
    about: About = Field(default=About(), description="For people.")
    train_micro_batch_size_per_gpu: MicroBatchRows = Field(
        description="Rows that a rank computes at once; auto: as many as fit."
    )
    gradient_accumulation_steps: Literal[1] = Field(
        default=1,
        description="Fixed: Poisson batches vary in size.",
    )
    gradient_clipping: float = Field(
        default=0.0, ge=0, le=0, description="Fixed: it would clip the mean after the noise."
    )
    steps_per_print: int = Field(default=1_000_000_000, gt=0, description="Ignored.")
    wall_clock_breakdown: bool = Field(default=False, description="Ignored.")
    zero_optimization: ZeroOptimization = Field(default=ZeroOptimization(), description="How DeepSpeed shards.")
    model: ModelSettings = Field(description="What is trained.")
    phases: list[Phase] = Field(min_length=1, description="Phases, in order.")
    run: Run = Field(default=Run(), description="Computation and saving.")

    @property
    def micro_batch(self) -> int:
        """Rows of one micro-batch on one rank, in a config whose "auto" is settled (train/planner/micro_batch.py)."""
        given = self.train_micro_batch_size_per_gpu
        assert given != "auto", "a command settles it before anything is computed"
        return given

    @model_validator(mode="after")
    def _goes_together(self) -> Config:
        of_run = {"exact"} if self.run.noise == "exact" else set[str]()
        of_run |= {"keep_key"} if self.run.keep_key else set()
        of_run |= {"audit"} if self.run.audit else set()
        for phase in self.phases:
            phase.require_together(of_run)
        return self

    @model_validator(mode="after")
    def _audit_has_a_claim(self) -> Config:
        if self.run.audit and all(phase.privacy is None for phase in self.phases):
            raise ValueError("run.audit tests a claim, and no phase has privacy; leave it out")
        return self

    @model_validator(mode="after")
    def _texts_and_language_models(self) -> Config:
        reads_texts = self.model.reads_texts
        for phase in self.phases:
            if (phase.objective == "text") != reads_texts:
                raise ValueError(
                    f'phase {phase.name!r} has objective "{phase.objective}" and model.family is '
                    f'"{self.model.family}"; objective "text" and a language model (family "gpt2", or "hf" with the '
                    "folder of one) belong together"
                )
            if reads_texts and phase.trains and phase.trainable not in self._trainable_of_texts():
                raise ValueError(
                    f"phase {phase.name!r} trains a language model, of which no part is called {phase.trainable!r}; "
                    f"set trainable to {' or '.join(map(repr, self._trainable_of_texts()))}"
                )
        of_library = self.model.sees_and_writes
        if of_library and (monitored := [phase.name for phase in self.phases if phase.monitor is not None]):
            raise ValueError(
                f"phase {monitored[0]!r} trains an image-text model, whose curvature is not measured; leave monitor out"
            )
        if (reads_texts or of_library) and self._shards_weights():
            raise ValueError(
                "a language model may use one table as embedding and as head, which was not tried on weights that "
                "ZeRO-3 and FSDP2 shard; use DeepSpeed at another stage, or the local engine"
            )
        return self

    def _trainable_of_texts(self) -> tuple[str, ...]:
        return ("all",) if self.model.family == "gpt2" else ("all", "lora")

    @model_validator(mode="after")
    def _statistics_come_with_weights(self) -> Config:
        if (
            self.model.family not in LIBRARIES
            or self.model.reads_texts
            or isinstance(self.phases[0].data, CheckpointData)
        ):
            return self
        if (layer := self.model.stored_statistics()) is not None:
            raise ValueError(
                f"model.name {self.model.name!r} normalises by stored statistics ({layer}), which only trained weights "
                'have; begin with a phase whose data.source is "checkpoint", or name an encoder with LayerNorm or '
                "GroupNorm"
            )
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> Config:
        if self.model.family not in LIBRARIES:  # only a library knows those of its own models
            try:
                self.model.resolved()
            except SettingsError as error:
                raise ValueError(f"model: {error}") from None
        return self

    @model_validator(mode="after")
    def _class_weights_weigh(self) -> Config:
        if self.model.class_weights is None:
            return self
        if all(phase.objective != "classify" for phase in self.phases):
            raise ValueError('model.class_weights are of classes, and no phase has objective "classify"; leave it out')
        if solved := [phase.name for phase in self.phases if phase.trainable == STATISTICS]:
            raise ValueError(
                f"phase {solved[0]!r} solves its head from sums, which model.class_weights does not weigh; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _phases_fit(self) -> Config:
        names = [phase.name for phase in self.phases]
        if len(set(names)) != len(names):
            raise ValueError(
                "two phases have the same name; give each its own, since names tell them apart in ledger and plots"
            )
        for before, phase in pairwise([None, *self.phases]):
            assert phase is not None
            if before is not None and not phase.trains and isinstance(phase.data, CheckpointData):
                raise ValueError(f"phase {phase.name!r} would replace what {before.name!r} trained; put it first")
            if phase.optimizer.carry != "none" and (
                before is None or not before.trains or before.objective != phase.objective
                or before.optimizer.type != phase.optimizer.type or before.trainable != phase.trainable
            ):  # fmt: skip
                raise ValueError(
                    f"phase {phase.name!r} carries optimizer state over, but no phase before it trained the same "
                    "weights with the same type of optimizer"
                )
            if (
                phase.optimizer.carry != "none" and before is not None
                and phase.optimizer.params.ema_decay is not None and before.optimizer.params.ema_decay is None
            ):  # fmt: skip
                raise ValueError(
                    f"phase {phase.name!r} averages its weights and carries the optimizer state of {before.name!r}, "
                    "which has no average; give ema_decay to both, or to none"
                )
            if phase.trainable == WHITENED and (before is None or before.trainable != STATISTICS):
                raise ValueError(
                    f"phase {phase.name!r} whitens features by the sums of the phase before, which has none; put a "
                    'phase with objective "head" before it'
                )
            if phase.features is not None and (self.model.drop_path or self.model.dropout):
                raise ValueError(
                    f"phase {phase.name!r} keeps features, which would change at each step with model.drop_path or "
                    "model.dropout; set both to 0, or leave features out"
                )
        if self._shards_weights() and self.run.clip_engine != "book-keeping":
            raise ValueError(
                f"run.clip_engine = {self.run.clip_engine!r} needs whole weights on every rank, and ZeRO-3 and FSDP2 "
                "shard them; use 'book-keeping', or DeepSpeed at another stage"
            )
        if self.run.engine != "deepspeed" and self.zero_optimization.offload_optimizer is not None:
            name = "FSDP2" if self.run.engine == "fsdp2" else "The local engine"
            raise ValueError(
                f"{name} keeps optimizer state on the device; leave zero_optimization.offload_optimizer out, "
                'or set run.engine to "deepspeed"'
            )
        return self

    @model_validator(mode="after")
    def _whole_weights_where_needed(self) -> Config:
        for phase in self.phases if self._shards_weights() else ():
            probes = phase.privacy is not None and phase.privacy.loss_probes is not None
            if phase.mixing is not None or probes:
                named = "privacy.loss_probes" if probes else "`mixing`"
                raise ValueError(
                    f"phase {phase.name!r} has {named}, which needs whole weights; use DeepSpeed at a stage below 3"
                )
        return self

    @model_validator(mode="after")
    def _blocks_can_be_compiled(self) -> Config:
        if self.run.compile == "off":
            return self
        public = any(phase.privacy is None for phase in self.phases if phase.trains)
        if not public and self.run.clip_engine != "book-keeping":
            raise ValueError(
                f'run.compile = "{self.run.compile}": with another clip engine than book-keeping, phases with privacy '
                "run as they are written, and all phases here have it; leave it out"
            )
        if public and self.run.engine == "deepspeed" and self.zero_optimization.stage == 3:
            raise ValueError(
                f'run.compile = "{self.run.compile}": in phases without privacy, ZeRO-3 gathers weights inside the '
                'blocks, where compiled code cannot run; use another stage, or run.engine = "fsdp2"'
            )
        if public and (self.model.dropout or self.model.drop_path):
            raise ValueError(
                f'run.compile = "{self.run.compile}": with model.dropout or model.drop_path, blocks of phases without '
                "privacy differ, and most of them would not be compiled; leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _blocks_can_be_checkpointed(self) -> Config:
        if self.run.gradient_checkpointing and self.run.compile != "off":
            raise ValueError(
                "run.gradient_checkpointing computes again what compiled blocks (run.compile) keep; leave one of the "
                "two out"
            )
        if self.run.gradient_checkpointing and self.run.clip_engine != "book-keeping":
            raise ValueError(
                f'run.clip_engine = "{self.run.clip_engine}" cannot see into checkpointed blocks; set it to '
                '"book-keeping", or leave run.gradient_checkpointing out'
            )
        return self

    @model_validator(mode="after")
    def _several_labels_fit(self) -> Config:
        several = next((phase.name for phase in self.phases if phase.multi_label), None)
        if several is not None and self.model.classify_loss != "sigmoid":
            raise ValueError(
                f"phase {several!r} has data.multi_label, and the softmax loss takes one class per record; set "
                "model.classify_loss to 'sigmoid'"
            )
        return self

    def _shards_weights(self) -> bool:
        return self.run.engine == "fsdp2" or (self.run.engine == "deepspeed" and self.zero_optimization.stage == 3)

    @model_validator(mode="after")
    def _views_differ(self) -> Config:
        for phase in self.phases:
            views = 1 if phase.privacy is None else phase.privacy.views
            if views > 1 and not (phase.random_inputs or self.model.drop_path or self.model.dropout):
                raise ValueError(
                    f"phase {phase.name!r} has privacy.views = {views}, but nothing about a record is random, so that "
                    "all its views are the same; set data.augment to 'random_resized_crop' or 'inception_crop', or "
                    "privacy.views to 1"
                )
        return self

    @model_validator(mode="after")
    def _kernel_fits(self) -> Config:
        offload = self.zero_optimization.offload_optimizer
        for phase in self.phases if offload is not None and offload.adam == "deepspeed" else ():
            if phase.optimizer.type != "AdamW":
                raise ValueError(
                    "zero_optimization.offload_optimizer.adam = 'deepspeed' is AdamW, which phase "
                    f"{phase.name!r} does not use; set it to 'torch'"
                )
        return self

    def digest(self, phase: int, contents: dict[str, str]) -> str:
        """Identity of everything that shapes what a phase releases; replay is allowed only while it is unchanged.

        `contents` has digests in place of paths. Keys at their defaults are left out, so that a new key changes no
        digest until it is used; what the defaults are is pinned in tests/golden.
        """
        identity = self.model_dump(exclude_defaults=True, exclude=dict(OF_NO_RELEASE))
        own = identity.pop("phases")[phase]
        if self.phases[phase].plateau is None:  # measured only: it decides nothing unless it may end the phase
            own.pop("evaluation", None)
        if self.model.family == "hf":  # a folder's path says nothing beside its config, which is in `model_args`
            identity["model"].pop("name")
        identity.setdefault("run", {})  # left out, too, where nothing in it is set
        identity |= {"phase": own, "train_micro_batch_size_per_gpu": self.micro_batch, "contents": contents}
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def json_schema() -> dict[str, Any]:
    """For editors; checked in as ds_configs/schema.json, which a test compares with this."""
    schema = Config.model_json_schema(by_alias=True)
    for data in (
        schema["$defs"][name]["properties"]["data"] for name in ("Phase", "Mixing")
    ):  # by which editors complete the keys of the source that is named
        named = [choice["$ref"] for choice in data.get("oneOf", data.get("anyOf"))]
        sources = {schema["$defs"][ref.rpartition("/")[2]]["properties"]["source"]["const"]: ref for ref in named}
        data["discriminator"] = {"propertyName": "source", "mapping": sources}
    phase = schema["$defs"]["Phase"]
    # Which load.py takes for classify with trainable statistics.
    phase["properties"]["objective"]["enum"].append("head")
    # A phase that only loads weights takes the objective of the next one (load.py).
    phase["required"].remove("objective")
    phase["if"] = {"properties": {"data": {"properties": {"source": {"const": "checkpoint"}}, "required": ["source"]}}}
    phase["else"] = {"required": ["objective"]}
    return schema
