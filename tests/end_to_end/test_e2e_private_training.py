"""The library on real DeepSpeed and FSDP2 engines of two processes, against one process without either."""

from __future__ import annotations

from pathlib import Path

import torch

from murmuration.accounting.certificate.certificate import verify
from tests.support.launching import run_worker
from tests.support.own_module import RATE, training


def test_every_engine_trains_the_same_weights_under_the_same_promise(tmp_path: Path) -> None:
    with training(tmp_path / "local", steps=4) as found:
        found.prove()
        for step in found.steps():
            found.step(step, RATE)
        expected = {name: tensor.clone() for name, tensor in found.weights().items()}
        verdict = found.finish()
    results = run_worker("private_training_worker.py", str(tmp_path))
    assert set(results) == {"zero0", "zero1", "zero3", "fsdp2"}
    for name, found in results.items():
        assert found["epsilon"] == verdict.epsilon == verify(tmp_path / name).epsilon, name
        assert found["committed"] == 4 and 0 < found["hostile"] <= 1, name
        for parameter, weights in found["weights"].items():
            assert torch.allclose(torch.tensor(weights), expected[parameter], rtol=1e-5, atol=1e-6), (name, parameter)
