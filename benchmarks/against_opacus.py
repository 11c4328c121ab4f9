"""A small network on real images, by PrivateTraining, by Opacus and by JAX Privacy in turn.

    OMP_NUM_THREADS=1 python benchmarks/against_opacus.py --out benchmarks/results/against_opacus.json
    OMP_NUM_THREADS=1 python benchmarks/against_opacus.py --network mnist --epsilons 3
    OMP_NUM_THREADS=1 python benchmarks/against_opacus.py --network vit_tiny --epsilons 3
    uv pip install --target build/jax jax-privacy==2.0.0
    PYTHONPATH=build/jax OMP_NUM_THREADS=1 python benchmarks/against_opacus.py \\
        --libraries murmuration opacus jax_privacy
    OMP_NUM_THREADS=1 python benchmarks/against_opacus.py --features TRAIN TEST --epsilons 1

The 1,797 digits of 8 × 8 pixels come with scikit-learn; 359 are held out. Model, optimizer, rate, batch, epochs,
clipping norm, ε and δ are the same, each run has a process of its own, and the two take turns. `mnist` is the network
of 26,010 weights of Opacus' own MNIST example, on the same digits enlarged to 28 × 28 pixels. `vit_tiny` trains the
head alone, on a ViT-Ti of random weights through which every step passes. With `--features` it is a linear head on what
runs of `ds_configs/studies/mehta_one_step.json` stored of CIFAR-10. Seconds are those of the processor once packages
are imported, up to the last step: for Opacus with calibration, for ours with calibration, self-test, ledger,
certificate and its verification. `ms a step` is the median of the steps alone, all threads together. `peak` is the most
memory of that process. JAX Privacy, which is no part of this environment, compiles the same network from equal weights;
its seconds contain that.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

HELD_OUT = 359
LIBRARIES = ("murmuration", "opacus", "jax_privacy")


Data = tuple[TensorDataset, TensorDataset]


@dataclass(frozen=True)
class Setting:
    network: Callable[[], nn.Module]
    data: Callable[[list[Path]], Data]
    shape: tuple[int, ...]
    batch: int
    epochs: int = 20
    rate: float = 0.5
    momentum: float = 0.0
    norm: float = 1.0
    delta: float = 1e-4


def digits(side: int) -> Data:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    pixels = torch.from_numpy(images).float().view(-1, 1, 8, 8)[order] / 8 - 1
    pixels = F.interpolate(pixels, size=side)
    answers = torch.from_numpy(labels).long()[order]
    return (
        TensorDataset(pixels[HELD_OUT:], answers[HELD_OUT:]),
        TensorDataset(pixels[:HELD_OUT], answers[:HELD_OUT]),
    )


def stored(folders: list[Path]) -> Data:
    """Features and labels that runs stored of private and of held-out records."""
    from real_heads import read

    def one(folder: Path) -> TensorDataset:
        features, labels = read(folder)
        return TensorDataset(torch.from_numpy(features), torch.from_numpy(labels))

    private, public = map(one, folders)
    return private, public


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def of_opacus_example() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten(),
        nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def head_of_vit_tiny() -> nn.Module:
    """Of a body that is the same in every run: ViT-Ti, with patches of 7 of 28 pixels."""
    from timm.models.vision_transformer import VisionTransformer

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = VisionTransformer(
            img_size=28, patch_size=7, in_chans=1, embed_dim=192, depth=12, num_heads=3, num_classes=10
        )
    for name, weight in model.named_parameters():
        weight.requires_grad_(name.startswith("head."))
    return model


SETTINGS = {
    "digits": Setting(network, lambda _: digits(8), (1, 8, 8), 128),
    "mnist": Setting(of_opacus_example, lambda _: digits(28), (1, 28, 28), 200),
    "vit_tiny": Setting(head_of_vit_tiny, lambda _: digits(28), (1, 28, 28), 128, epochs=5),
    "head": Setting(
        lambda: nn.Linear(1280, 10), stored, (1280,), 5000, epochs=10, rate=0.5, momentum=0.9, norm=4.3, delta=1e-5
    ),
}


class Clock:
    """Seconds of the processor from one call to the next."""

    def __init__(self) -> None:
        self.seconds, self._last = list[float](), time.process_time()

    def step(self) -> None:
        now = time.process_time()
        self.seconds.append(now - self._last)
        self._last = now


def by_opacus(setting: Setting, private: TensorDataset, epsilon: float, clock: Clock) -> tuple[nn.Module, float]:
    from opacus import PrivacyEngine

    model = setting.network()
    optimizer = optim.SGD(model.parameters(), lr=setting.rate, momentum=setting.momentum)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=DataLoader(private, batch_size=setting.batch),
        target_epsilon=epsilon, target_delta=setting.delta, epochs=setting.epochs, max_grad_norm=setting.norm,
    )  # fmt: skip
    for _ in range(setting.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            clock.step()
    return model, engine.get_epsilon(setting.delta)


def by_us(setting: Setting, private: TensorDataset, epsilon: float, clock: Clock) -> tuple[nn.Module, float]:
    import murmuration

    with tempfile.TemporaryDirectory() as folder:
        settings = murmuration.Settings(
            privacy=murmuration.Privacy(
                epsilon=epsilon, delta=setting.delta, expected_batch=setting.batch,
                clip=murmuration.Clip(norm=setting.norm),
            ),
            epochs=setting.epochs, dataset="public images", run_dir=f"{folder}/run", log_every=10**6,
        )  # fmt: skip
        with murmuration.PrivateTraining(
            setting.network, private, settings,
            loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
            optimizer=partial(optim.SGD, lr=setting.rate, momentum=setting.momentum),
            example=(torch.zeros(setting.shape), torch.tensor(0)),
        ) as training:  # fmt: skip
            for _ in training:
                clock.step()
            return training.model, training.finish().epsilon


def by_jax_privacy(
    setting: Setting, private: TensorDataset, epsilon: float, clock: Clock
) -> tuple[nn.Module, float]:  # fmt: skip
    """As its documentation has it: clipped_grad, padded Poisson batches, noise on the mean."""
    jax, optax = import_module("jax"), import_module("optax")
    batch_selection, clipping, noise_addition, accounting = (
        import_module(f"jax_privacy.{each}") for each in ("batch_selection", "clipping", "noise_addition", "accounting")
    )
    model, n = setting.network(), len(private)
    images, labels = (tensor.numpy() for tensor in private.tensors)
    weights = {name: jax.numpy.asarray(p.detach().numpy()) for name, p in model.named_parameters()}
    forward = in_jax(jax, model)

    def loss(weights: Any, images: Any, labels: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(forward(weights, images), labels).sum()

    steps, of = round(setting.epochs * n / setting.batch), dict(num_samples=n, target_delta=setting.delta)
    accountant = accounting.DpsgdTrainingAccountant(accounting.PldAccountantConfig())
    sigma = accounting.calibrate_noise_multiplier(
        target_epsilon=epsilon, accountant=accountant, batch_sizes=setting.batch, num_updates=steps, **of
    )
    seed = torch.initial_seed()
    gradient = clipping.clipped_grad(
        loss, l2_clip_norm=setting.norm, normalize_by=setting.batch, batch_argnums=(1, 2), keep_batch_dim=True
    )
    noise = noise_addition.gaussian_privatizer(
        stddev=sigma * gradient.sensitivity(), prng_key=jax.random.key(seed)
    )  # fmt: skip
    optimizer = optax.sgd(setting.rate, setting.momentum or None)

    @jax.jit
    def step(weights: Any, noised: Any, state: Any, images: Any, labels: Any, padding: Any) -> Any:
        mean, noised = noise.update(gradient(weights, images, labels, is_padding_example=padding), noised)
        moves, state = optimizer.update(mean, state, weights)
        return optax.apply_updates(weights, moves), noised, state

    noised, state = noise.init(weights), optimizer.init(weights)
    drawn = batch_selection.CyclicPoissonSampling(sampling_prob=setting.batch / n, iterations=steps)
    for rows in drawn.batch_iterator(n, rng=seed):
        padded = batch_selection.pad_to_multiple_of(rows, 32)
        weights, noised, state = step(weights, noised, state, images[padded], labels[padded], padded < 0)
        jax.block_until_ready(weights)
        clock.step()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.from_numpy(numpy.array(weights[name])))
    spent = accounting.DpParams(
        noise_multipliers=sigma, num_samples=n, delta=setting.delta, batch_size=setting.batch
    )  # fmt: skip
    return model, float(accountant.compute_epsilon(steps, spent))


def in_jax(jax: Any, model: nn.Module) -> Callable[[dict[str, Any], Any], Any]:
    """The layers of the networks above, as a function of their weights by name."""

    def forward(weights: dict[str, Any], x: Any) -> Any:
        for name, layer in model.named_children():
            if isinstance(layer, nn.Conv2d):
                sides = [(side, side) for side in layer.padding]
                x = jax.lax.conv_general_dilated(x, weights[f"{name}.weight"], layer.stride, sides)
                x = x + weights[f"{name}.bias"][:, None, None]
            elif isinstance(layer, nn.GroupNorm):
                groups = x.reshape(len(x), layer.num_groups, -1)
                groups = (groups - groups.mean(2, keepdims=True)) / (groups.var(2, keepdims=True) + layer.eps) ** 0.5
                x = groups.reshape(x.shape) * weights[f"{name}.weight"][:, None, None]
                x = x + weights[f"{name}.bias"][:, None, None]
            elif isinstance(layer, nn.MaxPool2d):
                window, stride = ((1, 1, side, side) for side in (layer.kernel_size, layer.stride))
                x = jax.lax.reduce_window(x, -jax.numpy.inf, jax.lax.max, window, stride, "VALID")
            elif isinstance(layer, nn.Linear):
                x = x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
            else:
                x = x.reshape(len(x), -1) if isinstance(layer, nn.Flatten) else jax.nn.relu(x)
        return x

    return forward


TRAINED: dict[str, Callable[[Setting, TensorDataset, float, Clock], tuple[nn.Module, float]]] = {
    "murmuration": by_us, "opacus": by_opacus, "jax_privacy": by_jax_privacy,
}  # fmt: skip


IMPORTED = {
    "murmuration": ("opacus", "murmuration.train.library.training"),
    "opacus": ("opacus", "murmuration.train.library.training"),
    "jax_privacy": ("jax", "optax", "jax_privacy.accounting"),
}  # fmt: skip


def run(library: str, name: str, epsilon: float, seed: int, folders: list[Path]) -> dict[str, Any]:
    for each in IMPORTED[library]:
        import_module(each)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    setting = SETTINGS[name]
    private, public = setting.data(folders)
    begun, clock = time.process_time(), Clock()
    model, spent = TRAINED[library](setting, private, epsilon, clock)
    seconds = time.process_time() - begun
    images, labels = public.tensors
    with torch.no_grad():
        top_1 = float((model.eval()(images).argmax(1) == labels).float().mean())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"library": library, "epsilon": epsilon, "spent": spent, "seed": seed, "top_1": top_1,
            "cpu_seconds": seconds, "step_ms": 1e3 * statistics.median(clock.seconds), "peak_mib": peak}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 3.0, 8.0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES[:2])
    parser.add_argument("--network", choices=("digits", "mnist", "vit_tiny"), default="digits")
    parser.add_argument("--features", nargs=2, type=Path, metavar=("TRAIN", "TEST"), default=[])
    parser.add_argument("--run", nargs=3, metavar=("LIBRARY", "EPSILON", "SEED"), help="one run, as JSON")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    name, folders = "head" if given.features else given.network, given.features
    if given.run:
        print(json.dumps(run(given.run[0], name, float(given.run[1]), int(given.run[2]), folders)))
        return
    found: list[dict[str, Any]] = []
    for seed in range(given.seeds):
        for epsilon in given.epsilons:
            for library in given.libraries:
                asked = ["--network", given.network, "--run", library, str(epsilon), str(seed)]
                asked += ["--features", *map(str, folders)] if folders else []
                done = subprocess.run([sys.executable, __file__, *asked], check=True, capture_output=True, text=True)
                found.append(json.loads(done.stdout.splitlines()[-1]))
    print("| ε | library | top-1 | CPU seconds | ms a step | peak, MiB |\n|---|---|---|---|---|---|")
    for epsilon in given.epsilons:
        for library in given.libraries:
            runs = [each for each in found if (each["library"], each["epsilon"]) == (library, epsilon)]
            accuracy = [each["top_1"] for each in runs]
            spread = statistics.stdev(accuracy) if len(runs) > 1 else 0.0
            keys = ("cpu_seconds", "step_ms", "peak_mib")
            seconds, step, peak = (statistics.median(each[key] for each in runs) for key in keys)
            told = f"{statistics.mean(accuracy):.3f} ± {spread:.3f}"
            print(f"| {epsilon:g} | {library} | {told} | {seconds:.1f} | {step:.1f} | {peak:.0f} |")
    if given.out is not None:
        given.out.write_text(json.dumps({"runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
