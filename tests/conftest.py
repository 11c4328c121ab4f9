"""Which tests are the core that `make test` runs, and what tests of every folder may ask for."""

from __future__ import annotations

import gc
import importlib
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

from tests.support import cpu_seconds, share
from tests.times import Times

# No test may fail because the machine was slow, or by chance: with `search`, hypothesis draws other examples each time.
for profile, repeated in (("suite", True), ("search", False)):
    settings.register_profile(
        profile, deadline=None, derandomize=repeated, suppress_health_check=[HealthCheck.too_slow], print_blob=True
    )
settings.load_profile("suite")

TESTS = Path(__file__).resolve().parent

# Every test of these files is core, unless it is marked slow or rest.
CORE_FILES = {
    "the private step": [
        "train/test_train_step.py", "train/test_train_sums.py", "train/test_train_sensitivity.py",
        "train/test_train_engines.py", "train/test_train_optim.py", "train/test_train_metrics.py",
        "train/test_train_mixing.py", "train/test_train_resume.py", "train/test_train_private_training.py",
    ],
    "the self-test and faults that it must find": [
        "train/test_train_self_test.py", "train/test_train_self_test_faults.py",
    ],
    "clipping": [
        "train/test_train_clip_rule.py", "train/test_train_clip_norms.py",
        "train/test_train_clip_check.py", "train/test_train_clip_adaptive.py", "train/test_train_clip_refusals.py",
        "model/test_model_safety.py",
    ],
    "noise": [
        "train/test_train_noise.py", "train/test_train_noise_bits.py", "train/test_train_noise_chacha.py",
        "train/test_train_noise_ahead.py", "train/test_train_noise_exact.py",
    ],
    "the draw": ["data/test_data_sampler.py", "data/test_data_batches.py"],
    "ledger and certificate": [
        "accounting/test_acc_ledger.py", "accounting/test_acc_journal.py", "accounting/test_acc_histories.py",
        "accounting/test_acc_adaptive.py", "accounting/test_acc_heads.py", "accounting/test_acc_composition_of_runs.py",
        "train/test_train_sibling_runs.py",
        "accounting/test_acc_certificate.py", "accounting/test_acc_strict_json.py", "accounting/test_acc_exact.py",
    ],
    "epsilon": [
        "accounting/test_acc_plan_keys.py", "accounting/test_acc_calibrate.py", "accounting/test_acc_ground_truth.py",
        "accounting/test_acc_refusals.py",
    ],
    "config": [
        "train/test_train_config.py", "train/test_train_config_digest.py",
        "train/test_train_recipe.py", "train/test_train_exits.py",
    ],
    "the repository": ["test_repository.py", "test_structure.py"],
}  # fmt: skip
# Of these files only the tests that are marked `core` there: one end-to-end run, and any two settings of clipping.
PARTLY_CORE_FILES = [
    "train/test_train_clip_parity.py", "train/test_train_clip_parity_half.py", "end_to_end/test_e2e_kills.py",
]  # fmt: skip
# What comes of many roundings: with the oldest kernels and packages all of these run, not only those of the core.
ARITHMETIC_FILES = [
    "accounting/test_acc_composition.py", "train/test_train_noise.py", "train/test_train_noise_bits.py",
    "train/test_train_sums.py", "train/test_train_clip_norms.py", "train/test_train_clip_rule.py",
    "train/test_train_clip_parity_half.py", "train/test_train_engines.py", "train/test_train_step.py",
    "train/test_train_sensitivity.py", "train/test_train_optim.py",
]  # fmt: skip

WHOLLY = {TESTS / name for names in CORE_FILES.values() for name in names}
PARTLY = {TESTS / name for name in PARTLY_CORE_FILES}
ARITHMETIC = {TESTS / name for name in ARITHMETIC_FILES}


def pytest_configure(config: pytest.Config) -> None:
    lost = sorted(str(path) for path in WHOLLY | PARTLY | ARITHMETIC if not path.exists())
    if lost:
        raise pytest.UsageError(f"tests/conftest.py names core files that do not exist: {', '.join(lost)}")
    if cpu_seconds.WANTED in os.environ:
        config.pluginmanager.register(cpu_seconds.CPUSeconds(Path(os.environ[cpu_seconds.WANTED])))
    if share.WANTED in os.environ:
        config.pluginmanager.register(share.Share(os.environ[share.WANTED]))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m core` does not import the other files: that alone would take as long as the core."""
    if not (wanted := config.getoption("markexpr").lstrip("(")).startswith("core"):
        return None  # as pytest decides
    chosen = WHOLLY | PARTLY | (ARITHMETIC if "arithmetic" in wanted else set())
    return True if collection_path.name.startswith("test_") and collection_path not in chosen else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("core") and item.path not in PARTLY:
            raise pytest.UsageError(
                f"{item.nodeid} is marked core, in a file that CORE_FILES do not name: it never runs"
            )
        if item.path in WHOLLY and not item.get_closest_marker("rest"):
            item.add_marker("core")
        if item.path in ARITHMETIC:
            item.add_marker("arithmetic")
        if item.path.is_relative_to(TESTS / "contrib"):  # what no recipe uses is tried by `make test-slow` alone
            item.add_marker("slow")
    # What takes longest begins first, or one core would still be at it when the others are done.
    table, files = Times.read().tests, Counter[Path]()
    for item in items:
        files[item.path] += table.get(item.nodeid.removeprefix("tests/"), share.CHEAP)
    items.sort(key=lambda item: -files[item.path])


most_modules = 0


def freeze_imports() -> None:
    """What was imported stays. The library collects and looks through all objects at every start and save, which took
    most of a toy run."""
    global most_modules
    if len(sys.modules) > most_modules:
        most_modules = len(sys.modules)
        gc.collect()
        gc.freeze()


def pytest_collection_finish() -> None:
    freeze_imports()


def pytest_runtest_logfinish() -> None:
    freeze_imports()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Which tests ran before must not decide what a test draws, nor what a fixture does that is made for it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a file of benchmarks/: programs that lie beside each other and are no package."""
    monkeypatch.syspath_prepend(str(TESTS.parent / "benchmarks"))
    return importlib.import_module
