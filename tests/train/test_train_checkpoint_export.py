"""What leaves a checkpoint in other forms is the same weights, and a foreign pickle runs nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_world import HEADER
from safetensors.torch import load_file
from train_helpers import LocalEngine, on_ranks, private_engine, toy_batch

from train.checkpoint import Checkpoints, Keep, Loaded, Position
from train.export import FORMS, averaged
from train.export_deepspeed import MODEL, OPTIMIZER, LayoutError, read_deepspeed, write_deepspeed
from train.gradient import NoisyUpdate
from train.optim import make_optimizer
from train.optim_settings import Optimizer, OptimizerParams


class Averaging(LocalEngine):
    """Keeps averaged weights, too."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        settings = Optimizer(params=OptimizerParams(ema_decay=0.5))
        self.base = make_optimizer(settings, self.parameters.items(), 0.0)
        self.base.param_groups[0]["params"] = self.flats
        held = zip(self.flats, self.layout, strict=True)
        self.base.bind({id(flat): (flat, fragments) for flat, fragments in held}, self.ranks.add)


def written(folder: Path, world: int, kind: type[LocalEngine] = LocalEngine) -> Loaded:
    def act(ranks: Any) -> None:
        engine, _, noise = private_engine(ranks, engine=kind)
        for step in (1, 2):
            engine.accumulate(toy_batch(6, seed=10 * step + ranks.rank))
            engine.update(NoisyUpdate(noise, step), 1e-2)
        Checkpoints(folder, ranks, Keep()).save(Position(1, 2), engine, False, HEADER)

    on_ranks(world, act)
    loaded = Checkpoints.newest(folder)
    assert loaded is not None
    return loaded


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)


def test_every_form_holds_the_weights_and_the_averages_if_there_are_any(tmp_path: Path) -> None:
    loaded = written(tmp_path / "run", 2, Averaging)
    for form in FORMS:
        (tmp_path / form).mkdir()
        FORMS[form](loaded, tmp_path / form)
    average = averaged(loaded)
    assert average is not None and not same(average, loaded.weights()), "an average is not the newest weights"
    trained = set(loaded.names("weights"))
    assert all(torch.equal(average[name], t) for name, t in loaded.weights().items() if name not in trained)
    for name, expected in (("model", loaded.weights()), ("averaged", average)):
        assert same(load_file(tmp_path / "safetensors" / f"{name}.safetensors"), expected)
        assert same(torch.load(tmp_path / "pytorch" / f"{name}.pt", weights_only=True), expected)
    assert same(read_deepspeed(tmp_path / "deepspeed" / "deepspeed"), loaded.weights())


def test_without_averages_none_are_written(tmp_path: Path) -> None:
    loaded = written(tmp_path / "run", 1)
    FORMS["safetensors"](loaded, tmp_path)
    assert averaged(loaded) is None and not (tmp_path / "averaged.safetensors").exists()


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["HOSTILE"],)


def test_a_foreign_pickle_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = written(tmp_path / "run", 1)
    write_deepspeed(loaded, tmp_path / "out")
    monkeypatch.setenv("HOSTILE", str(tmp_path / "was here"))
    path = tmp_path / "out" / "global_step2" / MODEL
    model = torch.load(path, weights_only=False)
    torch.save(model | {"ds_config": Hostile()}, path)
    assert same(read_deepspeed(tmp_path / "out"), loaded.weights())
    assert not (tmp_path / "was here").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "was here").exists(), "the pickle was hostile indeed"


def test_a_folder_that_is_none_of_deepspeeds_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="name a checkpoint of DeepSpeed"):
        read_deepspeed(tmp_path)
    loaded = written(tmp_path / "run", 1)
    write_deepspeed(loaded, tmp_path / "out")
    path = tmp_path / "out" / "global_step2" / OPTIMIZER.format(0)
    state = torch.load(path, weights_only=False)
    state["optimizer_state_dict"]["partition_count"] = [3]
    torch.save(state, path)
    with pytest.raises(LayoutError, match=r"1 of 3 .*_optim_states.pt are there; copy the others"):
        read_deepspeed(tmp_path / "out")
    torch.save({"optimizer_state_dict": {}}, path)
    with pytest.raises(LayoutError, match="is not laid out as"):
        read_deepspeed(tmp_path / "out")
