"""prepare.py: bad input is one sentence and a code, whichever command reads it; a mistake of the program is neither."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from murmuration.accounting.errors import RESUME_ME
from murmuration.data.index import open as index_open
from murmuration.data.store.place import UnreadableError
from murmuration.launch import prepare_demo
from murmuration.launch.prepare import main
from murmuration.train.config.load import load
from murmuration.train.recipe.ready_phase import prepare
from tests.support.evaluation_world import class_folders


@pytest.fixture
def pictures(tmp_path: Path, picture: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: two pictures in `pics`, its index, and files that no command can use."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pics").mkdir()
    for number in range(2):
        (tmp_path / "pics" / f"{number}.jpg").write_bytes(picture(number))
    assert main(["index", "pics"]) == 0
    (tmp_path / "x.parquet").write_bytes(b"PAR1 no parquet PAR1")
    (tmp_path / "digits.json").write_text('[{"image": "0.jpg", "caption": ' + "9" * 5000 + "}]")
    (tmp_path / "broken.json").write_text("{")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("demo --out d --private 0", "--private 0: at least 1 record is needed"),
        ("demo --out d --size 7", "--size 7: choose 8 to 1024 pixels"),
        ("demo --out d --tint nan", "--tint nan: choose 0 to 95 levels"),
        ("index http://[x/{0..1}.tar --out i", "not a URL; correct it"),
        ("index x{5..1}.tar --out i", "not a range of shards"),
        ("pack pics --csv x.parquet --out o", "x.parquet: not a readable parquet file"),
        ("pack pics --csv digits.json --out o", "digits.json: not JSON"),
        ("pack nowhere --out o", "nowhere: not there"),
        ("check --config broken.json", "broken.json is not valid JSON"),
        ("synthetic --records 0 --out s", "both must be at least 1"),
        ("synthetic --records 1 --device nothing --out s", "--device nothing: choose cpu or cuda"),
        ("synthetic --records 1 --device cpu:foo --out s", "--device cpu:foo: choose cpu or cuda"),
        ("split pics --public-fraction nan", "--public-fraction nan: choose a number between 0 and 1"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(pictures: Path, command: str, said: str, capsys) -> None:
    before = sorted(path.name for path in pictures.iterdir())
    assert main(command.split()) == 2
    complaint = capsys.readouterr().err
    assert said in complaint and complaint.startswith("prepare.py: ") and complaint.count("\n") == 1
    assert [name for name in sorted(path.name for path in pictures.iterdir()) if name not in ("d", "i")] == before


def test_a_single_record_is_not_split(pictures: Path, capsys) -> None:
    (pictures / "pics" / "1.jpg").unlink()
    assert main(["index", "pics"]) == 0
    assert main(["split", "pics", "--public-fraction", "0.5"]) == 2
    assert "1 record cannot be split in two" in capsys.readouterr().err


@pytest.mark.parametrize("mistake", [ValueError, TypeError, RuntimeError])
def test_a_mistake_of_the_program_keeps_its_traceback(pictures: Path, monkeypatch, mistake: type[Exception]) -> None:
    def broken(*_: object, **__: object) -> None:
        raise mistake("zip() argument 2 is shorter than argument 1")

    monkeypatch.setattr(index_open, "open_index", broken)
    with pytest.raises(mistake, match="zip"):
        main(["split", "pics", "--public-fraction", "0.5"])


def test_what_cannot_be_read_now_asks_to_be_resumed(pictures: Path, monkeypatch, capsys) -> None:
    def away(*_: object) -> None:
        raise UnreadableError("shard 3 cannot be read; repair the store")

    monkeypatch.setattr(prepare_demo, "_make", away)
    assert main(["demo", "--out", "d", "--private", "1", "--held-out", "1", "--textures", "1"]) == RESUME_ME
    assert capsys.readouterr().err == "prepare.py: shard 3 cannot be read; repair the store\n"


def test_rows_whose_label_or_unit_is_no_text_are_left_out(pictures: Path) -> None:
    """Latin-1 in a table that is read as UTF-8: the rest is packed."""
    (pictures / "t.csv").write_bytes(b"image,label,who\n0.jpg,h\xe4m,a\n0.jpg,x,\xe4\n1.jpg,x,a\n")
    command = "pack pics --csv t.csv --label label --classes-from-rows --unit who --out o --workers 1"
    assert main(command.split()) == 0
    lines = (pictures / "o" / "left_out.jsonl").read_text().splitlines()
    assert len(lines) == 2 and all("its label or its unit is not UTF-8" in line for line in lines)
    assert (pictures / "o" / "classes.txt").read_text() == "x\n"


def test_a_folder_of_class_folders_may_play_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every picture is in one part; the config trains on one and measures the other."""
    given, out = class_folders(tmp_path / "given", 20), tmp_path / "demo"
    command = ["demo", "--data", str(given), "--out", str(out)]
    assert main(command) == 0
    names = {path.relative_to(given) for path in given.rglob("*.png")}
    parts = [{path.relative_to(folder) for path in folder.rglob("*.png")}
             for folder in (out / "pictures" / "private", out / "pictures" / "held_out")]  # fmt: skip
    assert parts[0] | parts[1] == names and not parts[0] & parts[1] and len(parts[1]) * 10 == len(names)
    config = load(out / "pictures" / "pictures.json", [])
    told = json.loads((out / "pictures" / "pictures.json").read_text())["phases"][0]
    assert told["data"]["expected_records"] == len(parts[0]) and told["evaluation"]["records"] == len(parts[1])
    assert config.model.classes == len({name.parts[0] for name in names}) and prepare(config)[0].private
    assert "the most frequent class is 0.2" in capsys.readouterr().out
    assert not (out / "pictures").stat().st_mode & 0o077, "others may not read the copies"
    assert main(command) == 0 and "is there already" in capsys.readouterr().out
    assert main(["demo", "--data", str(given / ".."), "--out", str(out)]) == 2
    assert "holds something else; move it away" in capsys.readouterr().err
    few = class_folders(tmp_path / "few", 2)
    assert main(["demo", "--data", str(few), "--out", str(tmp_path / "other")]) == 2
    assert "name a folder of two classes or more, with 10 pictures of each" in capsys.readouterr().err
    assert not (tmp_path / "other" / "pictures").exists()
