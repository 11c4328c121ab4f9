"""Right answers on public held-out records: exact over ranks, with and without captions, and refused where none is."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.data.index.folders import FolderIndex, build_folder
from murmuration.data.text.encoder import TextEncoder
from murmuration.model.build import build
from murmuration.model.captioner import Captioner
from murmuration.model.classifier import Classifier
from murmuration.train.config.load import load
from murmuration.train.config.phase import Features
from murmuration.train.config.root import Config
from murmuration.train.config.section import RecipeError
from murmuration.train.public.evaluation import PublicEvaluator
from murmuration.train.recipe.ready_phase import ReadyPhase, prepare
from murmuration.train.run.cached_features import held_out_features
from murmuration.train.run.phase import StillEngine
from murmuration.train.run.report_pictures import SAMPLES, first_usable
from tests.support.config_base import put
from tests.support.evaluation_world import COLOURS, class_folders, class_list, shards, tokenizer
from tests.support.features_world import Stop
from tests.support.train_helpers import on_ranks

EACH = 5
BROKEN = ["blue/000.png", "blue/001.png", "red/004.png"]
TRANSFORMER = {"image_size": 16, "patch_size": 8, "width": 16, "depth": 1, "heads": 2}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of which three pictures are broken, and none is whole in `broken`; shards; right classes."""
    root = tmp_path_factory.mktemp("accuracy")
    for name, broken in (("held", BROKEN), ("broken", [f"{c}/{n:03}.png" for c in COLOURS for n in range(EACH)])):
        class_folders(root / name, EACH)
        for file in broken:
            (root / name / file).write_bytes(b"no picture")
        build_folder(root / name)
    class_folders(root / "loose" / "deep", 1)
    build_folder(root / "loose", rule="none")
    shards(root / "captioned", 20)
    shards(root / "bare", 20, captions=False)
    tokenizer(root)
    class_list(root)
    names = list(COLOURS)
    right = {f"{c}/{n:03}": [c, names[n]] if n else [] for c in COLOURS for n in range(EACH)}
    (root / "right.json").write_text(json.dumps(right))
    (root / "foreign.json").write_text(json.dumps({"elsewhere": [0]}))
    (root / "names.json").write_text(json.dumps({c: [f"{c} square", c] for c in COLOURS}))
    return root


def config_of(world: Path, objective: str, evaluation: dict[str, Any], **more: Any) -> Config:
    """A phase that only measures; paths are names in the world."""
    model = TRANSFORMER | {"family": "classifier", "classes": 8, "head_scale": 1.0}
    if objective != "classify":
        model = TRANSFORMER | {
            "family": "captioner", "decoder_depth": 1, "text_length": 12, "vocabulary": 16, "mae_decoder_width": 16,
            "mae_decoder_depth": 1, "mae_decoder_heads": 2,
        }  # fmt: skip
    data = {"source": "held-out"} | ({"tokenizer": "tokenizer.json"} if objective == "caption" else {})
    phase = {"name": "measured", "data": data, "objective": objective, "evaluation": {"public": True} | evaluation}
    raw = {"train_micro_batch_size_per_gpu": 4, "model": model, "phases": [phase], "run": more}
    (world / "config.json").write_text(json.dumps(raw))
    return load(world / "config.json", [])


def ready(world: Path, objective: str, evaluation: dict[str, Any]) -> ReadyPhase:
    return prepare(config_of(world, objective, evaluation))[0]


def model_of(phase: ReadyPhase) -> Any:
    return build(phase.shape, phase.settings.objective).eval()


