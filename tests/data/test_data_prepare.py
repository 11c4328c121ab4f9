"""prepare.py: bad input is one sentence and a code, whichever command reads it; a mistake of the program is neither."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from murmuration.accounting.errors import RESUME_ME
from murmuration.data.index import open as index_open
from murmuration.data.store.place import UnreadableError
from murmuration.launch import prepare_demo
from murmuration.launch.prepare import main


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
