"""The tutorials, command by command as they stand in docs/tutorials: what a reader types works, on small pictures."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from docs.tutorials.notebook import notebook
from murmuration.accounting.certificate.verify import verify
from tests.support import forking
from tests.support.evaluation_world import COLOURS, class_list, picture, tokenizer
from tests.support.launching import ROOT, environment

PAGES = ROOT / "docs" / "tutorials"
PICTURES = 121
PACKED = PICTURES - 1
"""Packing leaves out what is no picture, and says so."""
# The page's names stand for what a clean process computes: nothing of ours is imported.
CLEAN = """
import sys, torch
def agree(one, other):
    assert one.isfinite().all() and torch.allclose(one, other, atol=1e-5), (one - other).abs().max()
    assert not [name for name in sys.modules if name.split(".")[0] in ("murmuration", "deepspeed")]
"""
ENCODERS = """
with torch.no_grad():
    images = torch.zeros(1, 3, 32, 32)
    agree(encoder(images), same(images).last_hidden_state[:, 1:].mean(1))
"""
CLASSIFIER = """
agree(logits, logits)
assert model.pretrained_cfg["label_names"] == ["blue", "green", "grey", "red", "white"]
"""
SMALL = "img_size=56, embed_dim=32, depth=2, num_heads=2"


def blocks(page: str, small: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Commands and programs in their order, with what makes them small; every replacement must find its place."""
    text = (PAGES / page).read_text()
    for old, new in small.items():
        assert old in text, f"{page} no longer says {old!r}"
        text = text.replace(old, new)
    for found in re.finditer(
        r"```python\n(.*?)```|^    ((?:python|deepspeed) [^\n]*)$", text, re.DOTALL | re.MULTILINE
    ):
        yield ("program", found[1]) if found[1] is not None else ("command", found[2])


