"""Which layout a source has: by the files that each published set is known by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from murmuration.data.pack import arrow, bitmaps, coco, listed, table
from murmuration.data.pack.coco import COCO, Coco
from murmuration.data.pack.columns import Columns
from murmuration.data.pack.row import Layout, PackError, inner, require
from murmuration.data.pack.table import METADATA, Table

_SPLITS = {
    "cifar10": "train", "cifar100": "train", "svhn": "train", "aircraft": "trainval", "food101": "train",
    "places365": "train-standard", "inat": "train", "coco": "train2017",
}  # fmt: skip
LAYOUTS = (
    "table", "coco", "cc3m", "sbu", "parquet", "datasets", "cifar10", "cifar100", "svhn", "aircraft", "caltech101",
    "food101", "places365", "inat", "folders",
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """What the person who packs said: a folder of pictures or of a published set, and perhaps a table beside it."""

    folder: Path
    table: Path | None = None
    layout: str = "auto"
    split: str | None = None
    columns: Columns = field(default_factory=Columns)

    def split_of(self, layout: str) -> str:
        return self.split or _SPLITS[layout]


def open_layout(source: Source) -> Layout:
    """PackError if the source is not there, or not laid out as its layout must be."""
    for path in (source.folder, source.table):
        if path is not None and not path.exists():
            raise PackError(f"{path}: not there; name the folder of the pictures, and a table with --csv")
    layout = recognise(source) if source.layout == "auto" else source.layout
    if source.split is not None and layout in ("table", "cc3m", "sbu", "caltech101", "folders"):
        raise PackError(f"--split {source.split}: {layout} has no splits; leave it out")
    named = [
        each
        for each in (source.columns.image, source.columns.caption, source.columns.label, source.columns.unit)
        if each
    ]
    if named and layout not in ("table", "parquet", "datasets"):
        raise PackError(f"the layout {layout} has no columns, so {named[0]!r} names none; name a table with --csv")
    return _OPEN[layout](source)


def recognise(source: Source) -> str:
    if source.table is not None:
        kind = source.table.suffix.lower()
        if kind == ".json":
            from murmuration.data.pack.json_stream import elements

            key = next((key for key, _ in elements(source.table)), "")
            return "coco" if key else "table"
        if kind == ".parquet":
            return "parquet"
        return "cc3m" if kind in (".tsv", ".txt") and table.names_urls(source.table) else "table"
    root = source.folder
    if not root.is_dir():
        raise PackError(f"{root}: not a folder; name the folder of the pictures, and a table with --csv")
    if any(root.glob("*.tar")):
        raise PackError(f"{root}: holds tar shards, which need no packing: python launch/prepare.py index {root}")
    found = next((layout for layout, there in _MARKS.items() if there(root)), None)
    return found or "folders"


def _any(*names: str) -> Callable[[Path], bool]:
    return lambda root: any((root / name).exists() for name in names)


_MARKS: dict[str, Callable[[Path], bool]] = {
    "table": _any(*METADATA),
    "datasets": _any("dataset_dict.json", "state.json"),
    "cifar10": _any("cifar-10-batches-bin", "data_batch_1.bin", "cifar-10-batches-py", "data_batch_1"),
    "cifar100": _any("cifar-100-binary", "fine_label_names.txt", "cifar-100-python"),
    "svhn": _any("train_32x32.mat", "test_32x32.mat", "extra_32x32.mat"),
    "aircraft": _any("fgvc-aircraft-2013b", "data/variants.txt", "variants.txt"),
    "caltech101": _any("101_ObjectCategories", "caltech101/101_ObjectCategories"),
    "food101": _any("food-101/meta", "meta/classes.txt"),
    "places365": _any("categories_places365.txt"),
    "sbu": _any("SBU_captioned_photo_dataset_urls.txt", "dataset/SBU_captioned_photo_dataset_urls.txt"),
    "coco": lambda root: any(root.glob("annotations/captions_*.json")),
    "parquet": lambda root: bool(arrow.parquet_files(root)),
    "inat": lambda root: any((root / f"{name}.json").is_file() for name in ("train", "train_mini", "val")),
}


def _table(source: Source) -> Layout:
    path = source.table
    if path is None:
        path = next((source.folder / name for name in METADATA if (source.folder / name).is_file()), None)
    if path is None:
        raise PackError(f"{source.folder}: no {', '.join(METADATA)} in it; name a table with --csv")
    return Table(source.folder, path, source.columns)


def _parquet(source: Source) -> Layout:
    if source.table is None:
        return arrow.open_parquet_folder(source.folder, source.split, source.columns)
    file = arrow.Parquet(source.table)
    return arrow.Pictures([file], source.columns) if arrow.picture_columns(file.schema) else _table(source)


def _coco(source: Source) -> Layout:
    if source.table is not None:
        return coco.Coco(source.folder, source.table)
    split = source.split_of("coco")
    root = inner(source.folder, "COCO", "coco")
    annotations = f"annotations/captions_{split}.json"
    require(root, "COCO captions", [annotations, split], COCO)
    return Coco(root / split, root / annotations)


def _cc3m(source: Source) -> Layout:
    if source.table is None:
        raise PackError(
            f"{source.folder}: name the list of captions and URLs with --csv, such as Train_GCC-training.tsv"
        )
    return table.Tsv(source.folder, source.table)


_OPEN: dict[str, Callable[[Source], Layout]] = {
    "table": _table,
    "coco": _coco,
    "cc3m": _cc3m,
    "sbu": lambda source: table.Sbu(source.folder),
    "parquet": _parquet,
    "datasets": lambda source: arrow.open_saved(source.folder, source.split, source.columns),
    "cifar10": lambda source: bitmaps.Cifar(source.folder, bitmaps.CIFAR10, source.split_of("cifar10")),
    "cifar100": lambda source: bitmaps.Cifar(source.folder, bitmaps.CIFAR100, source.split_of("cifar100")),
    "svhn": lambda source: bitmaps.Svhn(source.folder, source.split_of("svhn")),
    "aircraft": lambda source: listed.Aircraft(source.folder, source.split_of("aircraft")),
    "caltech101": lambda source: listed.open_caltech(source.folder),
    "food101": lambda source: listed.Food(source.folder, source.split_of("food101")),
    "places365": lambda source: listed.Places(source.folder, source.split_of("places365")),
    "inat": lambda source: coco.open_inat(source.folder, source.split_of("inat")),
    "folders": lambda source: listed.Folders(source.folder, "auto"),
}
