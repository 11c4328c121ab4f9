"""The library: a module of one's own, trained by `murmuration.PrivateTraining` on tensors in memory."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from murmuration import AdaptiveClip, Clip, Units
from murmuration.accounting.certificate.verify import verify
from murmuration.accounting.epsilon.accountant import epsilon
from murmuration.accounting.event import Event
from murmuration.accounting.keys import RunKey
from murmuration.accounting.ledger.chain import BudgetSpent, LedgerError
from murmuration.accounting.ledger.history import History
from murmuration.accounting.noise import NoiseKind
from murmuration.data.decode.decode import BadRecord
from murmuration.train.clip.rule import rounding_allowance
from murmuration.train.config.optimizer import Optimizer, OptimizerParams
from murmuration.train.core import Computation
from murmuration.train.distributed.stop import Stopped
from murmuration.train.noise.aes import AESNoise
from murmuration.train.noise.chacha import ChaChaNoise
from murmuration.train.noise.exact import ExactNoise
from murmuration.train.self_test.self_test import SelfTestError
from tests.support.own_module import RATE, RECORDS, SEED, Regression, X, Y, read, run, synthetic, training


@pytest.mark.parametrize(
    "kind", ["aes", *(pytest.param(kind, marks=pytest.mark.rest) for kind in ("chacha20", "exact"))]
)
def test_the_weights_are_those_of_a_computation_by_hand(tmp_path: Path, kind: NoiseKind) -> None:
    """Draw, clipped gradients one record at a time, keyed noise, the constant divisor, SGD; all from the run's key."""
    found = run(tmp_path / "run", 3, computation=Computation(noise=kind))
    history, entries = History.read(tmp_path / "run" / "ledger.jsonl")
    plan, (segment,) = history.plans[0], history.segments_of(0)
    link = RunKey.from_debug_seed(SEED).first_link(segment.chain_name, 1).state
    opened = {entry.fields["step"]: entry.fields["facts"] for entry in entries if entry.kind == "open"}
    model = Regression()
    bound = plan.clip_norm / (1 + rounding_allowance(8))
    for step in (1, 2, 3):
        sampling, digest_key, noise_key = (
            hkdf(link, f"murmuration/2|key|{purpose}") for purpose in ("sampling", "sampling-digest", "noise")
        )
        source = ChaChaNoise if kind == "chacha20" else AESNoise
        mechanism = source(noise_key, plan.noise_std, plan.divisor)
        assert opened[step]["noise"]["generator"] == ("aes-256-ctr-exact" if kind == "exact" else source.generator)
        if kind == "exact":
            mechanism = ExactNoise.of(noise_key, plan, sum(p.numel() for p in model.parameters()))
        assert opened[step]["noise"].get("grid", 0.0) == mechanism.grid
        link = hkdf(link, "murmuration/2|next step")
        threshold = round(plan.sampling_rate * 2**32)
        ids = drawn(sampling, step, plan.records, threshold)
        told = hmac.new(digest_key, np.array([step, threshold, plan.records], "<u8").tobytes(), hashlib.sha256)
        told.update(ids.astype("<i8").tobytes())
        assert told.hexdigest() in json.dumps(opened[step]), "the ledger tells of this very draw"
        total = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
        for number in ids:
            loss = model(read(np.array([number]))).sum()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            norm = torch.sqrt(sum(((g.double() ** 2).sum() for g in gradients), torch.zeros((), dtype=torch.float64)))
            for sum_, gradient in zip(total, gradients, strict=True):
                sum_ += gradient.double() * min(1.0, bound / float(norm))
        with torch.no_grad():
            for number, (parameter, sum_) in enumerate(zip(model.parameters(), total, strict=True)):
                noise = mechanism.draw(step, number, 0, parameter.numel(), np.float64) * (mechanism.grid or 1.0)
                mean = (sum_ + torch.from_numpy(noise).view_as(sum_)) / plan.divisor
                parameter -= RATE * mean.float()
    for name, expected in model.state_dict().items():
        assert torch.allclose(found[name], expected, rtol=1e-5, atol=1e-6), name


