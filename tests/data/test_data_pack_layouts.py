"""Published layouts, in miniature: each is recognised, packed with its own classes, and what is missing is named with
the layout that is expected."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.batch.shard_reader import ShardReader
from murmuration.data.decode.class_list import ClassList
from murmuration.data.index.shard_index import ShardIndex
from murmuration.data.pack import json_stream
from murmuration.data.pack.json_stream import elements
from murmuration.data.pack.row import PackError
from murmuration.launch.prepare import main

Maker = Callable[[Path, Callable[..., bytes]], None]


def put(path: Path, content: bytes | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def pixels(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def planes(number: int) -> bytes:
    """As CIFAR stores a picture: all of red, then green, then blue."""
    return pixels(number).transpose(2, 0, 1).tobytes()


def cifar10(root: Path, _picture: Any) -> None:
    folder = root / "cifar-10-batches-bin"
    for batch in range(1, 6):
        put(folder / f"data_batch_{batch}.bin", b"".join(bytes([n % 10]) + planes(batch * 10 + n) for n in range(3)))
    put(folder / "test_batch.bin", bytes([9]) + planes(99))
    put(folder / "batches.meta.txt", "airplane\nautomobile\nbird\ncat\ndeer\ndog\nfrog\nhorse\nship\ntruck\n\n")


def cifar100(root: Path, _picture: Any) -> None:
    folder = root / "cifar-100-binary"
    put(folder / "train.bin", b"".join(bytes([n % 2, n % 3]) + planes(n) for n in range(6)))
    put(folder / "test.bin", bytes([1, 2]) + planes(1))
    put(folder / "fine_label_names.txt", "maple_tree\napple\nbear\n")
    put(folder / "coarse_label_names.txt", "trees\nfood\n")


def svhn(root: Path, _picture: Any) -> None:
    from scipy.io import savemat

    stack = np.stack([pixels(n) for n in range(4)], axis=-1)
    root.mkdir(parents=True, exist_ok=True)
    savemat(
        root / "train_32x32.mat", {"X": stack, "y": np.array([[10], [1], [9], [10]], np.uint8)}, do_compression=True
    )


def aircraft(root: Path, picture: Callable[..., bytes]) -> None:
    data = root / "fgvc-aircraft-2013b" / "data"
    for number in range(3):
        put(data / "images" / f"{1025794 + number}.jpg", picture(number))
    put(data / "variants.txt", "707-320\nA300B4\nEurofighter Typhoon\n")
    put(data / "images_variant_trainval.txt", "1025794 Eurofighter Typhoon\n1025795 707-320\n")
    put(data / "images_variant_test.txt", "1025796 A300B4\n")


def caltech101(root: Path, picture: Callable[..., bytes]) -> None:
    for number, name in enumerate(("accordion", "BACKGROUND_Google", "Faces", "accordion")):
        put(root / "caltech101" / "101_ObjectCategories" / name / f"image_{number:04d}.jpg", picture(number))


def food101(root: Path, picture: Callable[..., bytes]) -> None:
    for number, name in enumerate(("apple_pie", "waffles", "waffles")):
        put(root / "food-101" / "images" / name / f"{number}.jpg", picture(number))
    put(root / "food-101" / "meta" / "classes.txt", "apple_pie\nbaby_back_ribs\nwaffles\n")
    put(root / "food-101" / "meta" / "train.txt", "apple_pie/0\nwaffles/1\n")
    put(root / "food-101" / "meta" / "test.txt", "waffles/2\n")


def places365(root: Path, picture: Callable[..., bytes]) -> None:
    put(root / "categories_places365.txt", "/a/airfield 0\n/a/apartment_building/outdoor 1\n/b/bar 2\n")
    put(root / "places365_train_standard.txt", "/b/bar/00000001.jpg 2\n/a/apartment_building/outdoor/00000001.jpg 1\n")
    put(root / "places365_val.txt", "Places365_val_00000001.jpg 0\n")
    put(root / "data_256_standard" / "b" / "bar" / "00000001.jpg", picture(1))
    put(root / "data_256_standard" / "a" / "apartment_building" / "outdoor" / "00000001.jpg", picture(2))
    put(root / "val_256" / "Places365_val_00000001.jpg", picture(3))


def inat(root: Path, picture: Callable[..., bytes]) -> None:
    files = [f"train_mini/0000{n}_Animalia/{n}.jpg" for n in range(3)]
    for number, file in enumerate(files):
        put(root / file, picture(number))
    found = {
        "info": {"year": 2021},
        "images": [{"id": n, "width": 40, "file_name": file} for n, file in enumerate(files)],
        "categories": [{"id": 0, "name": "Lumbricus terrestris"}, {"id": 1, "name": "Sabella spallanzanii"}],
        "annotations": [{"id": n, "image_id": n, "category_id": n % 2} for n in range(3)],
    }
    put(root / "train_mini.json", json.dumps(found))


def coco(root: Path, picture: Callable[..., bytes]) -> None:
    """With annotations before images, which is as good."""
    images = [{"id": 9 + n, "file_name": f"{9 + n:012d}.jpg", "height": 49} for n in range(4)]
    for number, image in enumerate(images[:3]):
        put(root / "train2017" / image["file_name"], picture(number))
    said = [{"image_id": 9 + n % 2, "id": n, "caption": f"caption {n}\n"} for n in range(7)]
    said += [{"image_id": 77, "id": 8, "caption": "of none"}, {"image_id": 12, "id": 9, "caption": "gone"}]
    put(root / "annotations" / "captions_train2017.json", json.dumps({"annotations": said, "images": images}))


def sbu(root: Path, picture: Callable[..., bytes]) -> None:
    put(
        root / "dataset" / "SBU_captioned_photo_dataset_urls.txt",
        "".join(f"http://host/{n}/p{n}.jpg\n" for n in range(4)),
    )
    put(root / "dataset" / "SBU_captioned_photo_dataset_captions.txt", "".join(f"caption {n}\n" for n in range(4)))
    for number in range(3):
        put(root / "dataset" / f"p{number}.jpg", picture(number))


def folders(root: Path, picture: Callable[..., bytes]) -> None:
    for number, name in enumerate(("tench", "tench", "goldfish")):
        put(root / name / f"{number}.JPEG", picture(number))


@dataclass(frozen=True)
class Case:
    make: Maker
    records: int
    labels: list[str]
    classes: list[str] | None
    split: str | None = None
    missing: str = ""  # removed, it is named
    said: str = ""  # with the expected layout
    more: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


CASES = {
    "cifar10": Case(
        cifar10, 15, ["airplane", "automobile", "bird"] * 5,
        ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"],
        missing="cifar-10-batches-bin/data_batch_4.bin",
        said="data_batch_4.bin is not there; the expected layout is cifar-10-b",
    ),
    "cifar10 test": Case(cifar10, 1, ["truck"], None, "test"),
    "cifar100": Case(
        cifar100, 6, ["maple_tree", "apple", "bear"] * 2, ["maple_tree", "apple", "bear"],
        missing="cifar-100-binary/train.bin", said="the expected layout is cifar-100-binary/ with train.bin, test.bin",
    ),
    "svhn": Case(svhn, 4, ["0", "1", "9", "0"], [], missing="train_32x32.mat"),
    "aircraft": Case(
        aircraft, 2, ["Eurofighter Typhoon", "707-320"], ["707-320", "A300B4", "Eurofighter Typhoon"],
        missing="fgvc-aircraft-2013b/data/images_variant_trainval.txt", said="fgvc-aircraft-2013b/data/ with images/",
    ),
    "aircraft test": Case(aircraft, 1, ["A300B4"], None, "test"),
    "caltech101": Case(
        caltech101, 3, ["Faces", "accordion", "accordion"], ["Faces", "accordion"], more=["--classes-from-rows"]
    ),
    "food101": Case(
        food101, 2, ["apple_pie", "waffles"], ["apple_pie", "baby_back_ribs", "waffles"],
        missing="food-101/meta/train.txt", said="the expected layout is food-101/ with images/",
    ),
    "food101 test": Case(food101, 1, ["waffles"], None, "test"),
    "places365": Case(
        places365, 2, ["b/bar", "a/apartment_building/outdoor"],
        ["a/airfield", "a/apartment_building/outdoor", "b/bar"],
        missing="places365_train_standard.txt", said="data_256_standard/a/airfield/00000001.jpg",
    ),
    "places365 val": Case(places365, 1, ["a/airfield"], None, "val"),
    "inat": Case(
        inat, 3, ["Lumbricus terrestris", "Sabella spallanzanii", "Lumbricus terrestris"],
        ["Lumbricus terrestris", "Sabella spallanzanii"], "train_mini",
    ),
    "coco": Case(
        coco, 2, [], [], missing="train2017", said="train2017 is not there; the expected layout is COCO/annotations/",
        left_out=["no image named", "missing file", "no caption"],
    ),
    "sbu": Case(
        sbu, 3, [], [], missing="dataset/SBU_captioned_photo_dataset_captions.txt",
        said="the expected layout is dataset/ with",
        left_out=["missing file"],
    ),
    "folders": Case(folders, 3, ["goldfish", "tench", "tench"], ["goldfish", "tench"], more=["--classes-from-rows"]),
}  # fmt: skip


def records(folder: Path) -> list[dict[str, bytes]]:
    index = ShardIndex.open(folder)
    return [ShardReader(index).read(record) for record in range(index.records)]


def left_out(folder: Path) -> list[str]:
    return [json.loads(line)["reason"] for line in (folder / "left_out.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", CASES)
def test_a_published_layout_is_recognised_and_packed(name: str, tmp_path: Path, picture, capsys) -> None:
    case, root, out = CASES[name], tmp_path / "set", tmp_path / "out"
    case.make(root, picture)
    split = ["--split", case.split] if case.split is not None else []
    command = ["pack", str(root), *split, *case.more, "--workers", "1"]
    assert main([*command, "--out", str(out)]) == 0
    found = records(out)
    assert len(found) == case.records and [each["cls"].decode() for each in found if "cls" in each] == case.labels
    assert left_out(out) == case.left_out
    if case.classes is not None:
        listed = (out / "classes.txt").read_text().splitlines() if case.classes else []
        assert listed == case.classes and (out / "classes.txt").exists() == bool(case.classes)
    if case.classes:
        classes = ClassList.read(out / "classes.txt")
        spec = DataSpec(8, labels=("cls",), target="cls", classes=len(classes.names), class_list=classes)
        batch = BatchReader(ShardIndex.open(out), spec).read(np.arange(case.records), 0)
        assert batch.present.all() and batch.inputs["labels"].tolist() == [
            case.classes.index(each) for each in case.labels
        ]
    if case.missing:
        path = root / case.missing
        path.rename(tmp_path / "elsewhere")
        capsys.readouterr()
        explicit = ["--layout", name.split()[0]]
        assert main([*command, *explicit, "--out", str(tmp_path / "none")]) == 2
        said = capsys.readouterr().err
        assert path.name in said and "expected layout" in said and case.said in said, said
        assert said.count("\n") == 1 and not (tmp_path / "none").exists()


def test_pixels_are_those_of_the_set(tmp_path: Path, picture) -> None:
    for make, numbers in ((cifar10, [10, 11, 12, 20]), (svhn, [0, 1, 2, 3]), (cifar100, [0, 1, 2, 3])):
        make(tmp_path / make.__name__, picture)
        assert main(["pack", str(tmp_path / make.__name__), "--out", str(tmp_path / f"{make.__name__}-out")]) == 0
        for number, record in zip(numbers, records(tmp_path / f"{make.__name__}-out"), strict=False):
            assert (np.asarray(Image.open(io.BytesIO(record["png"]))) == pixels(number)).all()
    fields = [json.loads(record["json"]) for record in records(tmp_path / "cifar100-out")]
    assert [each["coarse"] for each in fields] == ["trees", "food"] * 3


def test_several_captions_of_coco_are_one_record(tmp_path: Path, picture) -> None:
    coco(tmp_path / "set", picture)
    table = tmp_path / "set" / "annotations" / "captions_train2017.json"
    assert main(["pack", str(tmp_path / "set" / "train2017"), "--csv", str(table), "--out", str(tmp_path / "out")]) == 0
    found = [json.loads(record["json"])["captions"] for record in records(tmp_path / "out")]
    assert found == [[f"caption {n}" for n in (0, 2, 4, 6)], [f"caption {n}" for n in (1, 3, 5)]]


def test_pickles_are_not_opened(tmp_path: Path, capsys) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.mkdir, (str(tmp_path / "opened"),)

    for folder, name in (("cifar-10-batches-py", "data_batch_1"), ("cifar-100-python", "train")):
        put(tmp_path / folder / name, pickle.dumps(Hostile()))
        for source in (tmp_path / folder, tmp_path):
            layout = ["--layout", "cifar10" if "10-" in folder else "cifar100"]
            assert main(["pack", str(source), *layout, "--out", str(tmp_path / "out")]) == 2
            said = capsys.readouterr().err
            assert "pickles, which may run any code and are not opened: fetch the binary version" in said
    assert not (tmp_path / "opened").exists()


def test_rows_of_urls_need_pictures_that_are_there(tmp_path: Path, picture, capsys) -> None:
    listing = tmp_path / "Train_GCC-training.tsv"
    rows = [f'" a caption {n}\thttps://host/x/{n}.jpg?size=1' for n in range(5)]
    put(listing, "\n".join([*rows, "another\thttps://other/0.jpg", "no tab"]) + "\n")
    command = ["pack", str(tmp_path / "pictures"), "--csv", str(listing), "--out", str(tmp_path / "out")]
    (tmp_path / "pictures").mkdir()
    assert main(command) == 2
    assert "nothing is downloaded here: fetch the pictures first (img2dataset" in capsys.readouterr().err
    for number in range(4):
        put(tmp_path / "pictures" / f"{number}.jpg", picture(number))
    assert main(command) == 0
    assert [record["txt"].decode() for record in records(tmp_path / "out")] == [f'" a caption {n}' for n in (1, 2, 3)]
    # Which of two URLs the file 0.jpg came from, nobody knows.
    assert left_out(tmp_path / "out") == ["missing file", "rows of one image disagree", "unreadable row"]


def features(**more: Any) -> dict[bytes, bytes]:
    label = {"names": ["cat", "a dog"], "_type": "ClassLabel"}
    return {
        b"huggingface": json.dumps({"info": {"features": {"img": {"_type": "Image"}, "label": label, **more}}}).encode()
    }


def arrow_table(picture: Callable[..., bytes], count: int = 150) -> Any:
    """Columns as `datasets` writes them; the last two rows have no picture, and row 3 has the picture of row 2."""
    pyarrow = pytest.importorskip("pyarrow")
    raw = [picture(2 if n == 3 else n) for n in range(count - 2)]
    images = [{"bytes": each, "path": "same.jpg"} for each in raw] + [{"bytes": None, "path": "gone.jpg"}] * 2
    captions = [[f"one {n}", f"two {n}"] for n in range(count)]
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    labels = [0 if n == 3 else n % 2 for n in range(count)]
    columns = {"img": pyarrow.array(images, kind), "label": labels, "caption": captions}
    return pyarrow.table(columns).replace_schema_metadata(features())


def write_saved(folder: Path, table: Any, parts: int = 2) -> None:
    """What `save_to_disk` writes."""
    import pyarrow as pa

    names = [f"data-{n:05d}-of-{parts:05d}.arrow" for n in range(parts)]
    put(folder / "state.json", json.dumps({"_data_files": [{"filename": name} for name in names], "_split": "train"}))
    put(folder / "dataset_info.json", "{}")
    for number, name in enumerate(names):
        first = number * table.num_rows // parts
        part = table.slice(first, (number + 1) * table.num_rows // parts - first)
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(part, max_chunksize=40)


@pytest.mark.parametrize("form", ["parquet", "one parquet", "datasets", "split"])
def test_pictures_in_arrow_tables(form: str, tmp_path: Path, picture) -> None:
    table, source, more = arrow_table(picture), tmp_path / "set", []
    if form == "parquet":
        import pyarrow.parquet as pq

        (source / "data").mkdir(parents=True)
        for number in range(2):
            part = table.slice(number * 75, 75)
            pq.write_table(part, source / "data" / f"train-0000{number}-of-00002.parquet", row_group_size=30)
        pq.write_table(table.slice(0, 1), source / "data" / "test-00000-of-00001.parquet")
        more = ["--split", "train"]
    elif form == "one parquet":
        import pyarrow.parquet as pq

        source.mkdir()
        pq.write_table(table, source / "x.parquet", row_group_size=70)
        more = ["--csv", str(source / "x.parquet")]
    elif form == "datasets":
        write_saved(source, table)
    else:
        put(source / "dataset_dict.json", '{"splits": ["train", "test"]}')
        write_saved(source / "train", table)
        write_saved(source / "test", table.slice(0, 4), 1)
        more = ["--split", "train"]
    out = tmp_path / "out"
    assert main(["pack", str(source), *more, "--out", str(out), "--per-shard", "50"]) == 0
    found = records(out)
    assert len(found) == 147 and left_out(out) == ["missing file"] * 2, "two rows of one picture are one record"
    assert [record["jpg"] for record in found] == [picture(n) for n in range(148) if n != 3]
    assert json.loads(found[2]["json"])["captions"] == ["one 2", "two 2", "one 3", "two 3"]
    assert (out / "classes.txt").read_text() == "cat\na dog\n" and [each["cls"] for each in found[:3]] == [
        b"cat",
        b"a dog",
        b"cat",
    ]


def test_splits_are_not_mixed_and_columns_are_named(tmp_path: Path, picture, capsys) -> None:
    import pyarrow.parquet as pq

    table = arrow_table(picture, 4)
    for name in ("train", "test"):
        pq.write_table(table, tmp_path / f"{name}-0.parquet")
    for more, said in (
        ([], "holds test, train; choose one with --split"),
        (["--split", "valid"], "no parquet file whose name begins with 'valid'"),
        (["--split", "test", "--label", "kind"], "no column 'kind' for --label; it has 'img', 'label', 'caption'"),
        (
            ["--split", "test", "--image", "label"],
            "no column of pictures (bytes) called 'label'; choose one with --image",
        ),
    ):
        assert main(["pack", str(tmp_path), *more, "--out", str(tmp_path / "out")]) == 2
        assert said in capsys.readouterr().err


def test_without_pyarrow_it_is_said_what_to_install(tmp_path: Path, monkeypatch, capsys) -> None:
    put(tmp_path / "train-0.parquet", "x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    monkeypatch.delitem(sys.modules, "pyarrow.ipc", raising=False)
    assert main(["pack", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'murmuration[arrow]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--csv", "{set}/none.csv"], "not there; name the folder of the pictures"),
        (["--layout", "imagenet"], "--layout imagenet: choose one of table, coco,"),
        (["--layout", "folders", "--split", "train"], "folders has no splits; leave it out"),
        (["--layout", "folders", "--label", "x"], "has no columns, so 'x' names none"),
        (["--csv", "{set}/t.csv", "--caption", "words"], "no column 'words' for --caption; it has 'a', 'image'"),
        (["--csv", "{set}/u.csv"], "no column names the images; it has 'a', 'b': choose one with --image"),
        (["--csv", "{set}/twice.csv"], "its first line must name the columns, each once"),
        (["--csv", "{set}/empty.csv"], "its first line must name the columns"),
        (["--csv", "{set}/list.json"], "no readable row"),
        (["--csv", "{set}/cut.json"], "not JSON"),
        (["--csv", "{set}/other.json"], "has no lists of images and annotations"),
        (["--csv", "{set}/boxes.json"], "annotations have neither captions nor categories"),
        (["--hold-out", "1"], "name a share from 0 to below 1"),
        (["--hold-out", "0.999999"], "holds out all records; name a smaller share"),
        (["--per-shard", "0"], "both must be at least 1"),
    ],
)
def test_what_cannot_be_packed_is_refused_in_one_sentence(
    wrong: list[str], said: str, tmp_path: Path, picture, capsys
) -> None:
    root = tmp_path / "set"
    folders(root, picture)
    texts = {
        "t.csv": "a,image\n1,x.jpg\n", "u.csv": "a,b\n1,x.jpg\n", "twice.csv": "a,a\n1,2\n", "empty.csv": "",
        "list.json": "[1, 2]", "cut.json": '{"images": [{"id": 1}', "other.json": '{"images": [{"id": 1}], "a": [1]}',
        "boxes.json": '{"images": [{"id": 1}], "annotations": [{"bbox": []}]}',
    }  # fmt: skip
    for name, text in texts.items():
        put(root / name, text)
    arguments = [each.replace("{set}", str(root)) for each in wrong]
    assert main(["pack", str(root), *arguments, "--out", str(tmp_path / "out")]) == 2
    answer = capsys.readouterr().err
    assert said in answer and answer.count("\n") == 1, answer
    assert [path.name for path in tmp_path.iterdir()] == ["set"], "nothing is left behind"


def test_shards_are_not_packed_again(tmp_path: Path, capsys) -> None:
    put(tmp_path / "set" / "0.tar", b"x")
    assert main(["pack", str(tmp_path / "set"), "--out", str(tmp_path / "out")]) == 2
    assert "holds tar shards, which need no packing: python launch/prepare.py index" in capsys.readouterr().err


def test_json_is_read_in_parts_as_it_is_read_whole(tmp_path: Path, monkeypatch) -> None:
    value = {
        "info": {"a": [1, {"b": "]}\\\""}]}, "number": 12345.5, "empty": [], "none": {}, "flag": True,
        "images": [{"id": n, "name": "é\n" * (n % 7)} for n in range(50)], "numbers": [1, 22, 333, -4.5e3, 10**18],
    }  # fmt: skip
    path = tmp_path / "x.json"
    wanted = [(key, each) for key, part in value.items() for each in (part if isinstance(part, list) else [part])]
    for indent in (None, 2):
        path.write_text(json.dumps(value, indent=indent))
        for chunk in (1, 2, 3, 7, 64, 1 << 20):
            monkeypatch.setattr(json_stream, "_CHUNK", chunk)
            assert list(elements(path)) == wanted
    whole = path.read_text()
    for end in range(0, len(whole.rstrip()), 7):
        path.write_text(whole[:end])
        with pytest.raises(PackError, match=r"x\.json: not JSON"):
            list(elements(path))
    for wrong in ("[1 2]", '{"a" 1}', "{1: 2}", "3", "[1] 2", '{"a": 1,}', "[" * 100_000):
        path.write_text(wrong)
        with pytest.raises(PackError, match=r"x\.json: not JSON"):
            list(elements(path))
