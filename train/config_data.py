"""Sections of the config that say where records come from and how they are read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from data.kinds import Kind
from train.section import Section

_TOKENIZER = "'clip', 'clip:16384', or a local tokenizer.json or vocab.txt that saw no private caption."


class ReadingSettings(Section):
    """How records are fetched and decoded. Nothing here changes a pixel, so a resumed run may change it."""

    workers: int | None = Field(
        default=None,
        ge=0,
        description="Decoding processes per rank; null: the free cores; 0: inside the trainer, not isolated.",
    )
    in_flight: int | None = Field(default=None, gt=0, description="Records read at a time; null: 64 from a URL.")
    timeout_seconds: float = Field(default=30.0, gt=0, description="Of one request to a remote store.")
    cache_dir: str | None = Field(default=None, description="Local folder that keeps remote records, in the clear.")
    cache_gib: float = Field(default=100.0, gt=0, description="At most this much is kept, by all ranks of a node.")
    cache_keep: Literal["records", "shards"] = "records"
    node_shards: str | None = Field(
        default=None,
        description="Folder in which each node holds copies of some of the shards; $VARIABLES are filled in. A record "
        "is then computed where it lies. The draw stays the same.",
    )


class ShardData(Section):
    """Records in indexed tar shards: a folder, one tar, or a brace pattern."""

    source: Literal["shards"] = "shards"
    path: str
    public: bool = Field(default=False, description="Your word that nobody's privacy depends on these records.")
    public_fraction: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Cuts the records in two, once and for all runs: a phase with `public` takes this share, one "
        "without it the rest, whose number is its n.",
    )
    expected_records: int | None = Field(
        default=None, gt=0, description="Serves --dry-run where the data are not at hand."
    )
    augment: Literal["none", "center", "random_resized_crop", "inception_crop"] = "none"
    tokenizer: str | None = Field(default=None, description=_TOKENIZER)
    label: str | None = Field(
        default=None,
        description="For classifiers: an integer field of the records' .json, or 'cls' for their .cls or class folder.",
    )
    weight: str | None = Field(
        default=None,
        description="A number in the records' .json, from 0 to 1e6, that their loss is multiplied by before clipping.",
    )
    reading: ReadingSettings = ReadingSettings()

    @model_validator(mode="after")
    def _by_node_or_by_share(self) -> ShardData:
        if self.reading.node_shards is not None and self.public_fraction is not None:
            raise ValueError("public_fraction takes records of all shards, reading.node_shards whole shards; drop one")
        return self


class SyntheticData(Section):
    """Pictures made by rule while training: nobody's, so for phases that are not private."""

    source: Literal["synthetic"]
    kind: Kind = "mixed"
    records: int = Field(default=100_000, gt=0, description="Different pictures; an epoch shows each of them once.")
    seed: int = Field(default=1, ge=0, description="Another seed, other pictures.")
    size: int | None = Field(default=None, ge=8, description="Side in pixels before augmenting; null: as the model's.")
    augment: Literal["none", "center", "random_resized_crop", "inception_crop"] = "none"
    tokenizer: str | None = Field(default=None, description=_TOKENIZER + " Only `shapes` have captions.")
    reading: ReadingSettings = ReadingSettings()

    @property
    def public(self) -> bool:
        return True

    @model_validator(mode="after")
    def _makes_sense(self) -> SyntheticData:
        if self.tokenizer is not None and self.kind != "shapes":
            raise ValueError(f"{self.kind} have no captions; `shapes` do, or leave the tokenizer away")
        if self.reading.node_shards is not None:
            raise ValueError("pictures made by rule lie on no node; leave reading.node_shards out")
        return self


class CheckpointData(Section):
    """Weights to start from, in the place of records: a run directory, an export, or a file of released weights."""

    source: Literal["checkpoint"]
    path: str
    public: bool = Field(
        default=True,
        description="Your word that nobody's privacy depends on these weights, or that a promise of their own covers "
        "it; false marks the run NOT PRIVATE.",
    )
    take_head: bool | None = Field(
        default=None,
        description="Whether a classifier takes its head from there, too, if that has as many classes; null: from this "
        "project's own runs and exports alone. false: it starts by model.head_scale and model.head_bias.",
    )


class HeldOutData(Section):
    """No records to train on: the phase measures its `evaluation` and leaves the weights as they are."""

    source: Literal["held-out"]
    tokenizer: str | None = Field(default=None, description=_TOKENIZER)

    @property
    def public(self) -> bool:
        return True


class StreamData(Section):
    """Tar shards that webdataset streams in shuffled epochs, without an index: for phases that are not private."""

    source: Literal["webdataset"]
    path: str = Field(description="A folder, one tar, or a brace pattern, of files or behind a URL.")
    public: bool = Field(default=False, description="Your word that nobody's privacy depends on these records.")
    buffer: int = Field(default=1000, gt=0, description="Records of each lane among which it shuffles.")
    lanes: int = Field(
        default=8,
        gt=0,
        description="Streams that the shards are dealt out to and that each step takes equally from: at least one per "
        "rank, at most one per shard.",
    )
    augment: Literal["none", "center", "random_resized_crop", "inception_crop"] = "none"
    tokenizer: str | None = Field(default=None, description=_TOKENIZER)
    label: str | None = Field(
        default=None,
        description="For classifiers: an integer field of the records' .json, or 'cls' for their .cls or class folder.",
    )
    weight: str | None = Field(
        default=None,
        description="A number in the records' .json, from 0 to 1e6, that their loss is multiplied by before clipping.",
    )
    reading: ReadingSettings = ReadingSettings()

    @model_validator(mode="after")
    def _makes_sense(self) -> StreamData:
        if self.reading.node_shards is not None or self.reading.cache_dir is not None:
            raise ValueError("a stream has no index to find records by; leave node_shards and cache_dir out of reading")
        return self


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