def hkdf(secret: bytes, info: str) -> bytes:
    """RFC 5869 without salt, for 32 bytes: extract, then one block of expand."""
    extracted = hmac.new(bytes(32), secret, hashlib.sha256).digest()
    return hmac.new(extracted, info.encode() + b"\x01", hashlib.sha256).digest()


def drawn(key: bytes, step: int, records: int, threshold: int) -> np.ndarray:
    """The definition: lane i of the keystream of (key, step) is below K."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    stream = Cipher(algorithms.AES(key), modes.CTR((step << 64).to_bytes(16, "big"))).encryptor()
    lanes = np.frombuffer(stream.update(bytes(4 * records)), "<u4")
    return np.flatnonzero(lanes.astype(np.uint64) < threshold)


PEOPLE = [f"p{number * 7 % 20}" for number in range(RECORDS)]
OTHERS = [PEOPLE[1], PEOPLE[0], *PEOPLE[2:]]
BY_PERSON: dict[str, Any] = {"units": Units("person", PEOPLE, rows=2), "expected_batch": 8}
MOMENTUM = Optimizer.model_validate({"type": "SGD", "params": OptimizerParams(momentum=0.9)})


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": Optimizer.model_validate({"type": "AdamW", "params": OptimizerParams()})},
        pytest.param({"optimizer": MOMENTUM}, marks=pytest.mark.rest),
        pytest.param(BY_PERSON, marks=pytest.mark.rest),
        pytest.param({"computation": Computation(noise="exact")}, marks=pytest.mark.rest),
        pytest.param({"clip": Clip(adaptive=AdaptiveClip())}, marks=pytest.mark.rest),
    ],
    ids=["moments", "momentum", "units", "exact noise", "norms that adapt"],
)
def test_a_run_that_was_closed_continues_as_if_it_had_not_been(tmp_path: Path, settings: dict[str, Any]) -> None:
    """With the optimizer's moments and the norm of the next step."""
    whole = run(tmp_path / "whole", 6, **settings)
    for steps in (2, 3, 6):
        parts = run(tmp_path / "parts", steps, **settings)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert len(History.read(tmp_path / "parts" / "ledger.jsonl")[0].segments_of(0)) == 1


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose first step is made; and one of people."""
    folder = tmp_path_factory.mktemp("begun")
    run(folder / "records", 1)
    run(folder / "people", 1, **BY_PERSON)
    return folder


@pytest.mark.rest
@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("records", {"dataset": "another"}, "records of phase 'training' changed"),
        ("records", {"steps": 9}, r"steps \(6, now 9\) changed"),
        ("records", {"micro_batch": 16}, "configured differently"),
        ("records", {"views": 3}, "plan .* is frozen"),
        ("records", {"optimizer": MOMENTUM}, "configured differently"),
        ("records", {"optimizer": partial(torch.optim.SGD, lr=RATE)}, "configured differently"),
        # Both are Gaussian and of one σ, but the same key would draw other numbers for a step that is made again.
        ("records", {"computation": Computation(noise="chacha20")}, "was configured differently when it began"),
        ("records", {"computation": Computation(noise="exact")}, r"plan .* is frozen in the ledger, but .*noise"),
        ("people", BY_PERSON | {"units": Units("person", OTHERS, rows=2)}, "units changed"),
    ],
)  # fmt: skip
def test_other_records_plans_and_computations_are_not_continued(
    begun: Path, name: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(LedgerError, match=said):
        training(begun / name, **changes)


def test_steps_that_a_crash_lost_are_not_made_again_under_their_keys_and_stay_charged(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), training(tmp_path) as found:
        found.prove()
        found.step(1, RATE)
        found.save()
        found.step(2, RATE)
        found.step(3, RATE)  # seen by whoever looks at the model, and never saved
        spent = found.epsilon()
        raise ZeroDivisionError
    with training(tmp_path) as found:
        assert found.done == 1 and found.epsilon() == spent
        found.prove()
        with pytest.raises(BudgetSpent):
            for step in found.steps():
                found.step(step, RATE)
        verdict = found.finish()
    history, _ = History.read(tmp_path / "ledger.jsonl")
    assert [segment.from_step for segment in history.segments_of(0)] == [0, 1]
    assert "may have been seen" in history.segments_of(0)[1].reason
    assert (verdict.opened, verdict.committed, found.done) == (6, 6, 4) and verdict.epsilon <= 20


@pytest.mark.rest
def test_a_finished_run_says_the_same_again_and_trains_no_more(tmp_path: Path) -> None:
    with training(tmp_path, about_data="points on a line", about_owner="a clinic") as found:
        found.prove()
        for step in found.steps():
            found.step(step, RATE)
        first = found.finish()
    assert first.certified == first.epsilon == verify(tmp_path).epsilon and 19 < first.epsilon <= 20
    assert not (tmp_path / "secret" / "run.key").exists()
    certified = json.loads((tmp_path / "certificate.json").read_text())
    assert certified["model"] == "Regression, 8,401 parameters"
    assert "responsible: a clinic" in (tmp_path / "certificate.md").read_text()
    with training(tmp_path) as found:
        assert list(found.steps()) == [] and found.finish() == first and found.saved == found.done
        for refused in (found.prove, found.save):
            with pytest.raises(LedgerError, match="finished; give another run_dir"):
                refused()


class Silent(Regression):
    """Multiplies the losses of some records by zero."""

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return super().forward(inputs) * inputs["weight"]


BAD = 7


@pytest.fixture(scope="module")
def without_it(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Weights after steps in which the record's gradient is zero."""

    def weighted(numbers: np.ndarray) -> dict[str, Tensor]:
        return {**read(numbers), "weight": torch.tensor([float(n != BAD) for n in numbers.tolist()])}

    def with_weight(size: int, seed: int) -> dict[str, Tensor]:
        return {**synthetic(size, seed), "weight": torch.ones(size)}

    folder = tmp_path_factory.mktemp("silent")
    return run(folder, 3, model=Silent(), reader=weighted, synthetic=with_weight, expected_batch=RECORDS)


