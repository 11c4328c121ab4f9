"""A list of excluded records is a function of private records, so no constant and no draw of a run depends on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from murmuration.accounting.plan import PrivacyPlan
from murmuration.data.batch.loader import Loader
from murmuration.data.batch.reader import BatchReader
from murmuration.data.draw.poisson import PoissonSampler
from murmuration.data.index.exclusions import FACTS, IDS, Exclusions
from murmuration.data.index.shard_index import ShardIndex, build
from murmuration.data.store.place import Place
from murmuration.data.store.stored import LocalFiles
from murmuration.data.synthetic.index import shape_samples, write_shards
from murmuration.model.build import build as build_model
from murmuration.train.clip.engine import clipped_totals
from murmuration.train.clip.reference import ReferenceClip
from murmuration.train.clip.rule import ClipRule
from murmuration.train.config.load import load
from murmuration.train.config.root import Config
from murmuration.train.recipe.read_options import agree
from murmuration.train.recipe.ready_phase import ReadyPhase, plan_of_phase, prepare
from tests.support.train_helpers import Disagreement, on_ranks

ROOT = Path(__file__).resolve().parents[2]
RECORDS, EXCLUDED, KEY = 40, [0, 7, 8, 31, 39], b"k" * 32


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    write_shards(tmp_path / "shards", shape_samples(2, RECORDS, 32), 10)
    build(tmp_path / "shards")
    return tmp_path / "shards"


def exclude(shards: Path, ids: list[int]) -> None:
    whole = ShardIndex.open(shards, excluded="ignored")
    Exclusions(whole.manifest_digest, np.array(ids, dtype=np.uint64), ("public",), 4, "test").write(whole.folder)


def config_of(tmp_path: Path, shards: Path, **phase: Any) -> Config:
    base = json.loads((ROOT / "ds_configs" / "demo.json").read_text())
    del base["$schema"]
    base["model"] |= {
        "image_size": 32, "patch_size": 8, "width": 16, "depth": 1, "heads": 2, "decoder_width": 16,
        "decoder_depth": 1, "decoder_heads": 2, "mae_decoder_width": 16, "mae_decoder_heads": 2,
    }  # fmt: skip
    private = base["phases"][1]
    private.pop("evaluation")
    private |= {"data": {"path": str(shards)}, "objective": "mae", "schedule": {"peak": 0.1}, "steps": 3}
    private["privacy"] = {"epsilon": 8.0, "expected_batch": 20, "noise_multiplier": 1.0}
    base["phases"] = [private | phase]
    (tmp_path / "config.json").write_text(json.dumps(base))
    return load(tmp_path / "config.json", [])


def ready(tmp_path: Path, shards: Path, **phase: Any) -> ReadyPhase:
    return prepare(config_of(tmp_path, shards, **phase))[0]


def plan_of(phase: ReadyPhase) -> PrivacyPlan:
    assert phase.settings.privacy is not None
    return plan_of_phase(phase.settings, phase.index.records, "phases.0")


class Noting(LocalFiles):
    """Remembers every stretch that was read."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[tuple[Place, int, int]] = []

    def read(self, place: Place, start: int, end: int) -> bytes:
        self.places.append((place, start, end))
        return super().read(place, start, end)


def test_plan_and_steps_are_the_same_whatever_is_excluded(tmp_path: Path, shards: Path) -> None:
    """n, q, delta = 1/(2n), the divisor, and a number of steps that is counted in epochs."""
    endings: list[dict[str, Any]] = [{}, {"steps": 0, "epochs": 2.5}]
    before = [ready(tmp_path, shards, **ending) for ending in endings]
    exclude(shards, EXCLUDED)
    after = [ready(tmp_path, shards, **ending) for ending in endings]
    for one, other in zip(before, after, strict=True):
        assert plan_of(one) == plan_of(other) and plan_of(one).records == RECORDS
        assert one.settings.steps == other.settings.steps
        assert one.index.manifest_digest == other.index.manifest_digest


def test_what_was_cut_in_two_is_cut_alike(tmp_path: Path, shards: Path) -> None:
    part = {"path": str(shards), "public_fraction": 0.3}
    before = ready(tmp_path, shards, data=part).index
    exclude(shards, EXCLUDED)
    after = ready(tmp_path, shards, data=part).index
    assert after.records == before.records
    assert [after.locate(record) for record in range(after.records)] == [
        before.locate(record) for record in range(before.records)
    ]
    whole = ShardIndex.open(shards, excluded="ignored")
    gone = {whole.locate(record) for record in EXCLUDED}
    assert [after.left_out(record) for record in range(after.records)] == [
        after.locate(record) in gone for record in range(after.records)
    ]
    assert any(after.left_out(record) for record in range(after.records))


