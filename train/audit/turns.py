"""What canaries show under correlated noise: one number for each turn, as if it were a step of independent noise.

A block releases its sums x with the noise B·z. The auditor has the matrix and multiplies what was released by M = B⁻¹,
which loses nothing: M·x + z, with independent z. A canary whose turn was step s of the block moved that by its gradient
along column s of M alone, so its projection on that column holds all there is to see of it. So canaries, draws and
claim are those of as many independent steps as a record has turns.
"""

from __future__ import annotations

import numpy as np

from murmuration.accounting.banded import BandedNoise
from murmuration.accounting.epsilon.audit_bound import AuditError


def by_turn(
    values: np.ndarray, took_part: np.ndarray, matrix: BandedNoise, numbers: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """[steps, canaries] each -> [turns, canaries]. `numbers`: those of the canaries among all records, which decide
    whose turn it is."""
    bands = matrix.bands
    if len(values) % bands:
        raise AuditError(f"{len(values)} steps are no whole number of blocks of {bands} steps")
    whitening = np.linalg.inv(matrix.whole)
    blocks = np.einsum("ij,tjc->tic", whitening, values.reshape(-1, bands, values.shape[1]))
    columns = whitening[:, (numbers - 1) % bands]  # step t draws part t modulo b, and the first step is 1
    turns = np.einsum("tic,ic->tc", blocks, columns) / np.square(columns).sum(axis=0)
    return turns, np.asarray(took_part.reshape(-1, bands, took_part.shape[1]).any(axis=1))
