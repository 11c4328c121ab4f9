"""The sampler of each way to draw records."""

from __future__ import annotations

from murmuration.accounting.sampling import AnySampling, RandomAllocation
from murmuration.data.draw.allocation import AllocationSampler
from murmuration.data.draw.poisson import DrawnInParts, PoissonSampler, StepKey


def make_sampler(
    rule: AnySampling, key: bytes | StepKey, digest_key: bytes | StepKey, records: int
) -> DrawnInParts:  # fmt: skip
    if isinstance(rule, RandomAllocation):
        return AllocationSampler(key, digest_key, records, rule.slots)
    return PoissonSampler(key, digest_key, records, rule.threshold, rule.parts)