def sums(
    phase: ReadyPhase, source: Noting, leave: set[int]
) -> Iterator[tuple[str, list[int], dict[str, torch.Tensor]]]:
    """Draw and clipped sum of three steps; records of `leave` are taken out by hand."""
    model = build_model(phase.shape, "mae")
    clip = ReferenceClip(ClipRule("flat", 0.5, 0.0))
    reader = BatchReader(phase.index, phase.data_spec(augment=True), augment_key=KEY, mask_key=KEY, source=source)
    loader = Loader(reader, PoissonSampler(KEY, KEY, phase.index.records, 1 << 31), 0, 1, 8, last=3)
    for step in (1, 2, 3):
        draw, batches = loader.step(step)
        rows = np.resize(np.append(draw.ids, [-1] * 8), (-(-len(draw.ids) // 8), 8))
        totals: dict[str, torch.Tensor] = {}
        for row, batch in zip(rows, batches, strict=True):
            present = batch.present & torch.tensor([number not in leave for number in row.tolist()])
            for name, part in clipped_totals(clip, model, batch.inputs, present)[0].items():
                totals[name] = totals.get(name, torch.zeros_like(part)) + part
        yield draw.digest, draw.ids.tolist(), totals
    loader.close()
    assert not reader.bad_records, "an excluded record is no bad one"


def test_the_same_records_are_drawn_and_excluded_ones_add_exactly_nothing(tmp_path: Path, shards: Path) -> None:
    """Against the whole set with those records taken out by hand, bit by bit; and none of their bytes is read."""
    torch.manual_seed(1)
    everybody = list(sums(ready(tmp_path, shards), Noting(), set()))
    torch.manual_seed(1)
    expected = list(sums(ready(tmp_path, shards), Noting(), set(EXCLUDED)))
    exclude(shards, EXCLUDED)
    torch.manual_seed(1)
    source = Noting()
    found = list(sums(ready(tmp_path, shards), source, set()))
    assert [part[:2] for part in found] == [part[:2] for part in expected] == [part[:2] for part in everybody]
    drawn = {record for _, ids, _ in found for record in ids}
    assert drawn & set(EXCLUDED), "some of them were drawn"
    for (_, _, ours), (_, _, theirs) in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any(
        not torch.equal(one, other) for one, other in zip(found[0][2].values(), everybody[0][2].values(), strict=True)
    )
    whole = ShardIndex.open(shards, excluded="ignored")
    assert {whole.locate(record) for record in drawn - set(EXCLUDED)} == set(source.places)


def test_another_list_is_another_phase_and_no_list_is_none(tmp_path: Path, shards: Path) -> None:
    """By the digest that a resume is held to; removing the list gives the first one back."""
    config = config_of(tmp_path, shards)
    digests = [config.digest(0, prepare(config)[0].contents())]
    for ids in (EXCLUDED, [3], []):
        exclude(shards, ids)
        digests.append(config.digest(0, prepare(config)[0].contents()))
    for name in (IDS, FACTS):
        (shards / "index" / name).unlink()
    digests.append(config.digest(0, prepare(config)[0].contents()))
    assert len(set(digests)) == 3 and digests[0] == digests[3] == digests[4]


def test_ranks_with_different_lists_are_refused(tmp_path: Path, shards: Path) -> None:
    one = ready(tmp_path, shards)
    exclude(shards, EXCLUDED)
    phases = [one, ready(tmp_path, shards)]
    with pytest.raises(Disagreement, match="list of excluded records"):
        on_ranks(2, lambda ranks: agree([phases[ranks.rank]], ranks))


def test_public_epochs_skip_what_is_excluded(tmp_path: Path, shards: Path) -> None:
    exclude(shards, EXCLUDED)
    data = {"path": str(shards), "public": True}
    public = ready(tmp_path, shards, privacy=None, batch=5, data=data, steps=0, epochs=2)
    assert public.index.records == RECORDS - len(EXCLUDED) and public.settings.steps == 14
    assert not any(public.index.left_out(record) for record in range(public.index.records))
    twin = ready(tmp_path, shards, privacy=None, batch=5, steps=0, epochs=2)
    assert (twin.index.records, twin.settings.steps) == (RECORDS, 16), "a twin of a private phase counts as it does"