@pytest.mark.parametrize(
    "found",
    [
        BadRecord("torn: anna"), OSError("cannot identify '/patients/anna.png'"),
        pytest.param(KeyError("anna"), marks=pytest.mark.rest), pytest.param(None, marks=pytest.mark.rest),
        {"x": X[BAD : BAD + 1, :4], "y": Y[BAD : BAD + 1]},
    ],
    ids=["bad", "unreadable", "an error", "nothing", "another shape"],
)  # fmt: skip
def test_a_record_that_cannot_be_read_ends_nothing_and_is_named_in_private_alone(
    tmp_path: Path, found: Any, without_it: dict[str, Tensor], capfd: pytest.CaptureFixture[str]
) -> None:
    def failing(numbers: np.ndarray) -> Any:
        if numbers[0] != BAD:
            return read(numbers)
        if isinstance(found, Exception):
            raise found
        return found

    weights = run(tmp_path, 3, reader=failing, expected_batch=RECORDS)
    assert all(torch.equal(weights[name], without_it[name]) for name in without_it), "it contributes exactly zero"
    assert History.read(tmp_path / "ledger.jsonl")[0].plans[0].records == RECORDS
    (line,) = (tmp_path / "logs" / "private" / "bad-records-rank0.jsonl").read_text().splitlines()
    assert json.loads(line)["record"] == BAD and ("anna" in line) == isinstance(found, Exception)
    assert "anna" not in "".join(capfd.readouterr())
    for path in tmp_path.rglob("*"):
        if path.is_file() and "private" not in path.parts:
            assert b"anna" not in path.read_bytes(), path


