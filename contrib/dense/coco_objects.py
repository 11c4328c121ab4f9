"""Objects in pictures, as COCO's instances list them."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from murmuration.data.pack.json_stream import elements
from murmuration.data.pack.row import PackError
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.protocols.caption_files import numbers_of

FIELDS = {
    "images": {"id", "file_name", "width", "height"}, "categories": {"id", "name"},
    "annotations": {"image_id", "category_id", "bbox", "segmentation"},
}  # fmt: skip
OPTIONAL = {"area", "iscrowd"}


@dataclass(frozen=True)
class Instance:
    """One object, or a crowd of them, which is neither learnt nor counted against what is found in it."""

    category: int
    """By the order of the ids; from 0."""
    box: tuple[float, float, float, float]
    """Left, top, width, height."""
    area: float
    shape: Any
    """Polygons, or a run-length code, as pycocotools reads them."""
    crowd: bool


@dataclass(frozen=True)
class Pictured:
    width: int
    height: int
    objects: tuple[Instance, ...]


@dataclass(frozen=True)
class Objects:
    categories: tuple[str, ...]
    pictures: dict[int, Pictured]
    """By the picture's place among the files."""

    def as_truth(self, places: list[int]) -> dict[str, Any]:
        """For pycocotools; pictures have their places as ids."""
        found = [(place, each) for place in places for each in self.pictures[place].objects]
        return {
            "images": [
                {"id": place, "width": self.pictures[place].width, "height": self.pictures[place].height}
                for place in places
            ],
            "categories": [{"id": number, "name": name} for number, name in enumerate(self.categories)],
            "annotations": [
                {
                    "id": number, "image_id": place, "category_id": each.category, "bbox": list(each.box),
                    "area": each.area, "segmentation": each.shape, "iscrowd": int(each.crowd),
                }
                for number, (place, each) in enumerate(found, 1)
            ],
        }  # fmt: skip


def read_objects(path: Path, files: list[str], option: str) -> Objects:
    document = _document(path, option)
    categories = sorted(document["categories"], key=lambda each: each["id"])
    order = {each["id"]: number for number, each in enumerate(categories)}
    if len(order) < len(categories):
        raise EvaluationError(f"{option} {path}: two categories have one id; correct it")
    objects: dict[Any, list[Instance]] = defaultdict(list)
    for number, each in enumerate(document["annotations"]):
        with_place = f"{option} {path}: annotation {number}"
        objects[each["image_id"]].append(_instance(each, order, with_place))
    listed = document["images"]
    places = numbers_of([str(each["file_name"]) for each in listed], files, f"{option} {path}")
    if len(set(places)) < len(places):
        raise EvaluationError(f"{option} {path} lists a picture twice; correct it")
    pictures = {
        place: Pictured(int(each["width"]), int(each["height"]), tuple(objects.pop(each["id"], ())))
        for place, each in zip(places, listed, strict=True)
    }
    if objects:
        raise EvaluationError(
            f"{option} {path}: objects of picture {min(map(str, objects))} have no picture; correct it"
        )
    return Objects(tuple(str(each["name"]) for each in categories), pictures)


def _document(path: Path, option: str) -> dict[str, list[dict[str, Any]]]:
    """Read in parts, and without what is not used: as a whole, COCO's training objects take gigabytes."""
    if not path.is_file():
        raise EvaluationError(
            f"{path} does not exist; name COCO's instances with {option}, or lay them out as COCO does: "
            "COCO/train2017 beside COCO/annotations/instances_train2017.json"
        )
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in FIELDS}
    try:
        for name, each in elements(path):
            if name in found:
                if not isinstance(each, dict) or not FIELDS[name] <= each.keys():
                    fields = ", ".join(sorted(FIELDS[name]))
                    raise EvaluationError(f"{option} {path}: {name} {len(found[name])} needs {fields}; correct it")
                found[name].append({key: each[key] for key in each.keys() & (FIELDS[name] | OPTIONAL)})
    except (OSError, PackError) as error:
        raise EvaluationError(f"{option} {path} cannot be read ({error}); name COCO's instances") from None
    if lacking := [name for name in ("images", "categories") if not found[name]]:
        raise EvaluationError(f"{option} {path} lists no {lacking[0]}; name COCO's instances")
    return found


def _instance(each: dict[str, Any], order: dict[Any, int], place: str) -> Instance:
    try:
        left, top, width, height = map(float, each["bbox"])
        shape, area = each["segmentation"], float(each.get("area", width * height))
        if each["category_id"] not in order or not all(map(math.isfinite, (left, top, width, height, area))):
            raise ValueError("another category, or a box that is not finite")
        if not isinstance(shape, dict | list):
            raise ValueError("neither polygons nor a run-length code")
        return Instance(order[each["category_id"]], (left, top, width, height), area, shape, bool(each.get("iscrowd")))
    except (KeyError, TypeError, ValueError) as error:
        raise EvaluationError(f"{place} cannot be used ({error}); correct it") from None
