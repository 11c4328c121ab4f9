"""What is asked of a library, and what its weights and its ε answer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from dp_accounting import dp_event, pld
from scipy import stats

from conformance import modules
from conformance.worker import DELTA, Job, Run

# An honest library fails a probe by chance once in a million times, for each interval that the probe looks at.
CHANCE = 1e-6
HOLDS, REFUSES, VIOLATES, NOT_APPLICABLE = "holds", "refuses", "violates", "not applicable"
N, BATCH, STEPS = 200, 20, 30


@dataclass(frozen=True)
class Verdict:
    answer: str
    said: str = ""


@dataclass(frozen=True)
class Probe:
    asks: str
    jobs: dict[str, Job]
    judge: Callable[[dict[str, Run]], Verdict]
    # A refusal is an answer where no library need train such a module.
    may_refuse: bool = False
    # Without this run the others are judged.
    optional: str = ""

    def verdict(self, runs: dict[str, Run]) -> Verdict:
        for name, run in runs.items():
            if name == self.optional and run.refused:
                continue
            if run.unsupported:
                return Verdict(NOT_APPLICABLE, run.unsupported)
            if run.refused:
                return Verdict(REFUSES if self.may_refuse else NOT_APPLICABLE, run.refused)
        return self.judge(runs)


class Meter:
    """A run of `modules.Meter`: who took part in each step, by which number the sum was divided, and the noise."""

    def __init__(self, run: Run, n: int, batch: int) -> None:
        flat = torch.stack([next(iter(state.values())).flatten().double() for state in run.weights])
        moved = flat[:-1] - flat[1:]
        self.steps, self.noise = len(moved), moved[:, n:]
        # A record adds 1/divisor; the noise of each coordinate is far below half of that.
        seen = moved[:, :n]
        large = seen > 0.5 / batch
        self.divisors = [
            1 / float(row[taken].mean()) if taken.any() else math.nan for row, taken in zip(seen, large, strict=True)
        ]
        known = [divisor for divisor in self.divisors if not math.isnan(divisor)]
        self.divisor = 1 / (sum(1 / divisor for divisor in known) / len(known)) if known else batch
        own = torch.tensor([batch if math.isnan(divisor) else divisor for divisor in self.divisors])[:, None]
        self.counts = (seen * own).round().clamp(min=0)
        self.sizes = self.counts.sum(1)


def sigma_interval(noise: torch.Tensor) -> tuple[float, float]:
    """Of normal numbers with mean 0."""
    total, count = float(noise.square().sum()), noise.numel()
    low, high = stats.chi2.ppf([CHANCE / 2, 1 - CHANCE / 2], count)
    return math.sqrt(total / high), math.sqrt(total / low)


def rate_interval(meter: Meter, n: int) -> tuple[float, float]:
    taken, drawn = int(meter.counts.clamp(max=1).sum()), n * meter.steps
    low = stats.beta.ppf(CHANCE / 2, taken, drawn - taken + 1) if taken else 0.0
    high = stats.beta.ppf(1 - CHANCE / 2, taken + 1, drawn - taken) if taken < drawn else 1.0
    return float(low), float(high)


@functools.cache
def poisson_epsilon(sigma: float, rate: float, steps: int) -> float:
    """By dp-accounting's privacy loss distributions."""
    accountant = pld.PLDAccountant()
    accountant.compose(dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(sigma)), steps)
    return accountant.get_epsilon(DELTA)


def sampling(runs: dict[str, Run]) -> Verdict:
    meter = Meter(runs["draws"], N, BATCH)
    if meter.steps != STEPS:
        return Verdict(VIOLATES, f"{meter.steps} steps where {STEPS} were asked for")
    if int(meter.counts.max()) > 1:
        return Verdict(VIOLATES, f"a record is added {int(meter.counts.max())} times in one step")
    epoch = N // BATCH
    once = [
        float((meter.counts[start : start + epoch].sum(0) == 1).double().mean()) for start in range(0, STEPS, epoch)
    ]
    if min(once) > 0.95:
        sizes = sorted({int(size) for size in meter.sizes})
        return Verdict(VIOLATES, f"each record once per epoch, in batches of {sizes}: shuffled, not drawn at random")
    rate = BATCH / N
    low, high = rate_interval(meter, N)
    if not low <= rate <= high:
        return Verdict(VIOLATES, f"q is between {low:.4f} and {high:.4f}, not {rate:.4f}")
    spread = float((meter.sizes - meter.sizes.mean()).square().sum()) / (N * rate * (1 - rate))
    if not CHANCE / 2 < stats.chi2.cdf(spread, STEPS - 1) < 1 - CHANCE / 2:
        return Verdict(VIOLATES, f"batches of {int(meter.sizes.min())} to {int(meter.sizes.max())}: not Poisson")
    return Verdict(HOLDS, f"Poisson, {int(meter.sizes.min())} to {int(meter.sizes.max())} of {N}")


