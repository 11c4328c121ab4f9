"""The heads of `ds_configs/studies/mehta_one_step.json` computed again, by NumPy and scikit-learn alone.

    OMP_NUM_THREADS=1 python benchmarks/real_heads.py TRAIN TEST --out benchmarks/results/real_heads.json
    OMP_NUM_THREADS=1 python benchmarks/real_heads.py TRAIN TEST --epochs --out benchmarks/results/real_epochs.json
    OMP_NUM_THREADS=1 python benchmarks/real_heads.py TRAIN TEST --ablations \\
        --out benchmarks/results/real_ablations.json
    OMP_NUM_THREADS=1 python benchmarks/real_heads.py TRAIN TEST --by-epsilon --seeds 5 \\
        --epsilons 0.25 0.5 1 2 4 6 8 10 --out benchmarks/results/real_epsilon.json
    OMP_NUM_THREADS=1 python benchmarks/real_heads.py TRAIN TEST --descent --seeds 2 \\
        --out benchmarks/results/real_descent.json
    OMP_NUM_THREADS=1 python benchmarks/real_heads.py TRAIN TEST --whitened --seeds 5 \\
        --out benchmarks/results/real_whitened.json

TRAIN and TEST are the folders in which runs of the study keep the features of the private and of the held-out records.
Nothing of the trainer runs here: the noise of a single Gaussian step is solved from its closed form, drawn by NumPy,
and added to sums that NumPy makes. So the private numbers must be the study's, within their scatter. The last rows are
the best heads that scikit-learn finds without noise. `--epochs`: ten epochs in Poisson batches, as in
`mehta_batch.json`, with the noise that dp-accounting finds; `--ablations`: those of `mehta_ablations.json`;
`--by-epsilon`: those of `mehta_epsilon.json`; `--descent`: 100 steps at a constant rate, as in `mehta_one_step.json` at
size cifar_descent; `--whitened`: its whitened arm at size cifar_stage, whose folders hold the last stage's features.
`--grid` prints the head in one pass for other shares of its sums and other ridges, by one draw of noise each.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr, softmax
from sklearn.linear_model import LogisticRegression, RidgeClassifier

CLASSES, DELTA = 10, 1e-5
STEPS, PEAK, MOMENTUM, NORM = 60, 0.67, 0.9, 4.3
"""As in ds_configs/studies/cifar10_descent.json."""
MORE_STEPS, CONSTANT = 100, {0.25: 0.07, 0.5: 0.14, 1.0: 0.25, 2.0: 0.4, 4.0: 0.65, 8.0: 1.0}
"""Their number, and the rate by ε."""
SUMS, WHITENED_NORM, WHITENED = 0.1, 4.0, {0.25: 0.05, 1.0: 0.18, 8.0: 1.0}
"""The sums' share of the budget, the clipping norm, and the rate by ε, about as in cifar10_whitened.json."""
EPOCHS, RATES = 10, {("momentum", 1250): 0.1, ("momentum", 5000): 0.5, ("Adam", 5000): 0.015}
"""As in mehta_batch.json at size cifar."""
ABLATIONS: dict[str, dict[str, float]] = {
    "LAMB": {}, "LeCun head": {"scale": 1.0}, "1 epoch": {"epochs": 1}, "C = 17": {"norm": 17.0}, "C = 1": {"norm": 1.0}
}  # fmt: skip
"""What each arm of mehta_ablations.json changes at size cifar."""
RIDGES = (0.125, 0.25, 0.5, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.25, 1.0, 8.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", action="store_true")
    parser.add_argument("--ablations", action="store_true")
    parser.add_argument("--by-epsilon", action="store_true")
    parser.add_argument("--descent", action="store_true")
    parser.add_argument("--whitened", action="store_true")
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    features, labels = read(given.train)
    held, answers = read(given.test)

    def top_1(weight: np.ndarray, bias: np.ndarray | float = 0.0) -> float:
        return float(((held @ weight.T + bias).argmax(1) == answers).mean())

    if given.grid:
        return grid(features, labels, top_1)
    rows: list[dict[str, object]] = []

    def note(head: str, epsilon: float | None, found: list[float]) -> None:
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        rows.append({"head": head, "epsilon": epsilon, "top_1": statistics.mean(found), "sd": spread, "runs": found})
        told = "without noise" if epsilon is None else f"ε = {epsilon:g}"
        print(f"{head:<22} {told:<14} {statistics.mean(found):.4f} ± {spread:.4f}", flush=True)

    def save() -> None:
        if given.out is not None:
            given.out.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")

    if given.epochs:
        for (optimizer, batch), peak in RATES.items():
            sigma = sigma_of_draws(1.0, batch / len(features), EPOCHS * len(features) // batch)
            found = [
                top_1(*in_batches(features, labels, optimizer, batch, peak, sigma, seed)) for seed in range(given.seeds)
            ]
            note(f"{optimizer}, {batch}", 1.0, found)
        return save()
    if given.ablations:
        for arm, changed in ABLATIONS.items():
            steps = int(changed.get("epochs", EPOCHS)) * len(features) // 5000
            sigma = sigma_of_draws(1.0, 5000 / len(features), steps)

            def once(seed: int, sigma: float = sigma, changed: dict[str, float] = changed) -> float:
                return top_1(*in_batches(features, labels, "LAMB", 5000, 0.05, sigma, seed, **changed))

            note(arm, 1.0, [once(seed) for seed in range(given.seeds)])
        return save()
    if given.by_epsilon:
        for epsilon in given.epsilons:
            sigma = sigma_of_draws(epsilon, 5000 / len(features), EPOCHS * len(features) // 5000)
            found = [
                top_1(*in_batches(features, labels, "LAMB", 5000, 0.05, sigma, seed)) for seed in range(given.seeds)
            ]
            note("last layer, LAMB", epsilon, found)
        return save()
    if given.descent:
        for epsilon in given.epsilons:
            found = [
                top_1(*descent(features, labels, sigma_of(epsilon), seed, MORE_STEPS, CONSTANT[epsilon], falls=False))
                for seed in range(given.seeds)
            ]
            note("100 steps, constant rate", epsilon, found)
        without = descent(features, labels, 0.0, 0, MORE_STEPS, CONSTANT[8.0], falls=False)
        note("100 steps, constant rate", None, [top_1(*without)])
        return save()
    if given.whitened:
        for epsilon in given.epsilons:
            found = [
                top_1(*whitened(features, labels, sigma_of(epsilon), seed, WHITENED[epsilon]))
                for seed in range(given.seeds)
            ]
            note("whitened, 100 steps", epsilon, found)
        note("whitened, 100 steps", None, [top_1(*whitened(features, labels, 0.0, 0, WHITENED[8.0]))])
        for strength in (0.003, 0.01, 0.03, 0.1):
            logistic = LogisticRegression(C=strength, max_iter=1000).fit(features, labels)
            note(f"logistic, C = {strength:g}", None, [top_1(logistic.coef_, logistic.intercept_)])
        return save()
    heads: dict[str, Callable[[float, int], float]] = {
        "60 steps, momentum": lambda e, seed: top_1(*descent(features, labels, sigma_of(e), seed)),
        "one pass": lambda e, seed: top_1(one_pass(features, labels, sigma_of(e), seed)),
    }
    for head, make in heads.items():
        for epsilon in given.epsilons:
            note(head, epsilon, [make(epsilon, seed) for seed in range(given.seeds)])
    note("60 steps, momentum", None, [top_1(*descent(features, labels, 0.0, 0))])
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    for strength in (1.0, 0.1):
        ridge = RidgeClassifier(alpha=strength, fit_intercept=False, solver="cholesky").fit(unit, labels)
        note(f"ridge, {strength:g}", None, [top_1(ridge.coef_)])
    logistic = LogisticRegression(C=0.01, max_iter=1000).fit(features, labels)
    note("logistic regression", None, [top_1(logistic.coef_, logistic.intercept_)])
    save()


def read(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    labels = np.fromfile(folder / "labels.i64", np.int64)
    return np.fromfile(folder / "features.f32", np.float32).reshape(len(labels), -1), labels


def sigma_of(epsilon: float) -> float:
    """The noise multiplier of one Gaussian mechanism with this ε (Balle and Wang, 2018)."""

    def excess(sigma: float) -> float:
        middle = epsilon * sigma
        return ndtr(0.5 / sigma - middle) - math.exp(epsilon) * ndtr(-0.5 / sigma - middle) - DELTA

    return cast(float, brentq(excess, 0.05, 500.0))


def descent(
    features: np.ndarray, labels: np.ndarray, sigma: float, seed: int, steps: int = STEPS, peak: float = PEAK,
    falls: bool = True, norm: float = NORM,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Softmax regression from zero in steps over all records; T steps with noise σ√T are one with noise σ."""
    chance, inputs = np.random.default_rng(seed), np.hstack([features, np.ones((len(features), 1), np.float32)])
    right = np.eye(CLASSES, dtype=np.float32)[labels]
    lengths = np.linalg.norm(inputs, axis=1)
    weight = np.zeros((CLASSES, inputs.shape[1]), np.float32)
    move = np.zeros_like(weight)
    for step in range(steps):
        errors = softmax(inputs @ weight.T, axis=1) - right
        norms = np.linalg.norm(errors, axis=1) * lengths
        errors *= np.minimum(1, norm / np.maximum(norms, 1e-12))[:, None]
        total = errors.T @ inputs
        total += sigma * math.sqrt(steps) * norm * chance.standard_normal(weight.shape).astype(np.float32)
        move = MOMENTUM * move + total / len(features)
        weight -= peak * (0.5 * (1 + math.cos(math.pi * step / steps)) if falls else 1.0) * move
    return weight[:, :-1], weight[:, -1]


def sigma_of_draws(epsilon: float, rate: float, steps: int) -> float:
    """The noise multiplier of Poisson draws, by dp-accounting's privacy loss distributions."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    def event(sigma: float) -> dp_accounting.DpEvent:
        draw = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
        return dp_accounting.SelfComposedDpEvent(draw, steps)

    guess = dp_accounting.LowerEndpointAndGuess(0.25, 4.0)
    found = dp_accounting.calibrate_dp_mechanism(
        lambda: PLDAccountant(value_discretization_interval=1e-3), event, epsilon, DELTA, guess, tol=1e-3
    )
    return cast(float, found)


def in_batches(
    features: np.ndarray, labels: np.ndarray, optimizer: str, batch: int, peak: float, sigma: float, seed: int,
    epochs: float = EPOCHS, norm: float = NORM, scale: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Softmax regression, each record drawn with probability batch/n: momentum falls by a cosine, Adam and LAMB
    linearly. The weights start as N(0, scale²/inputs)."""
    chance, inputs = np.random.default_rng(seed), np.hstack([features, np.ones((len(features), 1), np.float32)])
    right, lengths = np.eye(CLASSES, dtype=np.float32)[labels], np.linalg.norm(inputs, axis=1)
    steps = int(epochs) * len(features) // batch
    weight = np.zeros((CLASSES, inputs.shape[1]), np.float32)
    if scale:
        weight[:, :-1] = scale / math.sqrt(features.shape[1]) * chance.standard_normal((CLASSES, features.shape[1]))
    first, second = np.zeros_like(weight), np.zeros_like(weight)
    for step in range(steps):
        mine = np.flatnonzero(chance.random(len(features)) < batch / len(features))
        errors = softmax(inputs[mine] @ weight.T, axis=1) - right[mine]
        norms = np.linalg.norm(errors, axis=1) * lengths[mine]
        errors *= np.minimum(1, norm / np.maximum(norms, 1e-12))[:, None]
        total = errors.T @ inputs[mine] + sigma * norm * chance.standard_normal(weight.shape).astype(np.float32)
        mean = total / batch
        if optimizer == "momentum":
            first = MOMENTUM * first + mean
            weight -= peak * 0.5 * (1 + math.cos(math.pi * step / steps)) * first
            continue
        first, second = 0.9 * first + 0.1 * mean, 0.999 * second + 0.001 * mean**2
        size = np.sqrt(second / (1 - 0.999 ** (step + 1))) + 1e-8
        move = first / (1 - 0.9 ** (step + 1)) / size
        if optimizer == "LAMB" and weight[:, :-1].any():  # the bias, the last column, has no trust ratio
            move[:, :-1] *= np.linalg.norm(weight[:, :-1]) / np.linalg.norm(move[:, :-1])
        weight -= peak * (1 - step / steps) * move
    return weight[:, :-1], weight[:, -1]


def one_pass(
    features: np.ndarray, labels: np.ndarray, sigma: float, seed: int, share: float = 0.3, ridge: float = 0.25
) -> np.ndarray:
    """Ridge regression from two noised sums."""
    values, vectors, cross, largest = sums(features, labels, sigma, seed, share)
    return cross @ (vectors / (np.maximum(values, 0) + ridge * largest)) @ vectors.T


def whitened(
    features: np.ndarray, labels: np.ndarray, sigma: float, seed: int, peak: float
) -> tuple[np.ndarray, np.ndarray]:
    """Descent on features that the first of the sums has whitened, as a head for features as they are."""
    values, vectors, _, largest = sums(features, labels, sigma / math.sqrt(SUMS), seed, 0.3)
    kept = max(largest, len(features) / len(values))
    whitening = (vectors * np.sqrt(kept / (np.maximum(values, 0) + kept))) @ vectors.T
    inputs, own = (features @ whitening).astype(np.float32), sigma / math.sqrt(1 - SUMS)
    weight, bias = descent(inputs, labels, own, seed, MORE_STEPS, peak, falls=False, norm=WHITENED_NORM)
    return weight @ whitening, bias


def sums(
    features: np.ndarray, labels: np.ndarray, sigma: float, seed: int, share: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Each record, its features of length 1, adds (√share·z zᵀ, √(1 - share)·y zᵀ). Of the first sum eigenvalues and
    vectors, the second, and the largest eigenvalue of the noise alone: what it hides tells its mean alone."""
    chance, width = np.random.default_rng(seed), features.shape[1]
    unit = (features / np.linalg.norm(features, axis=1, keepdims=True)).astype(np.float64)
    of_second, of_cross = sigma / math.sqrt(share), sigma / math.sqrt(1 - share)
    second = unit.T @ unit + of_second * chance.standard_normal((width, width))
    cross = np.eye(CLASSES)[labels].T @ unit + of_cross * chance.standard_normal((CLASSES, width))
    values, vectors = np.linalg.eigh((second + second.T) / 2)
    largest = of_second * math.sqrt(2 * width)
    alike = np.abs(values - np.sort(values)[(width - 1) // 2]) <= largest
    values[alike] = values[alike].mean()
    return values, vectors, cross, largest


def grid(features: np.ndarray, labels: np.ndarray, top_1: Callable[[np.ndarray], float]) -> None:
    for records in (5000, len(features)):
        some = np.random.default_rng(0).permutation(len(features))[:records]
        for epsilon in (0.25, 1.0, 8.0, 100.0):
            for share in (0.1, 0.3, 0.5, 0.7):
                found = [
                    top_1(one_pass(features[some], labels[some], sigma_of(epsilon), 0, share, ridge))
                    for ridge in RIDGES
                ]
                shown = "  ".join(f"{each:.3f}" for each in found)
                print(f"{records:>6,} records  ε = {epsilon:<5g} share {share}  ridge {RIDGES}: {shown}", flush=True)


if __name__ == "__main__":
    main()
