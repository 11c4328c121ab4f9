"""Keys that DeepSpeed would accept but that would break, fake or publish something private, and settings that were
removed: refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _always(value: Any) -> bool:
    del value
    return True


def _enabled(value: Any) -> bool:
    return bool(value.get("enabled", True)) if isinstance(value, dict) else bool(value)


def _not(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value not in allowed or isinstance(value, bool) != any(isinstance(a, bool) for a in allowed)


# Dotted key -> (is this value refused?, why, and what to do).
REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "gradient_clipping": (
        _not(0, 0.0),
        "it would clip the noised mean, after the noise; set it to 0 and use phases[].privacy.clip for per-record "
        "clipping or phases[].optimizer.params.gradient_norm for a bound on the mean",
    ),
    "gradient_accumulation_steps": (
        _not(1),
        "Poisson batches vary in size, so the trainer does its own accumulation; set it to 1 and give "
        "phases[].privacy.expected_batch",
    ),
    "train_batch_size": (
        _always,
        "the logical batch is phases[].privacy.expected_batch (or phases[].batch); "
        "give only train_micro_batch_size_per_gpu",
    ),
    "fp16": (
        _enabled,
        "dynamic loss scaling skips steps depending on private gradients, and fp16 gradients change the clipped sum; "
        'leave it out, and set run.precision to "fp16" for the products in layers',
    ),
    "bf16": (
        _enabled,
        "bf16 parameters round the clipped sum and raise its sensitivity, so parameters stay fp32; leave it out, and "
        'set run.precision to "bf16" for the products in layers',
    ),
    "amp": (_enabled, "Apex scales the loss dynamically and skips steps depending on private gradients"),
    "torch_autocast": (_enabled, "DeepSpeed's own autocast communicates gradients in low precision"),
    "data_types": (_always, "gradients are accumulated and reduced in fp32, which is what the error bound assumes"),
    "communication_data_type": (_not("fp32", None), "gradients are reduced in fp32, which the error bound assumes"),
    "optimizer": (
        _always,
        "the optimizer belongs to a phase; move it to phases[].optimizer, and params.lr to phases[].schedule.peak",
    ),
    "scheduler": (
        _always,
        "the learning-rate schedule belongs to a phase; write its rate as phases[].schedule.peak and its warm-up as "
        "phases[].schedule.warmup",
    ),
    "prescale_gradients": (_always, "the sum is divided once, after the noise, by the constant q·n"),
    "gradient_predivide_factor": (_always, "the sum is divided once, after the noise, by the constant q·n"),
    "gradient_allreduce_op": (_always, "clipped sums are added over the ranks; the trainer sets this itself"),
    "managed_gradient_accumulation": (_always, "the trainer decides when a logical step ends and sets this itself"),
    "sparse_gradients": (_enabled, "noise must fall on every element, touched or not; leave it out"),
    "tensorboard": (_enabled, "DeepSpeed would publish private losses; the trainer writes tb/public and tb/private"),
    "wandb": (_enabled, "DeepSpeed would publish private losses; the trainer writes tb/public and tb/private"),
    "comet": (_enabled, "DeepSpeed would publish private losses; the trainer writes tb/public and tb/private"),
    "csv_monitor": (_enabled, "DeepSpeed would publish private losses; the trainer writes tb/public and tb/private"),
    "run.report_to": (
        _always,
        "the trainer calls no tracker; leave it out, and send RUN_DIR/tb/public to one, as docs/monitor.md shows",
    ),
    "dump_state": (_always, "it prints internal state that depends on private data"),
    "data_efficiency": (_enabled, "it replaces the Poisson sampler, and the accounting holds for that sampler only"),
    "curriculum_learning": (_enabled, "it changes which records take part, and the accounting would not know"),
    "compression_training": (_enabled, "it changes gradients after they were clipped"),
    "elasticity": (_enabled, "it would choose the batch size; resume on another number of ranks needs no setting"),
    "zenflow": (_always, "it applies updates partially and late, past the noise"),
    "zero_optimization.overlap_comm": (
        _not(False),
        "with unmanaged accumulation it reduces while micro-batches still arrive; set it to false",
    ),
    "zero_optimization.round_robin_gradients": (
        _not(False),
        "it reorders the shards so that noise and weights no longer match; set it to false",
    ),
    "zero_optimization.stage": (
        _not(0, 1, 2, 3),
        "DeepSpeed has stages 0 to 3; use stage 1",
    ),
    "zero_optimization.offload_optimizer.ratio": (
        _not(1, 1.0),
        "DeepSpeed would update the rest with an optimizer of its own, without noise; leave it out",
    ),
    "zero_optimization.offload_param": (
        _always,
        "it has not been shown to keep the weights and their noise together; leave it out",
    ),
    "zero_optimization.zero_quantized_gradients": (_enabled, "quantised gradients change the clipped sum"),
}

PHASE_REFUSED: dict[str, str] = {
    "sampler": "records are drawn only as privacy.sampling says, and the accounting holds for no other sampler",
    "shuffle": "records are drawn only as privacy.sampling says, and the accounting holds for no other sampler",
    "mixup": "it mixes records, so that no gradient belongs to one of them",
    "cutmix": "it mixes records, so that no gradient belongs to one of them",
    "seed": "a known seed makes sampling and noise predictable; keys come from the operating system",
}


def find_refusals(raw: dict[str, Any]) -> list[str]:
    """One sentence for each key of the file that is refused, whatever else the file says."""
    found: list[str] = []
    for dotted, (refused, reason) in REFUSED.items():
        present, value = _get(raw, dotted)
        if present and refused(value):
            found.append(f"{dotted} = {short(value)} is refused: {reason}")
    phases = raw.get("phases")
    for index, phase in enumerate(phases if isinstance(phases, list) else []):
        for section in (phase, phase.get("data"), phase.get("privacy")) if isinstance(phase, dict) else ():
            if not isinstance(section, dict):
                continue
            prefix = "" if section is phase else "data." if section is phase.get("data") else "privacy."
            # Synthetic pictures belong to nobody: nothing that follows from their seed must stay secret.
            allowed = {"seed"} if section.get("source") == "synthetic" else set[str]()
            found += [
                f"phases.{index}.{prefix}{key} is refused: {reason}"
                for key, reason in PHASE_REFUSED.items()
                if key in section.keys() - allowed
            ]
    return found


def _get(raw: dict[str, Any], dotted: str) -> tuple[bool, Any]:
    value: Any = raw
    for part in dotted.split("."):
        if not isinstance(value, dict) or part not in value:
            return False, None
        value = value[part]
    return True, value


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
