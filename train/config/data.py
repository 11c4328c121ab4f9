"""Sections of the config that say where records come from and how they are read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from murmuration.accounting.unit import SINGLE, fault_of_name
from murmuration.data.synthetic.kinds import PictureKind
from murmuration.train.config.section import Section, word_given

_TOKENIZER = "'clip', 'clip:16384', 'clip:full', or a local tokenizer.json or vocab.txt that saw no private caption."
_AUGMENT = (
    "none: the whole picture, scaled to the model's size; center: its middle square; the other two: a random crop, "
    "flipped half of the time."
)
_CLASSES = (
    "Public file that numbers the classes: one name per line, or a JSON list. Class folders and names in .cls files "
    "are looked up in it, identically in all phases. Required for private class folders."
)
_EXCLUDE_CLASSES = (
    "Public file, written as `classes` is, with the names of classes whose records are left out. For public data. "
    "Shards and streams need `label` and `classes`, which say what the numbers in them mean."
)
_LOOKS_AT_LABELS = (
    "exclude_classes is for public data: which records of a private set have such a class is private, and n must not "
    "depend on it; leave these classes off the list of `classes`, and private records of them keep their slots and "
    "contribute nothing"
)
_LABEL = "For classifiers: integer field of a record's .json, or 'cls' for its .cls file or class folder."
_MULTI_LABEL = (
    "A record may have any number of classes: `label` names a field of its .json that lists names of `classes`, or "
    "numbers; [] is none. Needs model.classify_loss 'sigmoid'."
)
_READING = "How records are fetched and decoded."
_PUBLIC = "Your word that nobody's privacy depends on these records."


class ReadingSettings(Section):
    """How records are fetched and decoded. Nothing here changes a pixel, so a resumed run may change it."""

    workers: int | None = Field(
        default=None,
        ge=0,
        description="Decoding processes per rank; null: the free cores; 0: decodes inside the trainer, not isolated.",
    )
    timeout_seconds: float = Field(default=30.0, gt=0, description="Limit for one request to a remote store.")
    cache_dir: str | None = Field(default=None, description="Local folder that keeps remote records, unencrypted.")
    cache_gib: float = Field(default=100.0, gt=0, description="Largest total size of the cache of a node's ranks.")
    cache_keep: Literal["records", "shards"] = Field(
        default="records", description="shards: whole shards, checked against the SHA-256 of the manifest."
    )
    node_shards: str | None = Field(
        default=None,
        description="Folder in which each node holds copies of some of the shards; $VARIABLES are expanded. A record "
        "is then processed on a node that holds it. The draw stays the same.",
    )


class ShardData(Section):
    """Records in indexed tar shards: a folder, one tar, or a brace pattern."""

    source: Literal["shards"] = Field(default="shards", description="Names this kind of data.")
    path: str = Field(description="A folder, one tar, or a brace pattern, indexed by launch/prepare.py index.")
    public: bool = Field(default=False, description=_PUBLIC)
    public_fraction: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Splits the records in two, identically in every run: a phase with `public` takes this share; a "
        "phase without it takes the rest, whose number is its n.",
    )
    expected_records: int | None = Field(
        default=None, gt=0, description="n for --dry-run and the planner where the data are not available."
    )
    augment: Literal["none", "center", "random_resized_crop", "inception_crop"] = Field(
        default="none", description=_AUGMENT
    )
    tokenizer: str | None = Field(default=None, description=_TOKENIZER)
    label: str | None = Field(default=None, description=_LABEL)
    multi_label: bool = Field(default=False, description=_MULTI_LABEL)
    classes: str | None = Field(default=None, description=_CLASSES)
    classes_public: bool = Field(
        default=False,
        description="Your word, which the certificate repeats, that the names in `classes` are public, although "
        "prepare.py pack took them from the rows (--classes-from-rows).",
    )
    exclude_classes: str | None = Field(default=None, description=_EXCLUDE_CLASSES)
    weight: str | None = Field(
        default=None,
        description="Field of a record's .json, a number from 0 to 1e6, that multiplies its loss before clipping.",
    )
    unit: str | None = Field(
        default=None,
        description="What is protected as one: all records with the same value of this field of their .json "
        "(patient_id), or key:PATTERN, those in whose keys a regular expression finds the same. The index must know it "
        "(prepare.py index --unit); n, expected_batch and the draws then count units. 'record': each record. null: "
        "what the index knows, else each record.",
    )
    rows_per_unit: int | None = Field(
        default=None,
        gt=0,
        description="The most records of a unit that one step takes, chosen anew by key in each step; null: one.",
    )
    unit_reduce: Literal["mean", "sum"] | None = Field(
        default=None,
        description="What becomes of the losses of a unit's records before its gradient is clipped; null: their mean.",
    )
    expected_units: int | None = Field(
        default=None, gt=0, description="With `unit`, in place of expected_records: n where the data are not available."
    )
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
    """Pictures generated during training. They belong to nobody, so they are for phases that are not private."""

    source: Literal["synthetic"] = Field(description="Names this kind of data.")
    kind: PictureKind = Field(default="mixed", description="What the pictures show; only `shapes` have captions.")
    records: int = Field(default=100_000, gt=0, description="Number of pictures; an epoch shows each of them once.")
    seed: int = Field(default=1, ge=0, description="Seed from which the pictures are generated.")
    size: int | None = Field(
        default=None, ge=8, description="Side in pixels before augmentation; null: the model's image size."
    )
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
    """Weights to start from, instead of records: a run directory, an export, or a file of released weights."""

    source: Literal["checkpoint"] = Field(description="Names this kind of data.")
    path: str = Field(description="A run directory, an export, or a file or folder of released weights.")
    public: bool = Field(
        description="Your word, which the certificate repeats, that nobody's privacy depends on these weights, or that "
        "a promise of their own covers it; false marks the run NOT PRIVATE.",
    )
    take_head: bool | None = Field(
        default=None,
        description="Whether a classifier also takes its head from there, if the number of classes matches; null: only "
        "from this project's own runs and exports. false: model.head_scale and model.head_bias initialise the head.",
    )

    @model_validator(mode="before")
    @classmethod
    def _word_given(cls, given: Any) -> Any:
        return word_given(given, "weights to start from", "; or false, which marks the run NOT PRIVATE")


class HeldOutData(Section):
    """No records to train on: the phase measures its `evaluation` and leaves the weights as they are."""

    source: Literal["held-out"] = Field(description="Names this kind of data.")
    tokenizer: str | None = Field(default=None, description=_TOKENIZER)

    @property
    def public(self) -> bool:
        return True


class StreamData(Section):
    """Tar shards that webdataset streams in shuffled epochs, without an index; for phases that are not private."""

    source: Literal["webdataset"] = Field(description="Names this kind of data.")
    path: str = Field(description="A folder, one tar, or a brace pattern, local or behind a URL.")
    public: bool = Field(default=False, description=_PUBLIC)
    buffer: int = Field(default=1000, gt=0, description="Size of each lane's shuffle buffer, in records.")
    lanes: int = Field(
        default=8,
        gt=0,
        description="Number of streams among which the shards are divided; each step takes equally many records from "
        "each. At least one per rank, at most one per shard.",
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
        description="Field of a record's .json, a number from 0 to 1e6, that multiplies its loss before clipping.",
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