def test_nothing_is_trained_before_the_self_test_and_out_of_order(tmp_path: Path) -> None:
    with training(tmp_path) as found:
        with pytest.raises(SelfTestError, match="before prove"):
            found.step(1, RATE)
        found.prove()
        with pytest.raises(LedgerError, match="step 2 was asked for after step 0"):
            found.step(2, RATE)


def test_a_step_that_failed_is_never_made_again_with_its_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the weights moved: added to a second gradient, the same noise would show the difference of the two."""
    with training(tmp_path) as found:
        found.prove()
        found.step(1, RATE)
        found.save()
        before = found.weights()["layers.0.weight"].clone()

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(found._run.writer, "commit_step", full)
        with pytest.raises(OSError, match="No space"):
            found.step(2, RATE)
        moved = found.phase.core.engine.whole_weights()["layers.0.weight"]
        assert not torch.equal(moved, before), "the step had reached the weights"
        for again in (lambda: found.step(2, RATE), found.weights, found.save, found.finish):
            with pytest.raises(LedgerError, match="step 2 failed, and its noise must not be used again"):
                again()
    with training(tmp_path) as found:
        assert found.done == 1 and torch.equal(found.weights()["layers.0.weight"], before)
    assert len(History.read(tmp_path / "ledger.jsonl")[0].segments_of(0)) == 2


def test_a_step_that_was_stopped_in_its_middle_leaves_nothing_in_the_next_sum(tmp_path: Path) -> None:
    """Else the records of its first micro-batches would count twice."""
    expected = run(tmp_path / "whole", 1)
    with training(tmp_path / "stopped") as found:
        found.prove()
        asked: list[None] = []

        def at_the_second() -> str | None:
            asked.append(None)
            return "in the middle" if len(asked) in (2, 3) else None  # before the micro-batch, and where ranks meet

        found._stop.raised = at_the_second
        with pytest.raises(Stopped, match="in the middle"):
            found.step(1, RATE)
        found.step(1, RATE)
        again = found.weights()
        assert len(asked) > 3 and all(torch.equal(again[name], expected[name]) for name in expected)


class Branching(Regression):
    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        losses = super().forward(inputs)
        return losses * 2 if losses.mean() > 0 else losses


def test_a_model_that_asks_what_its_records_hold_is_refused(tmp_path: Path) -> None:
    with (
        training(tmp_path, Branching()) as found,
        pytest.raises(SelfTestError, match="branches on what a record holds"),
    ):
        found.prove()


class Modal(Regression):
    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        losses = super().forward(inputs)
        return 2 * losses if self.training else losses


def test_a_model_is_trained_in_the_mode_in_which_it_was_tested(tmp_path: Path) -> None:
    model = Modal().eval()
    with training(tmp_path, model) as found:
        found.prove()
        assert not any(module.training for module in model.modules()), "the self-test left the modes as they were"
        model.train()
        with pytest.raises(SelfTestError, match="switched between training and evaluation"):
            found.step(1, RATE)
        model.eval()
        found.step(1, RATE)


def test_frozen_parts_stay_in_evaluation_mode_beside_others(tmp_path: Path) -> None:
    model = Regression()
    model.layers[1].eval()
    with training(tmp_path, model) as found:
        found.prove()
        assert model.training and model.layers[0].training and not model.layers[1].training


class Remembering(Regression):
    """Keeps what it has seen of a record that synthetic ones do not look like."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        if self.late:
            self.seen = self.seen + 1
        return super().forward(inputs)

    late = False


def test_what_a_model_keeps_of_private_records_is_not_given_out(tmp_path: Path) -> None:
    model = Remembering()
    with training(tmp_path, model) as found:
        found.prove()
        Remembering.late = True
        try:
            with pytest.raises(LedgerError, match="the buffer seen changed while the model was trained"):
                found.step(1, RATE)
        finally:
            Remembering.late = False
        for out in (found.weights, found.save, found.finish):
            with pytest.raises(LedgerError, match="step 1 failed"):
                out()


