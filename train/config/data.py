"""Sections of the config that say where records come from and how they are read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from murmuration.accounting.unit import SINGLE, fault_of_name
from murmuration.data.synthetic.kinds import PictureKind
from murmuration.train.config.section import Section, word_given

_TOKENIZER = "'clip', 'clip:16384', 'clip:full', or a public tokenizer.json or vocab.txt."
_AUGMENT = "none: the whole image; center: the middle square; else random crops, half of them flipped."
_CLASSES = "Public file of class names: lines, or a JSON list. Private class folders need it."
_EXCLUDE_CLASSES = "Public data: a file of classes to leave out. Shards then need `label` and `classes`."
_LOOKS_AT_LABELS = (
    "exclude_classes is for public data: which records of a private set have such a class is private, and n must not "
    "depend on it; leave these classes off the list of `classes`, and private records of them keep their slots and "
    "contribute nothing"
)
_LABEL = "Field of a record's .json: a class number or a name in `classes`; 'cls': .cls or class folder."
_MULTI_LABEL = "`label` lists any number of `classes`; needs model.classify_loss 'sigmoid'."
_READING = "Fetching and decoding."
_PUBLIC = "Your word that these records are public."


class ReadingSettings(Section):
    """How records are fetched and decoded. A resumed run may change it."""

    workers: int | None = Field(
        default=None,
        ge=0,
        description="Decoding processes per rank; null: free cores; 0: in the trainer, not isolated.",
    )
    timeout_seconds: float = Field(default=30.0, gt=0, description="Limit for one remote request.")
    cache_dir: str | None = Field(default=None, description="Local folder for remote records, unencrypted.")
    cache_gib: float = Field(default=100.0, gt=0, description="Largest cache of a node's ranks.")
    cache_keep: Literal["records", "shards"] = Field(
        default="records", description="shards: whole ones, checked by SHA-256."
    )
    node_shards: str | None = Field(
        default=None,
        description="Folder with each node's part of the shards. $VARIABLES are expanded.",
    )


class ShardData(Section):
    """Records in indexed tar shards: a folder, one tar, or a brace pattern."""

    source: Literal["shards"] = Field(default="shards", description="Kind of data.")
    path: str = Field(description="An indexed folder, tar or brace pattern.")
    public: bool = Field(default=False, description=_PUBLIC)
    public_fraction: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="A phase with `public` takes this share of the records, one without it the rest.",
    )
    expected_records: int | None = Field(default=None, gt=0, description="n for dry run and planner without data.")
    augment: Literal["none", "center", "random_resized_crop", "inception_crop"] = Field(
        default="none", description=_AUGMENT
    )
    tokenizer: str | None = Field(default=None, description=_TOKENIZER)
    label: str | None = Field(default=None, description=_LABEL)
    multi_label: bool = Field(default=False, description=_MULTI_LABEL)
    classes: str | None = Field(default=None, description=_CLASSES)
    classes_public: bool = Field(
        default=False,
        description="Your word, certified, that names from --classes-from-rows are public.",
    )
    exclude_classes: str | None = Field(default=None, description=_EXCLUDE_CLASSES)
    weight: str | None = Field(
        default=None,
        description="Field of a record's .json, 0 to 1e6, that multiplies its loss before clipping.",
    )
    unit: str | None = Field(
        default=None,
        description="Protects as one what is equal in this .json field or key:REGEX; 'record': each; null: as indexed.",
    )
    rows_per_unit: int | None = Field(
        default=None,
        gt=0,
        description="Most records of a unit in one step; null: one.",
    )
    unit_reduce: Literal["mean", "sum"] | None = Field(
        default=None,
        description="Combines a unit's losses; null: mean.",
    )
    expected_units: int | None = Field(default=None, gt=0, description="expected_records, with `unit`.")
    reading: ReadingSettings = Field(default=ReadingSettings(), description=_READING)

    @property
    def by(self) -> str | None:
        """What the units are named by; None: each record is one."""
        return None if self.unit == SINGLE else self.unit

    @model_validator(mode="after")
    def _of_units(self) -> ShardData:
        if self.by is None:
            alone = ("rows_per_unit", "unit_reduce", "expected_units")
            if odd := [name for name in alone if getattr(self, name) is not None]:
                raise ValueError(f"{', '.join(odd)} needs `unit`, which names what is protected; add it, or drop that")
            return self
        if (fault := fault_of_name(self.by)) is not None:
            raise ValueError(f"unit {self.by!r} {fault}")
        if self.public and self.public_fraction is None:
            raise ValueError("unit names what a private phase protects, and public records need none; leave it out")
        if self.expected_records is not None:
            raise ValueError(
                f"n counts units by {self.by!r}; give their number as expected_units, not expected_records, or set "
                f"unit to {SINGLE!r} to protect single records"
            )
        return self

    @model_validator(mode="after")
    def _by_node_or_by_share(self) -> ShardData:
        if self.classes_public and self.classes is None:
            raise ValueError("classes_public is about the list that `classes` names; name it, or drop the word")
        if self.reading.node_shards is not None and self.public_fraction is not None:
            raise ValueError("public_fraction takes records of all shards, reading.node_shards whole shards; drop one")
        if self.public_fraction is not None and self.exclude_classes is not None:
            raise ValueError(
                "public_fraction cuts a set by the number of its records, which exclude_classes changes; drop one"
            )
        _require_public(self)
        return self


class SyntheticData(Section):
    """Images generated during training, for phases without privacy."""

    source: Literal["synthetic"] = Field(description="Kind of data.")
    kind: PictureKind = Field(default="mixed", description="What images show; only `shapes` have captions.")
    records: int = Field(default=100_000, gt=0, description="Images in an epoch.")
    seed: int = Field(default=1, ge=0, description="Seed of the images.")
    size: int | None = Field(default=None, ge=8, description="Side before augmentation; null: the model's.")
    augment: Literal["none", "center", "random_resized_crop", "inception_crop"] = Field(
        default="none", description=_AUGMENT
    )
    tokenizer: str | None = Field(default=None, description=_TOKENIZER + " Only `shapes` have captions.")
    reading: ReadingSettings = Field(default=ReadingSettings(), description=_READING)

    @property
    def public(self) -> bool:
        return True

    @model_validator(mode="after")
    def _makes_sense(self) -> SyntheticData:
        if self.tokenizer is not None and self.kind != "shapes":
            raise ValueError(f"{self.kind} have no captions; use `shapes`, which do, or leave the tokenizer out")
        if self.reading.node_shards is not None:
            raise ValueError("synthetic pictures are stored on no node; leave reading.node_shards out")
        return self


class CheckpointData(Section):
    """Weights to start from, instead of records."""

    source: Literal["checkpoint"] = Field(description="Kind of data.")
    path: str = Field(description="A run directory, export, or released weights.")
    public: bool = Field(
        description="Your word, certified, that the weights are public or have their own promise; false: NOT PRIVATE.",
    )
    take_head: bool | None = Field(
        default=None,
        description="Takes a classifier's head, if classes match; null: only from our runs and exports.",
    )

    @model_validator(mode="before")
    @classmethod
    def _word_given(cls, given: Any) -> Any:
        return word_given(given, "weights to start from", "; or false, which marks the run NOT PRIVATE")


class HeldOutData(Section):
    """No records to train on: the phase only measures its `evaluation`."""

    source: Literal["held-out"] = Field(description="Kind of data.")
    tokenizer: str | None = Field(default=None, description=_TOKENIZER)

    @property
    def public(self) -> bool:
        return True


class StreamData(Section):
    """Tar shards that webdataset streams in shuffled epochs, without an index; for phases without privacy."""

    source: Literal["webdataset"] = Field(description="Kind of data.")
    path: str = Field(description="A folder, tar or brace pattern, or a URL.")
    public: bool = Field(default=False, description=_PUBLIC)
    buffer: int = Field(default=1000, gt=0, description="Records in a lane's shuffle buffer.")
    lanes: int = Field(
        default=8,
        gt=0,
        description="Streams over the shards: at least one per rank, at most one per shard.",
    )
    augment: Literal["none", "center", "random_resized_crop", "inception_crop"] = Field(
        default="none", description=_AUGMENT
    )
    tokenizer: str | None = Field(default=None, description=_TOKENIZER)
    label: str | None = Field(default=None, description=_LABEL)
    multi_label: bool = Field(default=False, description=_MULTI_LABEL)
    classes: str | None = Field(default=None, description=_CLASSES)
    exclude_classes: str | None = Field(default=None, description=_EXCLUDE_CLASSES)
    weight: str | None = Field(
        default=None,
        description="Field of a record's .json, 0 to 1e6, that multiplies its loss before clipping.",
    )
    reading: ReadingSettings = Field(default=ReadingSettings(), description=_READING)

    @model_validator(mode="after")
    def _makes_sense(self) -> StreamData:
        if self.reading.node_shards is not None or self.reading.cache_dir is not None:
            raise ValueError("a stream has no index of its records; leave node_shards and cache_dir out of reading")
        _require_public(self)
        if self.exclude_classes is not None and (self.classes is None or self.label is None):
            raise ValueError("exclude_classes needs label and classes, which say what class a streamed record has")
        return self


def _require_public(data: ShardData | StreamData) -> None:
    if data.exclude_classes is not None and not data.public:
        raise ValueError(_LOOKS_AT_LABELS)


def _source(data: Any) -> Any:
    return data.get("source", "shards") if isinstance(data, dict) else getattr(data, "source", None)


DATA_SECTIONS = {
    "shards": ShardData, "synthetic": SyntheticData, "checkpoint": CheckpointData, "held-out": HeldOutData,
    "webdataset": StreamData,
}  # fmt: skip
Data = Annotated[
    Annotated[ShardData, Tag("shards")]
    | Annotated[SyntheticData, Tag("synthetic")]
    | Annotated[StreamData, Tag("webdataset")]
    | Annotated[CheckpointData, Tag("checkpoint")]
    | Annotated[HeldOutData, Tag("held-out")],
    Discriminator(_source),
]
