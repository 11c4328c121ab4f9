"""Public sets that hold the private one: classes left out by name, of folders, indexed shards and streams."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from murmuration.data.batch.reader import BatchReader
from murmuration.data.decode.class_list import ClassList
from murmuration.data.draw.stream import StreamEpochs, StreamIndex
from murmuration.data.index.folders import FolderIndex, build_folder
from murmuration.data.index.shard_index import build
from murmuration.train.commands.dry_run import meaning
from murmuration.train.config.load import ConfigError, load
from murmuration.train.config.root import Config
from murmuration.train.config.section import RecipeError
from murmuration.train.recipe.open_data import known_records
from murmuration.train.recipe.read_options import with_stream_order
from murmuration.train.recipe.ready_phase import ReadyPhase, prepare
from tests.support.tars import numbered, png

LISTED = ["dog", "cat", "bird", "fish"]
EACH = {"bird": 3, "cat": 4, "dog": 2, "fish": 5}
ROOT = Path(__file__).resolve().parents[2]


def picture(name: str) -> bytes:
    return png(40 * LISTED.index(name), 20)


def write_tar(path: Path, label: str) -> None:
    """`label`: what its records carry: a name or a number in .cls, or a number in .json."""
    path.parent.mkdir()
    records = list[dict[str, bytes]]()
    for name in (name for name, count in EACH.items() for _ in range(count)):
        place = str(LISTED.index(name))
        tell = {"cls": place, "json": json.dumps({"kind": int(place)}), "names": name}[label].encode()
        records.append({"png": picture(name), "json" if label == "json" else "cls": tell})
    path.write_bytes(numbered(records))


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    for name, count in EACH.items():
        (folder / "folders" / name).mkdir(parents=True)
        for number in range(count):
            (folder / "folders" / name / f"{number}.png").write_bytes(picture(name))
    build_folder(folder / "folders")
    for label in ("cls", "json", "names"):
        write_tar(folder / label / "0.tar", label)
        build(folder / label)
    (folder / "classes.txt").write_text("\n".join(LISTED))
    (folder / "out.txt").write_text("cat\nunheard\n")
    (folder / "none.txt").write_text("cow\n")
    return folder


def config_of(sets: Path, data: dict[str, Any], **phase: Any) -> Config:
    raw = {
        "train_micro_batch_size_per_gpu": 4,
        "model": {
            "family": "classifier", "image_size": 16, "patch_size": 8, "width": 16, "depth": 1, "heads": 2,
            "classes": 3, "classify_loss": "softmax",
        },
        "phases": [
            {
                "name": "open", "objective": "classify", "batch": 2, "schedule": {"peak": 0.1}, "steps": 1,
                "data": {"public": True, "label": "cls", "classes": "classes.txt", "exclude_classes": "out.txt"} | data,
            } | phase,
        ],
    }  # fmt: skip
    (sets / "config.json").write_text(json.dumps(raw))
    return load(sets / "config.json", [])


def labels(phase: ReadyPhase, ids: np.ndarray) -> list[int | None]:
    reader = BatchReader(phase.index, phase.data_spec(augment=False))
    batch = reader.read(ids, 0)
    assert reader.bad_records == []
    return [int(n) if there else None for n, there in zip(batch.inputs["labels"], batch.present, strict=True)]


# Outputs are dog, bird, fish: the list without cat, in its order.
LEFT = {"dog": 0, "bird": 1, "fish": 2}
EXPECTED = [LEFT[name] for name, count in EACH.items() if name != "cat" for _ in range(count)]


def test_class_folders_that_are_left_out_are_not_counted_and_have_no_output(sets: Path) -> None:
    config = config_of(sets, {"path": "folders"})
    (phase,) = prepare(config)
    assert phase.index.records == known_records(config.phases[0], "phases.0")[0] == 10
    assert labels(phase, np.arange(10)) == EXPECTED
    (ranked,) = prepare(config_of(sets, {"path": "folders", "classes": None}))
    by_rank = {"bird": 0, "dog": 1, "fish": 2}
    assert labels(ranked, np.arange(10)) == [by_rank[n] for n, c in EACH.items() if n != "cat" for _ in range(c)]


@pytest.mark.parametrize(("path", "label"), [("cls", "cls"), ("names", "cls"), ("json", "kind")])
def test_records_of_indexed_shards_keep_their_slots_which_stay_empty(sets: Path, path: str, label: str) -> None:
    """Numbers in files are those of the whole list, before and after."""
    (phase,) = prepare(config_of(sets, {"path": path, "label": label}))
    assert phase.index.records == 14
    assert labels(phase, np.arange(14)) == [
        None if name == "cat" else LEFT[name] for name, count in EACH.items() for _ in range(count)
    ]


@pytest.mark.parametrize(("path", "label"), [("cls", "cls"), ("names", "cls"), ("json", "kind")])
def test_a_stream_is_the_stream_of_the_other_records(sets: Path, path: str, label: str) -> None:
    data = {"source": "webdataset", "path": path, "label": label, "lanes": 1, "buffer": 8}
    (phase,) = prepare(config_of(sets, data))
    assert isinstance(phase.index, StreamIndex)
    ready = with_stream_order(phase, b"k" * 32)
    epochs = StreamEpochs(1, 10)
    for epoch in range(2):
        assert sorted(map(str, labels(ready, epochs.ids(epoch)))) == sorted(map(str, EXPECTED))
    begun = with_stream_order(phase, b"k" * 32)
    assert labels(begun, epochs.ids(1)) == labels(with_stream_order(phase, b"k" * 32), epochs.ids(1))


def test_evaluation_and_mixing_leave_them_out_too_and_outputs_stay_where_any_data_need_them(sets: Path) -> None:
    own = {"path": str(sets / "folders"), "public": True}
    (phase,) = prepare(config_of(sets, {"path": "folders"}, evaluation=own, monitor=own))
    assert phase.held_out is not None and phase.held_out.records == 10
    assert phase.monitored is not None and phase.monitored.records == 10
    config = config_of(sets, {"path": "folders"})
    raw = json.loads((sets / "config.json").read_text())
    second = {
        "name": "private", "objective": "classify", "schedule": {"peak": 0.1}, "steps": 1,
        "data": {"path": "names", "label": "cls", "classes": "classes.txt"},
        "privacy": {"epsilon": 8.0, "expected_batch": 4},
    }  # fmt: skip
    raw["phases"].append(second)
    raw["model"]["classes"] = 4
    (sets / "config.json").write_text(json.dumps(raw))
    public, private = prepare(load(sets / "config.json", []))
    assert public.index.records == 10 and private.index.records == 14
    assert set(labels(public, np.arange(10))) == {0, 2, 3} and set(labels(private, np.arange(14))) == {0, 1, 2, 3}
    assert config.phases[0].name == "open"


def test_another_list_is_another_phase_and_no_list_is_as_before(sets: Path) -> None:
    def digest(data: dict[str, Any]) -> str:
        config = config_of(sets, {"path": "folders", "classes": None} | data)
        return config.digest(0, prepare(config)[0].contents())

    first = digest({})
    (sets / "copy.txt").write_bytes((sets / "out.txt").read_bytes())
    (sets / "more.txt").write_text("cat\nbird\n")
    assert digest({"exclude_classes": "copy.txt"}) == first != digest({"exclude_classes": "more.txt"})


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"path": "folders", "public": False}, {}, "exclude_classes is for public data.*keep their slots"),
    ({"path": "folders", "public_fraction": 0.5}, {}, "public_fraction cuts a set by the number"),
    ({"source": "webdataset", "path": "cls", "classes": None}, {}, "exclude_classes needs label and classes"),
    ({"path": "cls", "classes": None}, {}, r"phases.0.data.path: exclude_classes needs data.label and data.classes"),
    ({"path": "folders", "exclude_classes": "none.txt"}, {},
     "phases.0.data.classes: none of the names of exclude_classes is on this list"),
    ({"path": "folders", "classes": None, "exclude_classes": "none.txt"}, {}, "none of the classes to leave out is"),
    ({"path": "folders", "exclude_classes": "classes.txt"}, {}, "every record is of a class that is left out"),
    ({"path": "folders", "exclude_classes": "gone.txt"}, {}, r"phases.0.data.exclude_classes: .*gone.txt"),
    ({"path": "folders", "expected_records": 14}, {}, "expected_records is 14, but the index has 10"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "phase", "message"), REFUSED)
def test_what_leaves_out_private_records_or_nothing_or_all_is_refused(
    sets: Path, data: dict[str, Any], phase: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, RecipeError), match=message):
        prepare(config_of(sets, data, **phase))


def test_the_recipes_that_pretrain_have_an_output_for_each_class_that_is_left() -> None:
    """ImageNet-21k and ImageNet-1k by the lists that timm ships."""
    lists = files("timm.data") / "_info"
    whole, part = (
        ClassList(tuple((lists / name).read_text().split()))
        for name in ("imagenet22k_synsets.txt", "imagenet_synsets.txt")
    )
    left = whole.without(part.names)
    assert set(part.names) - set(whole.names) == {"n04399382"}
    for path in sorted((ROOT / "ds_configs" / "transfer").glob("pretrain_*.json")):
        raw = json.loads(path.read_text())
        assert raw["model"]["classes"] == len(left.names), path
        assert raw["phases"][0]["data"]["exclude_classes"].endswith("imagenet-1k-classes.txt")
        assert meaning(load(path, [])).shape.head.classes == len(left.names)


def test_an_index_is_shared_by_runs_that_leave_out_and_runs_that_do_not(sets: Path) -> None:
    whole = FolderIndex.open(sets / "folders")
    part = whole.without({"cat"})
    assert part.manifest_digest == whole.manifest_digest and part.classes == ("bird", "dog", "fish")
    places = [part.locate(n)[0] for n in range(part.records)]
    assert places == [place for n in range(14) if "/cat/" not in str(place := whole.locate(n)[0])]
