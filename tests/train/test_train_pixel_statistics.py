"""Pixels are normalised as the weights were trained: what files beside them say, what is refused, what it reaches."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_data_config
from timm.models._hub import save_for_hf
from torch import Tensor

from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.decode.augment import ResizeCrop, SteadyView, choose_view, view_from, view_in_words
from murmuration.data.draw.normalisation import Normalisation
from murmuration.data.index.folders import FolderIndex, build_folder
from murmuration.evaluation.models.subject import Subject
from murmuration.evaluation.models.weights import Sizes, open_model
from murmuration.evaluation.session.features import Computing
from murmuration.evaluation.session.session import Chosen, Session
from murmuration.model.build import build
from murmuration.model.foreign_config import Preprocessing, hugging_face_preprocessor
from murmuration.model.load_report import WeightsError
from murmuration.model.settings import ModelSettings
from murmuration.train.config.root import Config
from murmuration.train.config.section import RecipeError
from murmuration.train.recipe.pixels import IMAGENET, NAMED, as_json, metadata, of_weights
from murmuration.train.recipe.ready_phase import prepare
from murmuration.train.run.report_pictures import pixels
from tests.support.evaluation_world import class_folders, evaluate
from tests.support.foreign_models import ENCODER, hugging_face, moved, timm_bit, timm_vit
from tests.support.published import vip_mae

SIZES = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 4}
MODEL = {"family": "classifier", "classes": 5, **ENCODER}
VIT = "vit/pytorch_model.bin"
OTHER = Normalisation((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


@pytest.fixture
def photos(tmp_path: Path) -> FolderIndex:
    """Pictures of several sizes and shapes, in both formats that are usual."""
    (tmp_path / "photos").mkdir()
    for number, size in enumerate([(26, 20), (17, 17), (90, 301), (640, 427)]):
        drawn = np.random.default_rng(number).integers(0, 255, (size[1] // 3 + 1, size[0] // 3 + 1, 3), dtype=np.uint8)
        picture = Image.fromarray(drawn).resize(size, Image.Resampling.BICUBIC)
        for ending in ("png", "jpg"):
            picture.save(tmp_path / "photos" / f"{number}.{ending}")
    return build_folder(tmp_path / "photos")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_toy_vit_of_timm_gives_timms_own_logits_through_the_commands_reader(
    photos: FolderIndex, tmp_path: Path, workers: int
) -> None:
    theirs = timm_vit()
    told = resolve_data_config({"input_size": (3, 16, 16)}, model=theirs)
    assert told["mean"] == told["std"] == (0.5, 0.5, 0.5) and told["crop_pct"] == 0.9
    save_for_hf(theirs, tmp_path / "vit", model_args=SIZES)
    subject = Subject.at(tmp_path / "vit")
    model = open_model(subject, Sizes())
    assert model.pixels == NAMED["half"] and any("crop_pct 0.9" in note for note in model.report.notes)
    # 17 pixels, of which 16 are shown: timm's crop_pct of 0.9.
    session = Session(subject, model, Computing(torch.device("cpu"), "fp32", 3, workers), ResizeCrop(17, 16), tmp_path)

    def act(ids: np.ndarray, inputs: dict[str, Tensor], before: int) -> list[Any]:
        return model.model.logits(inputs["images"]).tolist()  # pyright: ignore

    chosen = Chosen.of(photos)
    found = session.answers(session.result("photos", {}, {"test": chosen}), chosen, session.spec(), act)
    assert len(found) == 8
    transform: Any = create_transform(**told)
    for record, ours in found:
        place = Path(str(photos.locate(record)[0]))
        with torch.no_grad():
            expected = theirs(transform(Image.open(place).convert("RGB"))[None])[0]
        assert (torch.tensor(ours) - expected).abs().max() < 1e-5, place.name
    by_imagenet = (np.full(3, 0.5) - IMAGENET.mean) / IMAGENET.std
    assert np.abs(by_imagenet).max() > 0.05, "other statistics are other inputs"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}, NAMED["half"]),
        ({"image_mean": 0.5, "image_std": 0.5, "do_rescale": True, "rescale_factor": 0.00392156862745098},
         NAMED["half"]),
        # As written in single precision.
        ({"image_mean": [0.48500001430511475, 0.4560000002384186, 0.4059999883174896],
          "image_std": [0.2290000021457672, 0.2240000069141388, 0.22499999403953552]}, IMAGENET),
        ({"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "resample": 2}, OTHER),
        # Pixels of 0 … 2 and of 0 … 255 in their own units.
        ({"image_mean": [0.2, 0.4, 0.6], "image_std": [0.8, 1.0, 1.2], "rescale_factor": 2 / 255}, OTHER),
        ({"image_mean": [127.5] * 3, "image_std": [127.5] * 3, "do_rescale": False}, NAMED["half"]),
        ({"do_normalize": False}, Normalisation((0, 0, 0), (1, 1, 1))),
        ({"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 127.5, "rescale_offset": True}, None),
        ({"image_mean": [0.5] * 3, "image_std": [0.5, 0.0, 0.5]}, None),
        ({"image_mean": [0.5] * 2, "image_std": [0.5] * 2}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_what_preprocessor_config_says(tmp_path: Path, told: dict[str, Any], expected: Normalisation | None) -> None:
    hugging_face().save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(told))
    found = of_weights(tmp_path)
    assert found.by.endswith("preprocessor_config.json") and ("bilinear" in found.view) == (told.get("resample") == 2)
    if expected is None or found.pixels is None:
        assert found.pixels is expected
    else:
        ours, theirs = ((each.mean, each.std) for each in (found.pixels, expected))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
        assert expected == OTHER or found.pixels == expected, "known ones are taken to the last digit"


@pytest.mark.parametrize("view", [ResizeCrop(), ResizeCrop(384, 256), ResizeCrop(400, 294), "center"])
@pytest.mark.parametrize("side", [16, 147])
def test_the_view_of_its_run_is_read_from_an_export_in_the_form_of_a_library(
    tmp_path: Path, view: SteadyView, side: int
) -> None:
    own = metadata(OTHER)
    seen = Preprocessing(*(ResizeCrop(1, 1) if view == "center" else view), OTHER.mean, OTHER.std)
    cfg = {"crop_pct": seen.crop / seen.resize, "input_size": [3, side, side]}
    written = {
        "timm": ("config.json", {"architecture": "x", "pretrained_cfg": cfg}),
        "hf": ("preprocessor_config.json", hugging_face_preprocessor(side, seen)),
    }
    for form, (name, told) in written.items():
        hugging_face().save_pretrained(tmp_path / form)
        weights, beside = tmp_path / form / "model.safetensors", tmp_path / form / name
        save_file(hugging_face().state_dict(), weights, own)
        for text, known in ((json.dumps(told), True), (json.dumps({"architecture": "x"}), False)):
            beside.write_text(text)
            for path in (weights, weights.parent):
                found = of_weights(path)
                assert found.pixels == OTHER and (found.measured is not None) == known
                assert not known or shown(found.measured, side) == shown(view, side)
        beside.write_text(json.dumps(told))
        save_file(hugging_face().state_dict(), weights)
        assert of_weights(weights).measured is None, "others' folders are shown as published evaluations do"


def shown(view: SteadyView | None, side: int) -> Any:
    return view if view is None or view == "center" else choose_view(view, 301, 402, side, b"", 0, 0)


def test_what_hugging_faces_own_processor_makes_of_a_picture(tmp_path: Path) -> None:
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor(do_resize=False, image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6])
    hugging_face().save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8))
    theirs = torch.as_tensor(np.asarray(processor(picture, return_tensors="np")["pixel_values"]))
    statistics = of_weights(tmp_path).pixels
    assert statistics is not None
    ours = statistics.of(torch.from_numpy(np.asarray(picture)[None].copy()), torch.ones(1, dtype=torch.bool))
    torch.testing.assert_close(ours, theirs.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ({"architecture": "x", "pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}, NAMED["half"]),
        ({"architecture": "x", "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}, OTHER),  # as older versions wrote it
        ({"architecture": "vit_base_patch16_224"}, None),  # another tag of the architecture may have others
        (None, None),
    ],
)
@pytest.mark.parametrize("make", [timm_vit, timm_bit])
def test_what_lies_beside_timms_weights(
    tmp_path: Path, make: Callable[[], torch.nn.Module], beside: dict[str, Any] | None, expected: Normalisation | None
) -> None:
    save_file(make().state_dict(), tmp_path / "model.safetensors")
    if beside is not None:
        (tmp_path / "config.json").write_text(json.dumps(beside))
    assert of_weights(tmp_path / "model.safetensors").pixels == of_weights(tmp_path).pixels == expected


def test_published_and_own_weights_are_imagenets_unless_they_say_otherwise(tmp_path: Path) -> None:
    torch.save({"model": vip_mae(48, 2, grid=2, patch=8, decoder_width=32, decoder_depth=1)}, tmp_path / "vip.pth")
    assert of_weights(tmp_path / "vip.pth").pixels == IMAGENET
    state = build(ModelSettings.model_validate(MODEL), "classify").state_dict()
    for name, statistics in (("imagenet", IMAGENET), ("other", OTHER)):
        folder = tmp_path / name
        folder.mkdir()
        save_file(state, folder / "model.safetensors", {"format": "pt", **metadata(statistics)})
        note = {"objective": "classify", "shapes": {}, **as_json(statistics)}
        (folder / "export.json").write_text(json.dumps(note))
        assert of_weights(folder).pixels == of_weights(folder / "model.safetensors").pixels == statistics
        assert ("pixels" in note) == (name == "other"), "what is written for ImageNet's is as it always was"
        (folder / "export.json").unlink()
        copied = of_weights(folder).pixels
        assert copied == (OTHER if name == "other" else None), "a file that was copied away from its export"
    (tmp_path / "other" / "export.json").write_text(json.dumps({"objective": "x", "shapes": {}, "pixels": "grey"}))
    with pytest.raises(WeightsError, match="no usable pixels"):
        of_weights(tmp_path / "other")


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Config]:
    """A config that starts from weights of timm, which say that their pixels were normalised by halves."""
    save_for_hf(timm_vit(), tmp_path / "vit", model_args=SIZES)
    build_folder(class_folders(tmp_path / "set", 2))

    def made(given: Any = None, start: str | None = VIT, **evaluation: Any) -> Config:
        data = {"path": str(tmp_path / "set"), "public": True, "label": "cls"}
        schedule = {"peak": 1e-3, "shape": "constant"}
        trained = {"name": "public", "objective": "classify", "data": data, "batch": 4, "schedule": schedule,
                   "steps": 1, "evaluation": {"path": str(tmp_path / "set"), "public": True, **evaluation}}  # fmt: skip
        weights = {"source": "checkpoint", "path": str(tmp_path / str(start)), "public": True}
        first = [] if start is None else [{"name": "imported", "objective": "classify", "data": weights}]
        model = MODEL if given is None else {**MODEL, "pixels": given}
        whole = {"train_micro_batch_size_per_gpu": 4, "model": model, "phases": [*first, trained]}
        return Config.model_validate_json(json.dumps(whole))

    return made


def specs(config: Config) -> list[DataSpec]:
    """How each phase trains and is monitored, and last how public held-out records are measured."""
    found = prepare(config)
    assert found[-1].measured is not None
    return [*(p.data_spec(augment=a) for p in found for a in (True, False)), found[-1].measured.spec]


def test_every_phase_reads_pixels_as_the_weights_were_trained(read: Callable[..., Config]) -> None:
    halves = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    for given in (None, "half", {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}):
        assert {(spec.mean, spec.std) for spec in specs(read(given))} == {halves}
    plain = read(None, start=None)
    assert {(spec.mean, spec.std) for spec in specs(plain)} == {(IMAGENET.mean, IMAGENET.std)}
    mixed = read({"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}, start=None)
    phase = prepare(mixed)[0]
    reader = BatchReader(phase.index, phase.data_spec(augment=False))
    (image,) = reader.read(np.array([0]), 0).inputs["images"]
    (seen,) = (
        BatchReader(phase.index, DataSpec(16, "center", mean=(0, 0, 0), std=(1, 1, 1)))
        .read(np.array([0]), 0)
        .inputs["images"]
    )
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in (OTHER.mean, OTHER.std))
    torch.testing.assert_close(image, (seen - mean) / std, rtol=0, atol=1e-6)
    # Pages show what was read.
    torch.testing.assert_close(pixels(image, phase.data_spec(augment=False)), seen, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "start", "reason"),
    [
        ("imagenet", VIT, "model.pixels is imagenet, but .*config.json says .* trained with half; leave model.pixels"),
        (
            None,
            "bare.safetensors",
            "no config.json beside .* does not say .* set model.pixels to what their model card",
        ),
        ({"mean": [0.5] * 3, "std": [0.4] * 3}, VIT, r"mean \[0.5, 0.5, 0.5\] and std \[0.4, 0.4, 0.4\], but"),
        ("half", "vip.pth", "ViP-MAE checkpoint says that the weights were trained with imagenet"),
    ],
)
def test_contradictions_and_the_unknown_are_refused_before_anything_runs(
    read: Callable[..., Config], tmp_path: Path, given: Any, start: str, reason: str
) -> None:
    (tmp_path / "alone").mkdir()
    save_file(timm_vit().state_dict(), tmp_path / "alone" / "bare.safetensors")
    torch.save(vip_mae(48, 2, grid=2, patch=8, decoder_width=32, decoder_depth=1), tmp_path / "alone" / "vip.pth")
    where = start if start == VIT else f"alone/{start}"
    with pytest.raises(RecipeError, match=rf"phases\.0\.data\.path: .*{reason}"):
        prepare(read(given, start=where))
    # What nothing contradicts is taken at its word.
    if start.startswith("bare"):
        for said in ("imagenet", "half"):
            assert prepare(read(said, start=where))[1].pixels == NAMED[said]


def test_a_run_continues_only_with_the_statistics_that_it_began_with(read: Callable[..., Config]) -> None:
    def digest(config: Config) -> str:
        phase = prepare(config)[-1]
        contents = phase.contents() | {"start": "s"}
        return config.digest(len(config.phases) - 1, contents)

    assert digest(read(None)) == digest(read("half"))
    plain, named = read(None, start=None), read("imagenet", start=None)
    assert digest(plain) == digest(named) != digest(read("half", start=None))


def test_training_evaluates_the_whole_middle_unless_a_view_is_given(read: Callable[..., Config]) -> None:
    def view(**given: int) -> Any:
        return specs(read(None, **given))[-1].augment

    assert view() == "center"
    assert view(resize=256) == view(crop=224) == ResizeCrop(256, 224) and view(resize=384, crop=256) == (384, 256)
    assert all(spec.augment != ResizeCrop() for spec in specs(read(None, resize=256))[:-1]), "training is as it was"
    with pytest.raises(ValueError, match="give 1 ≤ crop ≤ resize"):
        read(None, resize=200)


def test_a_model_keeps_the_view_of_its_evaluation_or_of_training_without_crops(read: Callable[..., Config]) -> None:
    def view(augment: str, **given: int) -> Any:
        raw = read(None, **given).model_dump(mode="json", by_alias=True, exclude_unset=True)
        raw["phases"][-1]["data"]["augment"] = augment
        phase = Config.model_validate_json(json.dumps(raw)).phases[-1]
        told = {} if phase.view is None else {"view": view_in_words(phase.view)}
        assert phase.view == (view_from(told["view"]) if told else None)
        return phase.view

    assert view("none") == view("center") == "center" and view("random_resized_crop") is None
    assert view("none", resize=384, crop=256) == view("inception_crop", resize=384, crop=256) == ResizeCrop(384, 256)
    for odd in (
        {"view": "none"}, {"view": "resize-crop", "resize": 1, "crop": 2}, {"resize": 2, "crop": 1},
        {"view": "resize-crop", "resize": math.inf, "crop": 224},
    ):  # fmt: skip
        with pytest.raises((ValueError, KeyError), match=r"view|crop|resize"):
            view_from(odd)


def test_the_view_shapes_a_phase_that_ends_at_a_plateau_of_it(read: Callable[..., Config]) -> None:
    def digest(**given: int) -> str:
        raw = read(None, **given).model_dump(mode="json", by_alias=True, exclude_unset=True)
        raw["phases"][1]["plateau"] = {"patience": 2}
        return Config.model_validate_json(json.dumps(raw)).digest(1, {"data": "d"})

    assert read(None).digest(1, {}) == read(None, resize=256).digest(1, {}), "where it decides nothing"
    assert len({digest(), digest(resize=256), digest(resize=384, crop=256)}) == 3


def test_the_command_takes_a_word_where_the_files_say_nothing(tmp_path: Path, capsys: Any) -> None:
    vit = timm.create_model("vit_base_patch16_224", **SIZES, num_classes=5)
    save_for_hf(moved(vit), tmp_path / "vit", model_args=SIZES)
    told = json.loads((tmp_path / "vit" / "config.json").read_text())
    told["pretrained_cfg"] = {"num_classes": 5}
    (tmp_path / "vit" / "config.json").write_text(json.dumps(told))
    folder = class_folders(tmp_path / "set", 2)
    asked = ["classify", tmp_path / "vit", "--public", "--data", folder]
    assert evaluate(*asked, "--out", tmp_path / "refused") == 2
    assert "set --pixels to what their model card says" in capsys.readouterr().err
    rows = []
    for name, word in {
        "named": "half",
        "spelt": '{"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}',
        "other": "imagenet",
    }.items():
        assert evaluate(*asked, "--pixels", word, "--out", tmp_path / name) == 0
        rows.append((tmp_path / name / "predictions.csv").read_text())
    assert rows[0] == rows[1] != rows[2]
