"""What leaves a checkpoint in other forms is the same weights, and a foreign file runs nothing."""

from __future__ import annotations

import ast
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from murmuration.accounting.certificate.provenance import Provenance
from murmuration.model.load_report import WeightsError
from murmuration.model.weight_files import read_weights
from murmuration.train.commands.export import main
from murmuration.train.config.optimizer import Optimizer, OptimizerParams
from murmuration.train.export.export import FORMS, averaged
from murmuration.train.noise.update import NoisyUpdate
from murmuration.train.storage.checkpoint import Checkpoints, Keep, Loaded, Position
from murmuration.train.storage.deepspeed_format import MODEL, OPTIMIZER, LayoutError, read_deepspeed, write_deepspeed
from tests.support.checkpoint_world import HEADER
from tests.support.train_helpers import ADAMW, on_ranks, private_engine, toy_batch

ROOT = Path(__file__).resolve().parents[2]


UNKNOWN = Provenance((), None).metadata()
AVERAGING = Optimizer(params=OptimizerParams(ema_decay=0.5))


def written(folder: Path, world: int, optimizer: Optimizer = ADAMW) -> Loaded:
    def act(ranks: Any) -> None:
        engine, _, noise = private_engine(ranks, optimizer=optimizer)
        for step in (1, 2):
            engine.accumulate(toy_batch(6, seed=10 * step + ranks.rank))
            engine.update(NoisyUpdate(noise, step), 1e-2)
        Checkpoints(folder, ranks, Keep()).save(Position(1, 2), engine, 0, HEADER)

    on_ranks(world, act)
    loaded = Checkpoints.newest(folder)
    assert loaded is not None
    return loaded


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)


def test_every_form_holds_the_weights_and_the_averages_if_there_are_any(tmp_path: Path) -> None:
    loaded = written(tmp_path / "run", 2, AVERAGING)
    for form in FORMS:
        (tmp_path / form).mkdir()
        FORMS[form](loaded, tmp_path / form, UNKNOWN)
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
    FORMS["safetensors"](loaded, tmp_path, UNKNOWN)
    assert averaged(loaded) is None and not (tmp_path / "averaged.safetensors").exists()


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["HOSTILE"],)


class Settings:
    """An object of a class that this project does not know."""

    def __init__(self) -> None:
        self.stage = 3


class Writes(torch.nn.Module):
    """A TorchScript program that writes a file as soon as it is loaded."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path, self.kept = path, torch.zeros(0)

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.path, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.path, self.training = state
        self.kept = torch.from_file(self.path, shared=True, size=4, dtype=torch.uint8).fill_(65)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def exported(tmp_path: Path) -> tuple[Loaded, Path]:
    """A folder in DeepSpeed's layout, and its file of model states."""
    loaded = written(tmp_path / "run", 1)
    write_deepspeed(loaded, tmp_path / "out")
    return loaded, tmp_path / "out" / "global_step2" / MODEL


def test_foreign_classes_in_a_pickle_do_nothing_and_functions_of_the_system_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, path = exported(tmp_path)
    monkeypatch.setenv("HOSTILE", str(tmp_path / "was here"))
    model = torch.load(path, weights_only=False)
    torch.save(model | {"ds_config": Settings()}, path)
    assert same(read_deepspeed(tmp_path / "out"), loaded.weights())
    torch.save(model | {"ds_config": Hostile()}, path)
    with pytest.raises(LayoutError, match=rf"{MODEL} contains code .*, which was not run"):
        read_deepspeed(tmp_path / "out")
    assert not (tmp_path / "was here").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "was here").exists(), "the pickle was hostile indeed"


@pytest.mark.filterwarnings("ignore:.*torch.jit:Warning")
def test_a_foreign_torchscript_program_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, path = exported(tmp_path)
    victim = tmp_path / "was here"
    torch.jit.save(torch.jit.script(Writes(str(victim))), path)
    monkeypatch.setattr("sys.argv", ["export.py", str(tmp_path / "out"), str(tmp_path / "new"), "--from-deepspeed"])
    code, said = main(), capsys.readouterr().err
    assert not victim.exists(), "the program ran"
    assert code == 2 and "TorchScript program, which was not run" in said, said
    assert len(said.splitlines()) == 1 and not (tmp_path / "new").exists()
    with pytest.raises(WeightsError, match="TorchScript program, which was not run"):
        read_weights(path)
    torch.load(path, weights_only=False)
    assert victim.read_bytes() == b"AAAA", "the program was hostile indeed"


def test_a_foreign_archive_of_the_oldest_form_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    """Such a tar may hold a FIFO, at which torch would wait for ever."""
    _, path = exported(tmp_path)
    path.unlink()
    with tarfile.open(path, "w") as tar:
        for name in ("storages", "tensors", "pickle"):
            member = tarfile.TarInfo(name)
            member.type = tarfile.FIFOTYPE
            tar.addfile(member)
    with pytest.raises(LayoutError, match=rf"{MODEL} cannot be read as weights .*fetch it again"):
        read_deepspeed(tmp_path / "out")


UNPICKLING = {"torch.load", "torch.jit.load", "pickle.load", "pickle.loads", "pickle.Unpickler", "yaml.load"}


def test_only_one_module_unpickles_foreign_files() -> None:
    """All else in the product goes through its function, which loads weights only."""
    callers = {
        str(path.relative_to(ROOT))
        for room in ("accounting", "data", "evaluation", "launch", "model", "train")
        for path in (ROOT / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False")
        or (isinstance(node, ast.Attribute) and ast.unparse(node) in UNPICKLING)
    }
    assert callers == {"model/weight_files.py"}


def test_a_folder_that_is_none_of_deepspeeds_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="name a checkpoint of DeepSpeed"):
        read_deepspeed(tmp_path)
    path = exported(tmp_path)[1].with_name(OPTIMIZER.format(0))
    state = torch.load(path, weights_only=False)
    state["optimizer_state_dict"]["partition_count"] = [3]
    torch.save(state, path)
    with pytest.raises(LayoutError, match=r"1 of 3 .*_optim_states.pt are there; copy the others"):
        read_deepspeed(tmp_path / "out")
    torch.save({"optimizer_state_dict": {}}, path)
    with pytest.raises(LayoutError, match="is not laid out as"):
        read_deepspeed(tmp_path / "out")
    torch.save(state | {"optimizer_state_dict": {"partition_count": []}}, path)
    with pytest.raises(LayoutError, match="is not laid out as"):
        read_deepspeed(tmp_path / "out")
    for text in ("../secret", "", "a\0b", "/etc"):
        (tmp_path / "out" / "latest").write_text(text)
        with pytest.raises(LayoutError, match="does not name a folder beside it"):
            read_deepspeed(tmp_path / "out")