def empty_draws(runs: dict[str, Run]) -> Verdict:
    few = Meter(runs["few"], 8, 1)
    if bool((few.sizes == 1).all()):
        return Verdict(NOT_APPLICABLE, "batches of one size")
    if few.steps != 60:
        return Verdict(VIOLATES, f"{few.steps} steps where 60 were asked for")
    if float(few.noise.std(1).min()) == 0:
        return Verdict(VIOLATES, "a step has no noise")
    empty, chance = int((few.sizes == 0).sum()), (1 - 1 / 8) ** 8
    if not stats.binom.ppf(CHANCE, 60, chance) <= empty <= stats.binom.ppf(1 - CHANCE, 60, chance):
        return Verdict(VIOLATES, f"{empty} of 60 draws are empty where {60 * chance:.0f} are expected")
    return Verdict(HOLDS, f"{empty} of 60 draws are empty, and are steps with noise")


def divisor(runs: dict[str, Run]) -> Verdict:
    """The asked batch, whatever is drawn and however many records there are."""
    meter = Meter(runs["draws"], N, BATCH)
    if meter.sizes.min() < meter.sizes.max():
        line = stats.linregress(meter.sizes.tolist(), [BATCH if math.isnan(d) else d for d in meter.divisors])
        if line.slope > 0.5:
            return Verdict(VIOLATES, f"the sum is divided by the drawn size: by {line.slope:.2f} more for each record")
    found = {N: meter.divisor, N + 1: Meter(runs["one more"], N + 1, BATCH).divisor}
    if abs(found[N + 1] / found[N] - 1) > 0.04:
        told = ", ".join(f"{value:.1f} at n = {n}" for n, value in found.items())
        return Verdict(VIOLATES, f"with batches of {BATCH}, the sum is divided by {told}")
    return Verdict(HOLDS, f"{found[N]:.1f} at n = {N}, {found[N + 1]:.1f} at n = {N + 1}")


def noise(runs: dict[str, Run]) -> Verdict:
    scale = Meter(runs["draws"], N, BATCH).divisor
    said = []
    for name in ("noise", "in parts"):
        if name not in runs or runs[name].unsupported:
            continue
        steps = Meter(runs[name], N, BATCH).noise * scale
        low, high = sigma_interval(steps)
        # What the divisor is known to, by some hundred records.
        if high * 1.02 < runs_sigma(name):
            return Verdict(VIOLATES, f"σ is between {low:.3f} and {high:.3f}, not {runs_sigma(name)} ({name})")
        if repeated := equal_rows(steps):
            return Verdict(VIOLATES, f"steps {repeated[0]} and {repeated[1]} have the same noise ({name})")
        said.append(f"{low:.3f} to {high:.3f}")
    return Verdict(HOLDS, f"σ = 1 is {'; in parts '.join(said)}")


def runs_sigma(name: str) -> float:
    return NOISE_JOBS[name].sigma


def equal_rows(steps: torch.Tensor) -> tuple[int, int] | None:
    """Two steps whose noise is correlated, counted from 1."""
    unit = steps / steps.norm(dim=1, keepdim=True).clamp(min=1e-30)
    products = (unit @ unit.T).abs().triu(1)
    worst = int(products.argmax())
    row, column = divmod(worst, len(steps))
    return (row + 1, column + 1) if products[row, column] > 0.1 else None


def noise_of(run: Run) -> torch.Tensor:
    return Meter(run, 20, 20).noise


def same(one: Run, other: Run) -> bool:
    a, b = noise_of(one), noise_of(other)
    return a.shape == b.shape and bool(torch.allclose(a, b, atol=1e-6))


