"""What recipes and library tell the ledger of a private phase before its first step; of a finished run, nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from murmuration.accounting.ledger.lines import Origin
from murmuration.accounting.plan import PrivacyPlan
from murmuration.train.engines.choose import start_ranks
from murmuration.train.storage.checkpoint import Keep
from murmuration.train.storage.open_run import OpenRun, open_run
from murmuration.train.storage.run_dir import RunDir
from murmuration.train.storage.sibling_runs import RunLog
from tests.support.acc_world import PLAN, train

EARLIER = Origin("earlier", "0" * 64, 1.0, 1e-4, ("digest of its records",))


def test_the_plan_and_all_words_are_declared_once(tmp_path: Path) -> None:
    def declared() -> OpenRun:
        run = open_run(RunDir(tmp_path), "run", start_ranks("local"), Keep(2), {}, record_digests="hmac-sha256")
        plan = run.declare(
            0, "private", lambda known: known or PLAN, RunLog(()), "digest", without_noise=["used before"],
            origins=[EARLIER], public={"evaluation": "held out"}, stores=["store.example"],
            words=["keep_key", "witness", "private_curves"],
        )  # fmt: skip
        assert plan == PLAN
        return run

    run = declared()
    told = [(entry.kind, entry.fields) for entry in run.writer.ledger.entries.acts]
    run.writer.ledger.close()
    again = declared()
    assert [(entry.kind, entry.fields) for entry in again.writer.ledger.entries.acts] == told, "what is known"
    history = again.writer.history
    assert history.plans == {0: PLAN} and history.origins == [EARLIER]
    assert history.words == {"keep_key", "witness", "private_curves"}
    lines = [str(fields) for _, fields in told]
    for part in ("used before", "held out", "store.example"):
        assert any(part in line for line in lines), part
    again.writer.begin_segment(0, "config", "digest", 0, "first")
    train(again.writer, range(1, 3))
    again.writer.finish()
    length = again.writer.ledger.length

    def other(known: PrivacyPlan | None) -> PrivacyPlan:
        assert known == PLAN
        return replace(known)

    again.declare(0, "private", other, RunLog(()), "digest", stores=["another.example"], words=["witness"])
    assert again.writer.ledger.length == length, "a finished run has nothing to add"
    again.writer.ledger.close()
