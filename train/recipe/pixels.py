"""By which mean and standard deviation a run normalises pixels: one public fact, the same in all of its phases.

Weights compute what they learnt only on pixels that are normalised as in their training. So the statistics are those of
the weights that a run starts from: an export or a run of ours names them, and so do the files that timm and Hugging
Face put beside their weights. Weights beside which nothing is said are refused unless the config says it, and a config
that contradicts them is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from murmuration.accounting.certificate.provenance import KEY as PROVENANCE
from murmuration.data.channels import HALF, IMAGENET_MEAN, IMAGENET_STD, Channels
from murmuration.data.decode.augment import PUBLISHED, ResizeCrop, SteadyView, require_known
from murmuration.data.draw.normalisation import Normalisation
from murmuration.model.load_report import WeightsError
from murmuration.model.named import LIBRARIES, OF_IMAGES, PREPROCESSOR, PROCESSOR, statistics_of
from murmuration.model.settings import ModelSettings, NamedPixels, PixelSettings
from murmuration.model.warm_start import IMAGENET_PIXELS, source_of
from murmuration.model.weight_files import NAMES, export_note, read_weights
from murmuration.train.config.section import RecipeError
from murmuration.train.storage.checkpoint import CheckpointError, Checkpoints
from murmuration.train.storage.run_dir import RunDir

IMAGENET = Normalisation(IMAGENET_MEAN, IMAGENET_STD)
NAMED: dict[NamedPixels, Normalisation] = {"imagenet": IMAGENET, "half": Normalisation(HALF, HALF)}
KEY = "pixels"
"""Key in manifests and exports; one that lacks it was made with ImageNet's."""
METADATA = "murmuration-pixels"
SAME = 1e-6
RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
PUBLISHED_CROP = PUBLISHED.crop / PUBLISHED.resize


@dataclass(frozen=True)
class Told:
    """What is known of some weights' pixels: None where nothing says it. `by` names what says so, or does not."""

    pixels: Normalisation | None
    by: str
    view: str = ""
    """The evaluation view that is named beside them, if it is another one than the published resizing and crop."""
    measured: SteadyView | None = None
    """The view of the run, where an export in the form of timm or Hugging Face names it."""


def of_settings(given: NamedPixels | PixelSettings | None) -> Normalisation | None:
    if isinstance(given, PixelSettings):
        return _known(Normalisation(given.mean, given.std))
    return None if given is None else NAMED[given]


def as_json(pixels: Normalisation) -> dict[str, Any]:
    """Empty for ImageNet's, so that what is written is the same as before there was a choice."""
    return {} if pixels == IMAGENET else {KEY: {"mean": list(pixels.mean), "std": list(pixels.std)}}


def in_words(pixels: Normalisation) -> str:
    name = next((name for name, known in NAMED.items() if known == pixels), None)
    return name or f"mean {_numbers(pixels.mean)} and std {_numbers(pixels.std)}"


def settled(given: Normalisation | None, told: Told | None, key: str) -> Normalisation:
    """The statistics to use; `given` was written under `key`, and `told` is None without weights."""
    if told is None:
        return given or IMAGENET
    if told.pixels is None:
        if given is None:
            raise RecipeError(
                f"{told.by} does not say how the weights' pixels were normalised; set {key} to what their model card "
                'says: imagenet, half, or {"mean": [r, g, b], "std": [r, g, b]}'
            )
        return given
    if given is not None and not _same(given, told.pixels):
        raise RecipeError(
            f"{key} is {in_words(given)}, but {told.by} says that the weights were trained with "
            f"{in_words(told.pixels)}; leave {key} out, or start from other weights"
        )
    return told.pixels


def of_run(model: ModelSettings, starts: Mapping[str, Path]) -> Normalisation:
    """`starts`: paths of weights, by the config keys that name them."""
    if model.reads_texts:
        return IMAGENET  # of the one pixel that stands for a picture
    found, named = of_settings(model.pixels), of_named(model)
    for where, path in starts.items():
        try:
            told = of_weights(path)
            # Files of a named model often lie alone; the name has then said it.
            if named is not None and told.pixels is None:
                told = named
            found = settled(found, told, "model.pixels")
        except (RecipeError, WeightsError, CheckpointError) as error:
            raise RecipeError(f"{where}: {str(error).rstrip('.')}") from None
    if found is None and named is not None:
        found = named.pixels
    return found or IMAGENET


def of_named(model: ModelSettings) -> Told | None:
    """What timm or Hugging Face states for the model that the config names; None where it names none, or where its
    folder is gone."""
    if model.family not in LIBRARIES or model.name is None:
        return None
    told = statistics_of(model.family, model.name)
    if told is None:
        return None
    if model.family == "timm":
        return _timm(told, f"timm's {model.name}")
    return _hugging_face(told, str(Path(model.name) / PREPROCESSOR))


