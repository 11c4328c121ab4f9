"""The config's section `zero_optimization`: how DeepSpeed shards."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from murmuration.train.config.section import Section


class Offload(Section):
    """Optimizer state in host memory: all of it, since DeepSpeed would update the rest with an optimizer of its own."""

    device: Literal["cpu"] = Field(default="cpu", description="Where optimizer state is kept: in host memory.")
    pin_memory: bool = Field(default=False, description="Keeps that memory page-locked, for faster copies.")
    adam: Literal["torch", "deepspeed"] = Field(
        default="torch",
        description="deepspeed: AdamW runs on the kernel of DeepSpeedCPUAdam, which is compiled at the first run.",
    )


class ZeroOptimization(Section):
    """DeepSpeed's section of that name, without the settings that hide or change gradients."""

    stage: Literal[0, 1, 2, 3] = Field(
        default=1, description="What is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too."
    )
    reduce_bucket_size: int = Field(default=50_000_000, gt=0, description="Most elements that one reduction takes.")
    allgather_bucket_size: int = Field(default=50_000_000, gt=0, description="Most elements that one gather takes.")
    contiguous_gradients: bool = Field(
        default=True, description="Copies gradients into one buffer as they are computed."
    )
    overlap_comm: Literal[False] = Field(
        default=False, description="Refused otherwise: it would reduce while micro-batches still arrive."
    )
    round_robin_gradients: Literal[False] = Field(
        default=False, description="Refused otherwise: it reorders shards, so that noise and weights no longer match."
    )
    offload_optimizer: Offload | None = Field(
        default=None, description="Keeps optimizer state in host memory; null: on the device."
    )
    stage3_param_persistence_threshold: int | None = Field(default=None, ge=0, description="Stage 3; DeepSpeed's own.")
    stage3_max_live_parameters: int | None = Field(default=None, gt=0, description="Stage 3; DeepSpeed's own.")
    stage3_prefetch_bucket_size: int | None = Field(default=None, gt=0, description="Stage 3; DeepSpeed's own.")
