"""Whether a sample is normal, by tests that would see one that is not."""

from __future__ import annotations

import numpy as np
from scipy import stats


def normal_in_every_respect(sample: np.ndarray, std: float) -> bool:
    """Mean, variance, kurtosis and the whole distribution, each at a level of about 1e-6."""
    x = sample.astype(np.float64) / std
    n, z = len(x), 4.9
    checks = [
        abs(x.mean()) < z / np.sqrt(n),
        abs(x.var() - 1) < z * np.sqrt(2 / n),
        abs((x**3).mean()) < z * np.sqrt(15 / n),
        abs((x**4).mean() - 3) < z * np.sqrt(96 / n),
        stats.kstest(x[:200_000], "norm").pvalue > 1e-6,
    ]
    return all(checks)