def of_weights(path: Path) -> Told:
    """What a run directory, an export, or a file or folder of released weights says of itself."""
    if path.is_dir() and RunDir(path).checkpoints.is_dir() and not (path / NAMES[0]).is_file():
        loaded = Checkpoints.newest(RunDir(path).checkpoints)
        return Told(of_manifest({} if loaded is None else loaded.manifest, str(path)), str(path))
    folder = path if path.is_dir() else path.parent
    if note := export_note(path):
        return Told(of_manifest(note, f"{folder / 'export.json'}"), str(folder / "export.json"))
    note = _inside(path / NAMES[0] if path.is_dir() else path)
    if note is not None:
        return Told(of_manifest(note, str(path)), str(path), measured=_exported_view(folder))
    beside = _object(folder / "config.json")
    if "architecture" in beside:
        return _timm(beside, str(folder / "config.json"))
    if "model_type" in beside:
        found = _object(folder / PREPROCESSOR) or _object(folder / PROCESSOR).get(OF_IMAGES) or {}
        return _hugging_face(found, str(folder / PREPROCESSOR))
    source = source_of(read_weights(path))
    return Told(IMAGENET, source, "") if source in IMAGENET_PIXELS else Told(None, f"no config.json beside {path}")


def metadata(pixels: Normalisation) -> dict[str, str]:
    """For a file of safetensors, in case it is copied away from its export; empty for ImageNet's."""
    return {METADATA: json.dumps(found)} if (found := as_json(pixels)) else {}


def _inside(path: Path) -> dict[str, Any] | None:
    """What `metadata` left in a file of ours; None in any other."""
    try:
        with safe_open(str(path), "pt") as file:
            written = file.metadata() or {}
        if not {METADATA, PROVENANCE} & written.keys():
            return None
        found = json.loads(written.get(METADATA, "{}"))
    except (SafetensorError, OSError):
        return None  # no safetensors; a file that cannot be read at all is refused when its weights are read
    except (ValueError, RecursionError):
        found = {KEY: None}
    return found if isinstance(found, dict) else {KEY: None}


def _exported_view(folder: Path) -> SteadyView | None:
    """As our exports write it for timm and Hugging Face, in pixels of the model."""
    try:
        if "architecture" in (config := _object(folder / "config.json")):
            told = config["pretrained_cfg"]
            crop = told["input_size"][-1]
            resize = math.floor(crop / told["crop_pct"] + 1e-9)  # a quotient just below a whole number is that number
        else:
            told = _object(folder / PREPROCESSOR)
            resize, crop = told["size"]["shortest_edge"], told["crop_size"]["height"]
        require_known(view := ResizeCrop(resize, crop))
    except (KeyError, IndexError, TypeError, ValueError, ArithmeticError):  # it is gone, or was edited
        return None
    if resize == crop:
        return "center"
    return PUBLISHED if resize == crop * PUBLISHED.resize // PUBLISHED.crop else view


def of_manifest(note: Mapping[str, Any], where: str) -> Normalisation:
    """What a checkpoint's manifest or an export's note says."""
    told = note.get(KEY)
    found = _from(told.get("mean"), told.get("std")) if isinstance(told, dict) else None
    if KEY in note and found is None:
        raise WeightsError(f"{where} has no usable {KEY}; restore the file, or export the model again.")
    return found or IMAGENET


def _timm(told: dict[str, Any], where: str) -> Told:
    # Older files have the statistics beside the architecture.
    inner = told.get("pretrained_cfg")
    found = inner if isinstance(inner, dict) else told
    crop, how = found.get("crop_pct"), found.get("interpolation", "bicubic")
    usual = (crop is None or crop == PUBLISHED_CROP) and how == "bicubic"
    return Told(_from(found.get("mean"), found.get("std")), where, "" if usual else f"crop_pct {crop}, {how}")


def _hugging_face(told: dict[str, Any], where: str) -> Told:
    found = _from(told.get("image_mean"), told.get("image_std"))
    if told.get("do_normalize") is False:
        found = Normalisation((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    factor = told.get("rescale_factor", 1 / 255) if told.get("do_rescale", True) else 1.0
    if told.get("rescale_offset") or not isinstance(factor, int | float) or not 0 < factor < math.inf:
        found = None
    if found is not None and not math.isclose(white := 255 * factor, 1, rel_tol=SAME):
        # White is another number than 1, so mean and deviation are told in units of that.
        mean, std = ([value / white for value in part] for part in (found.mean, found.std))
        found = _from(mean, std)
    how = RESAMPLING.get(told.get("resample", 3), "bicubic")
    crop = told.get("crop_pct")
    unusual = [f"crop_pct {crop}"] if crop is not None and crop != PUBLISHED_CROP else []
    return Told(found, where, ", ".join([*unusual, *([how] if how != "bicubic" else [])]))


def _from(mean: Any, std: Any) -> Normalisation | None:
    parts = []
    for values in (mean, std):
        numbers = [values] * 3 if isinstance(values, int | float) else values
        if not isinstance(numbers, list | tuple) or len(numbers) != 3:
            return None
        if not all(isinstance(value, int | float) and math.isfinite(value) for value in numbers):
            return None
        parts.append((float(numbers[0]), float(numbers[1]), float(numbers[2])))
    return _known(Normalisation(*parts)) if min(parts[1]) > 0 else None


def _known(found: Normalisation) -> Normalisation:
    """Without the last digits of a file that wrote them in single precision."""
    return next((known for known in NAMED.values() if _same(found, known)), found)


def _same(one: Normalisation, other: Normalisation) -> bool:
    return all(abs(a - b) <= SAME for a, b in zip(one.mean + one.std, other.mean + other.std, strict=True))


def _numbers(values: Channels) -> str:
    return f"[{', '.join(f'{value:g}' for value in values)}]"


def _object(path: Path) -> dict[str, Any]:
    """Empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise WeightsError(f"{path} is not valid JSON; fetch the weights again.") from None
    return found if isinstance(found, dict) else {}