def measured(phase: ReadyPhase, model: Any, ranks: int = 1, micro_batch: int = 4) -> dict[str, float]:
    def act(one: Any) -> tuple[dict[str, float], str | None]:
        # A model of its own, as a process has: the head's outputs are heard where they are made.
        engine: Any = StillEngine(copy.deepcopy(model), torch.device("cpu"))
        evaluator = PublicEvaluator(phase, engine, one, micro_batch, b"m" * 32)
        return evaluator.measure(), evaluator.news_of_unusable()

    found = on_ranks(ranks, act)
    assert all(each == found[0] for each in found)
    assert phase.measured is not None and list(found[0][0]) == phase.measured.metrics()
    return found[0][0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_stored_features_of_held_out_records_give_the_same_answers(world: Path, tmp_path: Path, ranks: int) -> None:
    phase = ready(world, "classify", {"path": "held", "records": 25})
    model, said = model_of(phase), list[str]()
    kept = {"features": Features(folder=str(tmp_path))}
    keeping = replace(phase, settings=phase.settings.model_copy(update=kept))

    def act(one: Any) -> tuple[dict[str, float], str | None]:
        run: Any = SimpleNamespace(
            ranks=one, stop=Stop(), board=SimpleNamespace(say=said.append),
            config=SimpleNamespace(
                run=SimpleNamespace(precision="fp32"), micro_batch=4, phases=[keeping.settings],
            ),
        )  # fmt: skip
        own = copy.deepcopy(model)
        stored = held_out_features(run, keeping, own)
        engine: Any = StillEngine(own, torch.device("cpu"))
        evaluator = PublicEvaluator(keeping, engine, one, 4, b"m" * 32, stored=stored)
        return evaluator.measure(), evaluator.news_of_unusable()

    expected = measured(phase, model)
    for computed in (25, 0):
        found, news = on_ranks(ranks, act)[0]
        assert found == pytest.approx(expected, rel=1e-5) and f"; {computed} to be computed" in said[-1]
        assert news is not None and news.startswith("3 of 25 public held-out records cannot be measured")
    other = ready(world, "classify", {"path": "held", "records": 24})
    keeping = replace(other, settings=other.settings.model_copy(update=kept))
    on_ranks(ranks, act)
    assert "; 24 to be computed" in said[-1]
    keeping = replace(phase, settings=phase.settings.model_copy(update=kept))
    on_ranks(ranks, act)
    assert "; 0 to be computed" in said[-1], "both are kept"


def usable(phase: ReadyPhase, spec: DataSpec, text: TextEncoder | None = None) -> list[tuple[int, Any]]:
    """The records one at a time, as the reader gives them."""
    assert phase.held_out is not None
    with_text = BatchReader(phase.held_out, spec, text)
    single = [(record, with_text.read(np.array([record]), 0)) for record in range(phase.held_out.records)]
    return [(record, batch.inputs) for record, batch in single if bool(batch.present.all())]


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 4), (2, 4), (3, 5), (3, 64)])
def test_a_classifiers_shares_are_those_of_a_loop_over_single_records(
    world: Path, ranks: int, micro_batch: int
) -> None:
    """Ranks have unequal numbers of records, some of them unusable, and rows of padding."""
    phase = ready(world, "classify", {"path": "held", "real": "right.json"})
    model: Classifier = model_of(phase)
    right = json.loads((world / "right.json").read_text())
    names, losses, places, real = sorted(COLOURS), [], [], []
    records = usable(phase, DataSpec(16, augment="center", labels=("cls",), target="cls", classes=5))
    assert len(records) == 25 - len(BROKEN)
    with torch.no_grad():
        # Five of the eight outputs know one picture of their class, so that some answers are right and some are not.
        for number in range(5):
            known = model.features(next(inputs["images"] for record, inputs in records if record // EACH == number))[0]
            model.head.weight[number], model.head.bias[number] = known, -0.5 * known.square().sum()
        for record, inputs in records:
            (scores,), label = model.logits(inputs["images"]), int(inputs["labels"])
            losses.append(float(F.cross_entropy(scores[None], inputs["labels"])))
            places.append(sorted(range(8), key=lambda c, scores=scores: -float(scores[c])).index(label))
            asked = right[f"{names[record // EACH]}/{record % EACH:03}"]
            real += [int(scores.argmax()) in map(names.index, asked)] if asked else []
    found = measured(phase, model, ranks, micro_batch)
    assert found["top_1"] == sum(place == 0 for place in places) / 22
    assert found["top_5"] == sum(place < 5 for place in places) / 22
    assert found["real"] == sum(real) / len(real)
    assert found["public_loss"] == pytest.approx(sum(losses) / 22, rel=1e-6)
    assert len({found["top_1"], found["top_5"], found["real"], 0.0}) == 4, found


def by_hand(model: Captioner, images: torch.Tensor, text: TextEncoder, name: str) -> float:
    """The mean cross-entropy of the tokens of "a photo of a NAME"."""
    ids = torch.tensor([[text.start, *text.words(f"a photo of a {name}")]])
    logits = model.decode(model.encode_images(images), ids[:, :-1])
    return float(F.cross_entropy(logits[0], ids[0, 1:]))


@pytest.mark.parametrize("names", [None, "names.json"])
def test_a_captioner_names_class_folders_that_have_no_captions(world: Path, names: str | None) -> None:
    zero_shot = {} if names is None else {"zero_shot": {"class_names": names}}
    phase = ready(world, "caption", {"path": "held", **zero_shot})
    model: Captioner = model_of(phase)
    text = phase.text
    assert text is not None
    classes = sorted(COLOURS)
    asked = {c: [c] for c in classes} if names is None else json.loads((world / names).read_text())
    right = 0
    with torch.no_grad():
        records = usable(phase, DataSpec(16, augment="center"))
        for record, inputs in records:
            scores = [min(by_hand(model, inputs["images"], text, name) for name in asked[c]) for c in classes]
            right += scores.index(min(scores)) == record // EACH
    for ranks in (1, 2):
        assert measured(phase, model, ranks) == {"top_1": right / 22, "top_5": 1.0}
    assert 0 < right < 22


def test_shards_without_captions_are_asked_for_their_labels_alone(world: Path) -> None:
    axes = {"zero_shot": {"axes": {"colour": list(COLOURS)}}}
    bare, captioned = (ready(world, "caption", {"path": name, **axes}) for name in ("bare", "captioned"))
    model = model_of(bare)
    found = measured(bare, model)
    assert list(found) == ["zero_shot_colour"]
    assert measured(captioned, model)["zero_shot_colour"] == found["zero_shot_colour"], "of the same pictures"
    assert list(measured(captioned, model)) == ["public_loss", "zero_shot_colour"]


def test_records_that_cannot_be_measured_are_counted_once(world: Path) -> None:
    phase = ready(world, "classify", {"path": "held"})

    def act(one: Any) -> list[str | None]:
        engine: Any = StillEngine(model_of(phase), torch.device("cpu"))
        evaluator = PublicEvaluator(phase, engine, one, 4, b"m" * 32)
        told = []
        for _ in range(2):
            evaluator.measure()
            told.append(evaluator.news_of_unusable())
        return told

    for first, again in on_ranks(2, act):
        assert first is not None and first.startswith("3 of 25 public held-out records cannot be measured (")
        assert again is None


FOLDER = {"path": "held"}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("classify", {"path": "broken"}, r"phases\.0\.evaluation\.path: none of the 25 records can be measured"),
    ("caption", {"path": "broken"}, r"none of the 25 records can be measured \(.*not an image"),
    ("mae", {"path": "broken"}, "none of the 25 records can be measured"),
    ("caption", {"path": "bare"}, r"no record of \S*bare has a caption \(\.txt, or "),
    ("caption", {"path": "loose"}, r"none of the 5 records can be measured \(they have neither captions nor class"),
    ("classify", {"path": "loose"}, r"evaluation\.path: \S*loose has no class folders, but the label is 'cls'"),
    ("caption", {"path": "captioned", "zero_shot": {}}, r"evaluation\.zero_shot scores class folders, and these"),
    ("caption", {"path": "captioned", "zero_shot": {"axes": {"shade": ["red"]}}}, 'record .* field "shade" .*colour'),
    ("caption", {"path": "captioned", "zero_shot": {"axes": {"colour": ["mauve"]}}}, "does not know 'mauve';"),
    ("caption", {**FOLDER, "zero_shot": {"prompt": "a photo of a a a a a a a a"}}, "the model reads 12; shorten"),
    ("caption", {**FOLDER, "zero_shot": {"class_names": "right.json"}}, "class_names .* has nothing for the class"),
    ("classify", {**FOLDER, "real": "foreign.json"}, r"foreign\.json has right classes for none of them"),
    ("classify", {**FOLDER, "real": "names.json"}, "the labels of .* are no list of classes"),
    ("caption", {"path": "captioned", "real": "right.json"}, r"evaluation\.real has right classes, but no class of"),
]  # fmt: skip


@pytest.mark.parametrize(("objective", "evaluation", "message"), REFUSED)
def test_what_cannot_be_measured_is_refused_before_anything_is_started(
    world: Path, objective: str, evaluation: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message) as refused:
        ready(world, objective, evaluation)
    assert "\n" not in str(refused.value)


def test_a_plateau_of_a_loss_that_is_not_measured_is_refused(world: Path) -> None:
    phase: dict[str, Any] = {
        "name": "public", "objective": "caption", "batch": 2, "schedule": {"peak": 0.1}, "steps": 1,
        "data": {"source": "synthetic", "kind": "shapes", "records": 8, "tokenizer": "tokenizer.json"},
        "evaluation": {"path": "held", "public": True}, "plateau": {},
    }  # fmt: skip
    config_of(world, "caption", {"path": "held"})
    raw = json.loads((world / "config.json").read_text()) | {"phases": [phase]}
    (world / "config.json").write_text(json.dumps(raw))
    with pytest.raises(RecipeError, match="no captions, so no public loss is measured, at whose plateau"):
        prepare(load(world / "config.json", []))


def test_a_set_that_is_sorted_by_class_is_measured_in_every_class(world: Path) -> None:
    held = ready(world, "classify", {"path": "held", "records": 10}).measured
    assert held is not None and isinstance(held.whole, FolderIndex)
    assert held.ids.tolist() == [0, 2, 5, 7, 10, 12, 15, 17, 20, 22]
    shard = ready(world, "caption", {"path": "captioned", "records": 10}).measured
    assert shard is not None and shard.ids.tolist() == list(range(10)), "shards are measured from their beginning"
    every = ready(world, "classify", {"path": "held"}).measured
    assert every is not None and every.ids.tolist() == list(range(25))


def test_the_report_shows_the_first_pictures_that_can_be_read(world: Path) -> None:
    held = ready(world, "caption", {"path": "held"}).measured
    assert held is not None
    found = first_usable(held)
    assert len(found["images"]) == SAMPLES and found["labels"].tolist() == [0] * 3 + [1] * 5 + [2] * 4


@pytest.mark.parametrize(
    ("objective", "path", "wanted", "known"),
    [
        ("classify", "held", "zero_shot_colour", "public_loss, top_1, top_5"),
        ("caption", "held", "public_loss", "top_1, top_5"), ("caption", "captioned", "accuracy", "public_loss"),
    ],
)  # fmt: skip
def test_a_choice_by_what_no_phase_measures_is_refused(
    world: Path, objective: str, path: str, wanted: str, known: str
) -> None:
    prepare(config_of(world, objective, {"path": path}, keep_best=known.split(", ")[-1]))
    with pytest.raises(RecipeError, match=f"keep_best = .*: no phase measures that; name one of {known}"):
        prepare(config_of(world, objective, {"path": path}, keep_best=wanted))


def test_accuracy_is_top_1(world: Path) -> None:
    config = config_of(world, "classify", {"path": "held"}, keep_best="accuracy")
    assert config.run.keep_best == "top_1" and prepare(config)


def test_what_else_is_measured_leaves_the_digest_of_a_phase_that_ends_by_its_loss(
    loaded: Callable[..., Config],
) -> None:
    """Older runs, whose configs did not have these keys, go on."""

    def digest(key: str, value: Any) -> str:
        plain = [put("phases.1.plateau", {}), put("phases.1.evaluation.zero_shot", {})]
        return loaded(*plain, put(f"phases.1.evaluation.{key}", value)).digest(1, {})

    before = digest("records", 512)
    assert digest("real", "x.json") == before == digest("zero_shot", {"class_names": "x.json"})
    assert digest("records", 9) != before, "these decide when the phase ends"
