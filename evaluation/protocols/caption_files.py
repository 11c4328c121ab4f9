"""Public JSON files that pair pictures with captions: Karpathy's splits, lists of captions, and ARO's four sets.

{"images": [{"filename": "1.jpg", "split": "test", "sentences": [{"raw": "…"}]}]}      Karpathy (COCO, Flickr30k)
[{"image": "val2014/1.jpg", "caption": ["…", "…"]}]                                    the same, already split
[{"image_path": "1.jpg", "bbox_x": 0, "bbox_y": 0, "bbox_w": 9, "bbox_h": 9,           VG-Relation
  "relation_name": "on", "true_caption": "…", "false_caption": "…"}]
[{…, "attributes": ["old", "red"], …}]                                                 VG-Attribution, else alike
[{"image": "1.jpg", "options": ["…", "…"], "true": 0}]                                 COCO-Order, Flickr-Order
[{"caption": "…", "words": ["…", "…"], "tags": ["DT", "NN"]}]                          tags, to make the latter of
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

from murmuration.accounting.strict_json import JsonError, parse
from murmuration.data.decode.decode import MAX_PIXELS
from murmuration.data.index.selection import Box
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.measures.caption_scores import Tagged, options_of

T = TypeVar("T")
Set = Literal["relation", "attribution", "order"]


@dataclass(frozen=True)
class Captioned:
    picture: str
    captions: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """One choice: a picture, or a box of it, and captions of which one is true."""

    picture: str
    box: Box | None
    options: tuple[str, ...]
    true: int
    group: str
    """The relation or the pair of attributes; empty where cases have no groups."""

    def told(self) -> dict[str, Any]:
        """The case of a made order, as `read_cases` reads it."""
        return {"image": self.picture, "options": list(self.options), "true": self.true}


def read_captions(path: Path, split: str | None) -> list[Captioned]:
    found = _json(path, "--captions")
    listed = found.get("images") if isinstance(found, dict) else found
    if not isinstance(listed, list) or not listed:
        raise EvaluationError(f"--captions {path} lists no pictures; name a Karpathy split or a list of captions")
    if isinstance(found, dict) and split is not None:
        listed = [each for each in listed if isinstance(each, dict) and each.get("split") == split]
        if not listed:
            raise EvaluationError(f"--captions {path} has no picture of the split {split!r}; name another with --split")
    return _each(listed, path, "--captions", _captioned)


def read_cases(path: Path) -> tuple[Set, list[Case]]:
    found = _json(path, "--cases")
    if not isinstance(found, list) or not found or not isinstance(found[0], dict):
        raise EvaluationError(f"--cases {path} is no list of cases; name a file of ARO")
    kinds: dict[str, Set] = {"relation_name": "relation", "attributes": "attribution", "options": "order"}
    # VG-Attribution has no relation_name, so the first key that fits decides.
    kind: Set | None = next((kinds[key] for key in kinds if key in found[0]), None)
    if kind is None:
        raise EvaluationError(
            f"--cases {path}: its cases have neither relation_name, attributes nor options; name a file of ARO"
        )
    read = _order if kind == "order" else _relation if kind == "relation" else _attribution
    return kind, _each(found, path, "--cases", read)


def made_cases(path: Path, split: str | None, tags: Path | None, seed: int) -> list[Case]:
    """Captions of a file, each with itself in other orders; the true one is the first option."""
    if find_spec("nltk") is None:
        raise EvaluationError("captions are cut into words by NLTK; install it: pip install 'murmuration[orders]'")
    tagged = None if tags is None else dict(_each(_listed(tags), tags, "--tags", _tagged))
    cases: list[Case] = []
    for each in read_captions(path, split):
        for caption in each.captions:
            if tagged is not None and caption not in tagged:
                raise EvaluationError(f"--tags {tags} has no tags for {caption!r:.80}; tag all captions of {path}")
            found = None if tagged is None else tagged[caption]
            cases.append(Case(each.picture, None, options_of(caption, found, seed, len(cases)), 0, ""))
    return cases


def _listed(path: Path) -> list[Any]:
    found = _json(path, "--tags")
    if not isinstance(found, list):
        raise EvaluationError(f"--tags {path} is no list; write [{{caption, words, tags}}]")
    return found


def _tagged(each: dict[str, Any]) -> tuple[str, Tagged]:
    caption, words, tags = _text(each["caption"]), each["words"], each["tags"]
    pairs = [(_text(word), _text(tag)) for word, tag in zip(words, tags, strict=True)]
    if "".join("".join(words).split()) != "".join(caption.split()):
        raise ValueError("its words are not those of its caption")
    return caption, pairs


def numbers_of(pictures: Sequence[str], files: Sequence[str], option: str) -> list[int]:
    """The number of each picture's file, by its path, or else by its name if only one file has it."""
    paths = {name: number for number, name in enumerate(files)}
    names: dict[str, int | None] = {}
    for number, name in enumerate(files):
        last = PurePosixPath(name).name
        names[last] = None if last in names else number
    found = []
    for picture in pictures:
        number = paths.get(picture, names.get(PurePosixPath(picture).name))
        if number is None:
            raise EvaluationError(f"{option}: {picture} is none of the {len(files)} pictures; name its folder")
        found.append(number)
    return found