def _write_into(model: nn.Module, name: str) -> None:
    with torch.no_grad():
        model.get_parameter(name).add_(1.0)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda model: _write_into(model, "frozen"), "the parameter frozen"),
        (lambda model: _write_into(model, "layers.0.weight"), "the parameter layers.0.weight"),
        (lambda model: model.register_forward_hook(lambda *given: None), "the hooks _forward_hooks"),
        (lambda model: model.notes.append(1), "the attribute notes"),
    ],
)
def test_nothing_but_the_step_changes_the_model(tmp_path: Path, change: Any, what: str) -> None:
    class Noting(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.notes: list[int] = []
            self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    model = Noting()
    with training(tmp_path, model) as found:
        found.prove()
        found.step(1, RATE)
        change(model)
        with pytest.raises(LedgerError, match=f"{what} changed outside of the private step"):
            found.step(2, RATE)


def test_read_is_asked_for_one_record_at_a_time_by_one_thread(tmp_path: Path) -> None:
    inside, asked = threading.Lock(), []

    def alone(number: np.ndarray) -> dict[str, Tensor]:
        assert inside.acquire(blocking=False), "two threads at once"
        asked.append(len(number))
        time.sleep(0.002)
        inside.release()
        return read(number)

    run(tmp_path, 3, reader=alone)
    assert len(asked) > 20 and set(asked) == {1}


def test_a_step_is_made_by_one_thread_and_once(tmp_path: Path) -> None:
    with training(tmp_path) as found:
        found.prove()
        entered, go, said = threading.Event(), threading.Event(), []
        whole = found.phase.step

        def slowly(number: int, rate: float) -> Any:
            entered.set()
            go.wait(20)
            return whole(number, rate)

        found.phase.step = slowly
        thread = threading.Thread(target=lambda: said.append(found.step(1, RATE)))
        thread.start()
        entered.wait(20)
        with pytest.raises(LedgerError, match="another thread"):
            found.step(1, RATE)
        go.set()
        thread.join(20)
        assert len(said) == 1 and found.done == 1
        with pytest.raises(SelfTestError, match="has passed already"):
            found.prove()


def test_a_step_after_which_the_program_is_interrupted_is_never_made_again(tmp_path: Path) -> None:
    """Not even within a block, whose earlier keys the process still has: its noise would go over another sum."""
    with training(tmp_path, bands=3, order="as it is", steps=6) as found:
        found.prove()
        whole = found.phase.step

        def interrupted(number: int, rate: float) -> None:
            whole(number, rate)
            raise KeyboardInterrupt

        found.phase.step = interrupted
        with pytest.raises(KeyboardInterrupt):
            found.step(1, RATE)
        found.phase.step = whole
        assert found.done == 1
        with pytest.raises(LedgerError, match="step 1 was asked for after step 1"):
            found.step(1, RATE)
        found.step(2, RATE)


@pytest.mark.rest
def test_a_run_with_exact_noise_pays_for_its_grid_and_is_certified_without_floating_point(tmp_path: Path) -> None:
    with training(tmp_path, computation=Computation(noise="exact")) as session:
        session.prove()
        for step in session.steps():
            session.step(step, RATE)
        verdict = session.finish()
    plan = History.read(tmp_path / "ledger.jsonl")[0].plans[0]
    assert verdict.epsilon == epsilon([Event(plan.sampling_rate, plan.noise_multiplier / (1 + 1e-6), 6)], plan.delta)
    assert verdict.epsilon <= 20
    told = json.loads((tmp_path / "certificate.json").read_text())
    assert "rounded to a grid" in told["mechanism"]
    assert not any("floating-point" in text for text in told["known_deviations"])
    assert any("may err by the allowance" in text for text in told["known_deviations"])