def run(folder: Path, command: list[str] | str, environ: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, shell=isinstance(command, str), cwd=folder, capture_output=True, text=True, timeout=900,
        env=environ or environment(),
    )  # fmt: skip
    as_far = isinstance(command, str) and command.endswith(("verify published", "verify runs/own"))
    assert done.returncode == (7 if as_far else 0), f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def told_by(folder: Path, program: str) -> str:
    """What a program says that finds our package by its path."""
    command = [sys.executable, "-c", f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{program}"]
    done = forking.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def followed(folder: Path, page: str, small: dict[str, str], check: str) -> dict[str, str]:
    """What each command of the page said; `check` is run behind the page's last program."""
    (folder / "launch").symlink_to(ROOT / "launch")
    found = list(blocks(page, small))
    last = max((number for number, (kind, _) in enumerate(found) if kind == "program"), default=-1)
    said: dict[str, str] = {}
    for number, (kind, text) in enumerate(found):
        if kind == "command":
            said[text] = run(folder, text)
        else:
            program = f"{CLEAN}\n{text}\n{check}" if number == last else text
            run(folder, [sys.executable, "-I", "-c", program])
    return said


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Pictures, one of them broken, and a table of theirs."""
    (tmp_path / "pictures").mkdir()
    names = list(COLOURS)
    with (tmp_path / "captions.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["file_name", "caption"])
        for number in range(PICTURES):
            colour = names[number % len(names)]
            rows.writerow([f"{number:03}.png", f"a photo of a {colour} square"])
            content = picture(colour, number) if number else b"no picture"
            (tmp_path / "pictures" / f"{number:03}.png").write_bytes(content)
    tokenizer(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_from_a_table_of_captions_to_a_model_that_other_packages_load(table: Path) -> None:
    small = {
        "--epsilon 8 --size small --image-size 224 --tokenizer clip":
        "--epsilon 20 --size nano --image-size 32 --tokenizer tokenizer.json",
        "launch/train.py --config my.json": "launch/train.py --config my.json --set phases.0.steps=8",
    }  # fmt: skip
    said = followed(table, "captions.md", small, ENCODERS)
    told = {step: next(text for command, text in said.items() if step in command)
            for step in ("pack", "init.py", "check", "--dry-run", "deepspeed", "verify", "use.py")}  # fmt: skip
    assert "1 × undecodable image" in told["pack"] and f"n = {PACKED}" in told["init.py"]
    assert "private" in told["check"] and (table / "check.html").stat().st_mode & 0o077 == 0
    epsilon = re.search(r"epsilon +(\S+) of 20", told["--dry-run"])
    assert epsilon is not None and re.search(rf"^  n +{PACKED} ", told["--dry-run"], re.MULTILINE)
    assert "verified" in told["deepspeed"] and "recompute ε from the ledger" in told["deepspeed"]
    assert f"{float(epsilon[1]):g}" in told["verify"]
    assert f"n = {PACKED}" in (table / "runs" / "my" / "report.html").read_text()
    assert "001.png" in told["use.py"] and (table / "gallery.html").is_file()


@pytest.mark.slow
def test_from_a_table_of_patients_and_dinov2_to_a_model_of_timm(tmp_path: Path) -> None:
    names = list(COLOURS)
    for folder, table, more in (("pictures", "labels", ["patient"]), ("public", "public", [])):
        (tmp_path / folder).mkdir()
        with (tmp_path / f"{table}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["image", "diagnosis", *more])
            for number in range(60):
                (tmp_path / folder / f"{number:03}.png").write_bytes(picture(names[number % 5], number))
                rows.writerow([f"{number:03}.png", names[number % 5], *(f"p{number // 2}" for _ in more)])
    class_list(tmp_path)
    small = {
        "pretrained=True)\ntimm.models": f"pretrained=False, {SMALL})\ntimm.models",
        'save_for_hf(model, "dinov2"': f'save_for_hf(model, "dinov2", model_args=dict({SMALL})',
        "--image-size 224": "--image-size 28",
        "deepspeed --num_gpus 2 launch/train.py --config diagnosis.json":
        "python launch/train.py --config diagnosis.json --set run.engine=local",
    }  # fmt: skip
    said = followed(tmp_path, "fine_tune.md", small, CLASSIFIER)
    assert len(said) <= 8, "the journey has eight commands"
    init = next(text for command, text in said.items() if "init.py" in command)
    assert "it trains the head alone" in init and "n = 30 units" in init and "the same 'patient'" in init
    verdict = verify(tmp_path / "published")
    assert verdict.committed == 1 and verdict.epsilon <= 3
    assert str(verdict.epsilon)[:5] in said["python launch/account.py verify published"]
    card = (tmp_path / "published" / "README.md").read_text()
    assert "apache-2.0" in card and "top-1" in card and f"trained {5 * 33} weights" in card


def test_an_own_loop_learns_and_its_notebook_is_the_same_program(tmp_path: Path) -> None:
    page = PAGES / "own_loop.md"
    book = json.loads((PAGES / "own_loop.ipynb").read_text())
    assert (PAGES / "own_loop.ipynb").read_text() == notebook(page.read_text()), "run: docs/tutorials/notebook.py"
    assert all(cell["outputs"] == [] for cell in book["cells"] if cell["cell_type"] == "code")
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    program = "\n".join(cell for cell in cells if not cell.startswith("!"))
    assert [text for kind, text in blocks(page.name, {}) if kind == "program"] == [
        f"{cell}\n" for cell in cells if not cell.startswith("!")
    ]
    environ = environment() | {"PYTHONPATH": str(ROOT)}
    said = told_by(tmp_path, program)
    learnt = [float(value) for value in re.findall(r"accuracy on public pictures (\S+)", said)]
    assert len(learnt) == 4 and learnt[-1] > 0.6, "chance is a quarter"
    (command,) = (cell.removeprefix("!") for cell in cells if cell.startswith("!"))
    assert command == "python -m murmuration account verify runs/own"
    assert str(verify(tmp_path / "runs" / "own").epsilon)[:5] in run(tmp_path, command, environ)


def test_a_program_for_opacus_and_ours_keep_the_same_budget_and_learn_the_same(tmp_path: Path) -> None:
    program = "torch.manual_seed(1)\n".join(text for _, text in blocks("from_opacus.md", {}))
    said = told_by(tmp_path, program)
    found = re.findall(r"^(Opacus|Murmuration): ε = (\S+), accuracy (\S+)$", said, re.MULTILINE)
    assert [name for name, *_ in found] == ["Opacus", "Murmuration"]
    for _, epsilon, accuracy in found:
        assert 3.9 < float(epsilon) <= 4 and float(accuracy) > 0.8, "chance is a quarter"


LANGUAGE_MODELS = {"llama": {}, "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4}}
"""The second has convolutions in the place of linear layers. Others are clipped by test_train_isolation.py."""
WITH_ADAPTER = """
from peft import PeftModel
base = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
theirs = PeftModel.from_pretrained(base, "adapter").eval()
ids = notes.tensors[0][:5]
with torch.no_grad():
    one, other = theirs(ids).logits, training.model.eval()(ids).logits
    with theirs.disable_adapter():
        before = theirs(ids).logits
assert torch.allclose(one, other, atol=1e-5) and not torch.allclose(one, before, atol=1e-3)
"""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "llama")) for kind in LANGUAGE_MODELS]
)
def test_a_language_model_learns_an_adapter_that_peft_loads(tmp_path: Path, kind: str) -> None:
    words = {
        word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *(f"w{n}" for n in range(40))])
    }
    known = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    known.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=known, **special).save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4} | {
        "num_key_value_heads": 2, "vocab_size": len(words), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | LANGUAGE_MODELS[kind]))
    model.save_pretrained(tmp_path / "model")
    notes = (" ".join(f"w{number * step % 40}" for step in range(1, 5 + number % 9)) for number in range(300))
    (tmp_path / "notes.txt").write_text("\n".join(notes))
    small = {'LENGTH = "model", 64': 'LENGTH = "model", 16', "epochs=3": "epochs=2"}
    small |= {'"q_proj", "v_proj"': '"c_attn"'} if kind == "gpt2" else {}
    program = "\n".join([*(text for _, text in blocks("language_models.md", small)), WITH_ADAPTER])
    said = told_by(tmp_path, program)
    verdict = verify(tmp_path / "runs" / "notes")
    assert verdict.committed == 6 and 7.9 < verdict.epsilon <= 8 and "self-test passed" in said
    assert "published by its authors before these notes" in (tmp_path / "runs" / "notes" / "certificate.md").read_text()