def _json(path: Path, option: str) -> Any:
    try:
        return parse(path.read_bytes())
    except (OSError, JsonError) as error:
        raise EvaluationError(f"{option} {path} cannot be read ({error}); name a JSON file") from None


def _each(listed: list[Any], path: Path, option: str, read: Callable[[dict[str, Any]], T]) -> list[T]:
    found = []
    for number, each in enumerate(listed):
        try:
            found.append(read(each))
        except KeyError as error:
            raise EvaluationError(f"{option} {path}: entry {number} lacks {error}; add it") from None
        except (ValueError, TypeError, AttributeError, IndexError) as error:
            raise EvaluationError(f"{option} {path}: entry {number} cannot be used ({error}); correct it") from None
    return found


def _captioned(each: dict[str, Any]) -> Captioned:
    if "sentences" in each:
        captions = tuple(_text(sentence["raw"]) for sentence in each["sentences"])
        picture = PurePosixPath(_text(each.get("filepath", "") or "."), _text(each["filename"]))
    else:
        given = each["caption"]
        captions = tuple(_text(one) for one in ([given] if isinstance(given, str) else given))
        picture = PurePosixPath(_text(each["image"]))
    if not captions:
        raise ValueError("it has no caption")
    return Captioned(str(picture), captions)


def _relation(each: dict[str, Any]) -> Case:
    return _visual_genome(each, _text(each["relation_name"]))


def _attribution(each: dict[str, Any]) -> Case:
    first, second = (_text(one) for one in each["attributes"])
    return _visual_genome(each, f"{first}_{second}")


def _visual_genome(each: dict[str, Any], group: str) -> Case:
    left, top, width, height = (_whole(each[f"bbox_{side}"]) for side in "xywh")
    if width < 1 or height < 1 or width * height > MAX_PIXELS:
        raise ValueError(f"its box has {width} x {height} pixels")
    box = (left, top, left + width, top + height)
    # The false caption first, as in ARO: a tie counts as wrong.
    options = (_text(each["false_caption"]), _text(each["true_caption"]))
    return Case(_text(each["image_path"]), box, options, 1, group)


def _order(each: dict[str, Any]) -> Case:
    options, true = tuple(_text(one) for one in each["options"]), _whole(each["true"])
    if len(options) < 2 or not 0 <= true < len(options):
        raise ValueError(f"it has {len(options)} options, of which number {true} should be true")
    return Case(_text(each["image"]), None, options, true, "")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:40]!r} is no text")
    return value


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > 1 << 30:
        raise ValueError(f"{str(value)[:40]!r} is no whole number")
    return value