def seeds(runs: dict[str, Run]) -> Verdict:
    if same(runs["none"], runs["none again"]):
        return Verdict(VIOLATES, "two runs without a seed have the same noise")
    if not same(runs["5"], runs["5 again"]):
        return Verdict(HOLDS, "the script's seed does not decide the noise")
    short = runs["5 + 2**32"].weights and same(runs["5"], runs["5 + 2**32"])
    said = "who knows the script's seed knows the noise" + ("; seeds 5 and 5 + 2**32 give the same" if short else "")
    return Verdict(VIOLATES, said)


def resumed_noise(runs: dict[str, Run]) -> Verdict:
    for name, run in runs.items():
        if repeated := equal_rows(noise_of(run)):
            return Verdict(
                VIOLATES, f"stopped after step 3, step {repeated[1]} has the noise of step {repeated[0]} ({name})"
            )
    return Verdict(HOLDS, "new noise in all steps, with and without a seed in the script")


def accounting(name: str) -> Callable[[dict[str, Run]], Verdict]:
    def judge(runs: dict[str, Run]) -> Verdict:
        draws, run = Meter(runs["draws"], N, BATCH), runs[name]
        meter = Meter(run, N, BATCH)
        if run.epsilon is None:
            return Verdict(NOT_APPLICABLE, "states no ε")
        _, sigma = sigma_interval(meter.noise * draws.divisor)
        least = poisson_epsilon(sigma * 1.02, max(rate_interval(draws, N)[0], 1e-9), meter.steps)
        told = f"ε = {run.epsilon:.3f} after {meter.steps} steps"
        asked = poisson_epsilon(1.0, BATCH / N, meter.steps)
        whole = runs["noise"].epsilon if name == "stopped" else None
        if whole is not None and run.epsilon < 0.999 * whole:
            return Verdict(VIOLATES, f"{told}; without a stop the library itself says {whole:.3f}")
        if run.epsilon < least:
            return Verdict(VIOLATES, f"{told}; what was seen costs {least:.3f} or more, what was asked for {asked:.3f}")
        return Verdict(HOLDS, f"{told}; by dp-accounting {asked:.3f}")

    return judge


def difference(a: Run, b: Run) -> float:
    """The norm of the difference of two first steps' sums, in units of C."""
    total = sum(float((a.weights[1][name] - b.weights[1][name]).double().square().sum()) for name in a.weights[1])
    return math.sqrt(total) * 16


def sensitivity(runs: dict[str, Run]) -> Verdict:
    by_chance, moved = difference(runs["there"], runs["there again"]), difference(runs["there"], runs["not there"])
    # Two runs' noise, where it cannot be pinned; and the rounding of fp32.
    if math.isnan(moved):
        return Verdict(VIOLATES, "one record makes the weights NaN")
    if moved > 1.02 + 1.2 * by_chance:
        return Verdict(VIOLATES, f"one record moves the sum by {moved:.2f}·C")
    return Verdict(HOLDS, f"{moved:.2f}·C")


def parameters(module: str) -> Callable[[dict[str, Run]], Verdict]:
    """Full batches: two first steps differ by their noise, and their mean is the clipped sum."""

    def judge(runs: dict[str, Run]) -> Verdict:
        sums, model = modules.clipped_sum(module, 16), modules.make(module, 16)
        wrong = []
        for name, parameter in model.named_parameters():
            start, one, other = (runs[key].weights[at][name].double() for key, at in (("a", 0), ("a", 1), ("b", 1)))
            if not parameter.requires_grad:
                if not torch.equal(start, one):
                    wrong.append(f"{name} is frozen and moves")
                continue
            if torch.equal(start, one) and torch.equal(start, other):
                wrong.append(f"{name} is not trained")
                continue
            _, high = sigma_interval((one - other) * 16 / math.sqrt(2))
            quiet = float((one == other).double().mean())
            if high < 0.1 or quiet > 0.01:
                wrong.append(f"{name} has noise of {high:.3f} where 0.1 is planned, none in {quiet:.0%} of its numbers")
                continue
            expected, seen = sums[name].double(), (start - (one + other) / 2) * 16
            length = float(expected.norm())
            share = float((seen * expected).sum()) / length**2 if length > 0 else 1.0
            if abs(share - 1) > 0.05 + 6 * 0.1 / max(length, 1e-9):
                wrong.append(f"{name} moves by {share:.2f} of its clipped gradient")
        if wrong:
            return Verdict(VIOLATES, "; ".join(wrong))
        return Verdict(HOLDS, "all that is trained has noise and its clipped gradient")

    return judge


