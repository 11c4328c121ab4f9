"""From a config to data and plans: what is opened, what does not fit, and what a plan may promise."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from murmuration.accounting import make_plan
from murmuration.accounting.ledger.chain import Ledger
from murmuration.accounting.ledger.journal import Journal
from murmuration.data.text.encoder import word_tokenizer
from murmuration.train.config.root import Config
from murmuration.train.recipe import ready_phase
from murmuration.train.recipe.ready_phase import RecipeError, plan_of_phase, planned_epsilon, prepare
from tests.support.config_base import Change, drop, put
from tests.support.texture_samples import texture_samples
from tests.support.train_helpers import plan_for


@pytest.fixture
def real(tmp_path: Path, loaded: Callable[..., Config]) -> Callable[..., Config]:
    """The base with real (tiny) shards and a tokenizer."""
    from murmuration.data.index.shard_index import build
    from murmuration.data.synthetic.index import shape_samples, write_shards
    from murmuration.data.synthetic.shapes import GRAMMAR_WORDS

    for name, samples in (
        ("warm", texture_samples(1, 16, 32)), ("private", shape_samples(2, 40, 32)),
        ("held", shape_samples(3, 8, 32, labels=True)),
    ):  # fmt: skip
        write_shards(tmp_path / name, samples, 20)
        build(tmp_path / name)
    word_tokenizer(GRAMMAR_WORDS, tmp_path / "tokenizer.json")
    return lambda *changes: loaded(put("phases.1.data.expected_records", 40), *changes)


def test_phases_open_their_data(real: Callable[..., Config]) -> None:
    warm, private = prepare(real())
    assert (warm.index.records, private.index.records, private.private) == (16, 40, True)
    assert private.text is not None and set(private.contents()) == {"data", "decoder", "pixels", "tokenizer"}
    assert set(warm.contents()) == {"data", "decoder", "pixels"} and warm.held_out is None


def test_another_decoder_is_another_phase(real: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels may differ between two of them, and a step that is made again must not."""
    config = real()
    known = config.digest(1, prepare(config)[1].contents())
    assert known == config.digest(1, prepare(config)[1].contents())
    monkeypatch.setattr(ready_phase, "DECODER", "Pillow 99")
    assert known != config.digest(1, prepare(config)[1].contents())


@pytest.mark.rest
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([put("phases.1.data.expected_records", 400)], "is 400, but the index has 40 records, more than 1 % off"),
        ([put("phases.1.data.tokenizer", "nothing.json")], r"phases.1.data.tokenizer: .*no tokenizer here"),
        ([put("model.vocabulary", 8)], r"more than model.vocabulary = 8; set model.vocabulary to at least"),
        ([put("phases.1.evaluation.path", "private")], r"phases.1.evaluation.path: .* belongs to the private records"),
        ([put("phases.0.evaluation", {"path": "private", "public": True})],
         r"0.evaluation.path: .* belongs to the private records"),
        ([put("phases.0.data.path", "private")], r"phases.0.data.path: .* belongs to the private records of phase"),
        ([drop("phases.1.privacy"), put("phases.1.batch", 4), put("phases.1.evaluation.path", "private")],
         "belongs to the records of phase 'private', which are not declared public"),
        ([drop("phases.1.privacy"), put("phases.1.batch", 4),
          put("phases.1.monitor", {"path": "private", "public": True})],
         r"phases.1.monitor.path: .* which are not declared public"),
        ([put("phases.0.batch", 17)], "phases.0.batch = 17 exceeds the 16 records"),
    ],
)  # fmt: skip
def test_data_that_do_not_fit_are_refused(real: Callable[..., Config], changes: list[Change], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        prepare(real(*changes))


def test_a_resumed_plan_takes_its_sigma_from_the_ledger_unless_something_changed(
    loaded: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_plan, "calibrate_sigma", lambda *_, **__: 7.5)
    phase = loaded(put("phases.1.privacy.noise_multiplier", None)).phases[1]
    assert phase.privacy is not None
    first = plan_of_phase(phase, phase.privacy, 40, "phases.1")
    assert first.noise_multiplier == 7.5 and first.delta == 1 / 80 and first.divisor == pytest.approx(20)
    known = dataclasses.replace(first, noise_multiplier=8.5)
    assert plan_of_phase(phase, phase.privacy, 40, "p", known).noise_multiplier == 8.5
    longer = phase.model_copy(update={"steps": 6})
    assert plan_of_phase(longer, phase.privacy, 40, "p", known).noise_multiplier == 7.5


def test_exact_noise_has_as_much_more_as_its_grid_takes(loaded: Callable[..., Config]) -> None:
    phase = loaded(put("phases.1.privacy.noise_multiplier", None)).phases[1]
    assert phase.privacy is not None
    plain, exact = (plan_of_phase(phase, phase.privacy, 40, "phases.1", noise=kind) for kind in ("aes", "exact"))
    assert (plain.noise.growth, exact.noise.growth) == (0.0, 1e-6)
    assert 0 < exact.noise_multiplier - plain.noise_multiplier < 2.1e-5
    assert planned_epsilon(exact) <= exact.epsilon_budget


def test_captions_are_not_looked_for_in_single_images(loaded: Callable[..., Config], single_images: Path) -> None:
    change = [put("phases.0.data.path", str(single_images)), put("phases.0.batch", 2)]
    change.append(put("phases.1.data.expected_records", 3))
    config = loaded(*change, put("phases.1.data.path", str(single_images)))
    with pytest.raises(RecipeError, match=r"phases.1.data.path has single images, which have no captions"):
        prepare(config)


def trained_before(folder: Path, manifest_digest: str, debug: bool = False) -> Change:
    """Weights of an earlier run that protected those records, and a phase that starts from them."""
    folder.mkdir()
    journal = Journal(Ledger.open(folder / "ledger.jsonl"))
    journal.start_run("earlier", "check", debug, {}, "hmac-sha256", "signer")
    journal.declare_plan(0, "before", plan_for(), {"accountant": "pld"})
    journal.begin_segment(0, "config", manifest_digest, 0, "first")
    journal.ledger.close()
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    (folder / "export.json").write_text(json.dumps({"objective": "mae", "shapes": {}}))
    start = {"name": "start", "data": {"source": "checkpoint", "path": str(folder), "public": True}}
    return lambda raw: raw["phases"].insert(0, start)


def test_weights_that_saw_the_protected_records_or_broke_their_promise_are_refused(
    real: Callable[..., Config], tmp_path: Path
) -> None:
    _, private = prepare(real())
    digest = private.index.manifest_digest
    change = trained_before(tmp_path / "same", digest)
    with pytest.raises(RecipeError, match=r"same was trained on the private records of phase 'private'"):
        prepare(real(change))
    start, *_ = prepare(real(trained_before(tmp_path / "others", "other records")))
    assert start.start is not None and start.start.protected == {"other records"} and start.start.undeclared is None
    with pytest.raises(RecipeError, match=r"come from a run that says 'NOT PRIVATE \(debug\)"):
        prepare(real(trained_before(tmp_path / "debug", "other records", debug=True)))