def meter_job(sigma: float, steps: int = STEPS, n: int = N, batch: int = BATCH, **more: object) -> Job:
    return Job("meter", n, batch, steps, sigma, **more)  # type: ignore[arg-type]


# σ of the runs that show who takes part: ten deviations of noise to a record.
LOW = 0.1
DRAWS = meter_job(LOW, claim=False)
# By 30 steps q is known so poorly that one run in five hid half of its steps behind it; by 120, one in a million.
MANY_DRAWS = meter_job(LOW, 4 * STEPS, claim=False)
NOISE_JOBS = {"draws": DRAWS, "noise": meter_job(1.0), "in parts": meter_job(1.0, micro=10)}
PROBES = {
    "sampling": Probe("Are batches drawn as the accountant assumes?", {"draws": DRAWS}, sampling),
    "empty draws": Probe(
        "Is an empty draw a step with noise?",
        {"few": meter_job(LOW, 60, 8, 1, claim=False)}, empty_draws, may_refuse=True,
    ),
    "divisor": Probe(
        "Is the sum divided by a public constant, not by the drawn size, and not by one that n moves?",
        {"draws": DRAWS, "one more": meter_job(LOW, n=N + 1, claim=False)}, divisor,
    ),
    "noise": Probe("Has each step noise of its own, with the planned σ?", NOISE_JOBS, noise),
    "seed": Probe(
        "Can who knows the seed at the script's top know the noise?",
        {
            name: meter_job(1.0, 2, 20, 20, seed=seed)
            for name, seed in (("none", None), ("none again", None), ("5", 5), ("5 again", 5), ("5 + 2**32", 5 + 2**32))
        }, seeds, optional="5 + 2**32",
    ),
    "noise after a restart": Probe(
        "Is no noise repeated when the script is stopped and started again?",
        {
            name: meter_job(1.0, 6, 20, 20, seed=seed, stop=3, claim=False)
            for name, seed in (("no seed", None), ("a seed in the script", 5))
        }, resumed_noise,
    ),
    "accounting": Probe(
        "Is ε at least that of the σ, q and T that were seen?",
        {"draws": MANY_DRAWS, "noise": meter_job(1.0)}, accounting("noise"),
    ),
    "accounting in parts": Probe(
        "The same, where a batch is computed in parts.",
        {"draws": MANY_DRAWS, "in parts": meter_job(1.0, micro=10)}, accounting("in parts"),
    ),
    "accounting after a restart": Probe(
        "The same, after a stop.",
        {"draws": MANY_DRAWS, "noise": meter_job(1.0), "stopped": meter_job(1.0, stop=20)}, accounting("stopped"),
    ),
    "parameters": Probe(
        "Has all that is trained noise, and is all that is declared trained?",
        {name: Job("parts", 16, 16, 1, LOW, seed=seed, claim=False) for name, seed in (("a", 1), ("b", 2))},
        parameters("parts"),
    ),
    "LoRA": Probe(
        "Do low-rank changes train, and they alone?",
        {name: Job("LoRA", 16, 16, 1, LOW, seed=seed, claim=False) for name, seed in (("a", 1), ("b", 2))},
        parameters("LoRA"),
    ),
    **{
        f"sensitivity: {module}": Probe(
            "Does one record move the sum of a step by at most C?",
            {
                name: Job(module, 16, 16, 1, LOW, seed=7, pinned=True, without=without, claim=False)
                for name, without in (("there", None), ("there again", None), ("not there", 0))
            }, sensitivity, may_refuse=True,
        )
        for module in modules.MODULES if module not in ("meter", "parts", "LoRA")
    },
}  # fmt: skip


def verdicts(names: list[str], train: Callable[[list[Job]], list[Run]]) -> dict[str, Verdict]:
    """A run that several probes look at is made once; equal jobs of one probe are runs of their own."""
    wanted: dict[tuple[str, str], tuple[Job, int]] = {}
    for name in names:
        jobs = PROBES[name].jobs
        for at, (key, job) in enumerate(jobs.items()):
            wanted[name, key] = job, list(jobs.values())[:at].count(job)
    distinct = list(dict.fromkeys(wanted.values()))
    runs = dict(zip(distinct, train([job for job, _ in distinct]), strict=True))
    return {name: PROBES[name].verdict({key: runs[wanted[name, key]] for key in PROBES[name].jobs}) for name in names}
