"""`launch/account.py` as a user runs it: numbers, JSON, exit codes, one sentence for every refusal, and no torch."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from murmuration.accounting.banded import MOST_BANDS, best_banded
from murmuration.accounting.cli.compare import BANDS
from murmuration.accounting.cli.main import main
from murmuration.accounting.epsilon.accountant import epsilon
from murmuration.accounting.epsilon.gaussian import gaussian_epsilon
from murmuration.accounting.event import Event
from tests.support.acc_world import certified, rewritten, whole_run

ROOT = Path(__file__).resolve().parents[2]
VIP = "--n 233000000 --batch 98304 --steps 6000 --delta 2.145922746781116e-09"
SMALL = "--n 2000 --batch 40 --steps 4 --delta 1e-4"


def account(arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launch" / "account.py"), *arguments.split()]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300)


def here(arguments: str) -> subprocess.CompletedProcess[str]:
    """The same without a new process: imports and discretisations are shared."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments.split())
        except SystemExit as stop:
            code = int(stop.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def answer(arguments: str) -> dict:
    done = here(arguments + " --json")
    assert done.returncode == json.loads(done.stdout).get("exit_code", 0), done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    certified(whole_run(tmp_path))
    return tmp_path


def test_what_is_printed_is_rounded_to_the_safe_side(run_dir: Path) -> None:
    """`:g` and `.6f` round to the nearest."""
    small = "--n 2000 --batch 40 --steps 4 --delta 1.23456789e-4 --sigma 1"

    def printed(command: str, pattern: str) -> float:
        found = re.search(pattern, here(command).stdout)
        assert found, here(command)
        return float(found[1])

    for at in (0.1, 0.2, 0.3, 0.4):
        exact = answer(f"epsilon {small} --at-epsilon {at}")["delta_at_epsilon"]
        assert exact <= printed(f"epsilon {small} --at-epsilon {at}", r"δ = (\S+) at ε") <= 1.002 * exact
    assert printed(f"epsilon {small}", r"δ = (\S+);") == 1.23457e-4
    assert printed("explain --epsilon 115.09461 --delta 1e-6", r"epsilon = (\S+);") == 115.0947
    for steps in (3, 4, 5, 6):
        exact = answer(f"calibrate --n 2000 --batch 40 --steps {steps} --epsilon 2")["epsilon"]
        assert exact <= printed(f"calibrate --n 2000 --batch 40 --steps {steps} --epsilon 2", r"ε = (\S+) ≤") <= 2
    exact = answer(f"verify {run_dir}")["epsilon"]
    assert exact <= printed(f"verify {run_dir}", r"ε = (\S+) of 2 at") <= exact + 1e-6


def test_the_commands_that_were_promised(tmp_path: Path) -> None:
    rdp = answer(f"epsilon {VIP} --sigma 0.48 --accountant rdp")
    pld = answer(f"epsilon {VIP} --sigma 0.48 --accountant pld")
    assert abs(rdp["epsilon"] - 7.996) < 1e-3 and abs(pld["epsilon"] - 6.83) < 1e-2
    sigma = answer(f"calibrate {VIP} --epsilon 8 --accountant rdp")["sigma"]
    assert answer(f"epsilon {VIP} --sigma {sigma!r} --accountant rdp")["epsilon"] <= 8
    assert "7.9963" in account(f"epsilon {VIP} --sigma 0.48 --accountant rdp", tmp_path).stdout


@pytest.mark.slow
def test_opacus_is_a_third_opinion() -> None:
    found = answer(f"epsilon {VIP} --sigma 0.48 --cross-check opacus")["cross_check"]
    assert abs(found["opacus_rdp"] - 7.9961) < 1e-3 and abs(found["opacus_prv"] - 6.8420) < 1e-3


@pytest.mark.slow
def test_calibrated_by_pld() -> None:
    found = answer(f"calibrate {VIP} --epsilon 8")
    assert abs(found["sigma"] - 0.4565) < 2e-4 and found["epsilon"] <= 8


def test_shuffled_epochs() -> None:
    done = answer("epsilon --n 233804767 --batch 1310720 --sigma 0.728 --steps 5708 --delta 1/n --sampling shuffled")
    assert abs(done["epsilon"] - 74.2) < 0.05 and done["participations"] == 32


def test_phases_caps_deltas_and_mu() -> None:
    plain = answer(f"epsilon {SMALL} --sigma 2")
    more = answer(f"epsilon {SMALL} --sigma 2 --phase 2000,40,2,4 --at-epsilon 1 --gdp")
    assert more["epsilon"] == pytest.approx(answer(f"epsilon {SMALL} --sigma 2".replace("4 --d", "8 --d"))["epsilon"])
    assert plain["epsilon"] < more["epsilon"] and 0 < more["delta_at_epsilon"] < 1e-4 and more["gdp_mu"] > 0
    low = answer(f"epsilon {SMALL} --sigma 2 --cap 40")
    assert low["epsilon"] > plain["epsilon"] and "is low" in low["cap_note"]


@pytest.mark.parametrize(("given", "unknown"), [("--batch 40 --sigma 1", "steps"), ("--steps 4 --sigma 1", "batch")])
def test_each_unknown(given: str, unknown: str) -> None:
    found = answer(f"calibrate --n 2000 --delta 1e-4 --epsilon 2 --accountant rdp {given}")
    assert found["unknown"] == unknown and found["epsilon"] <= 2 and found[unknown] >= 1


PLAN = "--n 3000 --batch 300 --delta 1e-4"


def test_random_allocation_is_asked_about_in_the_same_words_everywhere() -> None:
    kind = "--steps 40 --sampling allocation"
    found = answer(f"calibrate {PLAN} {kind} --epsilon 3")
    assert (found["slots"], found["epochs"], found["expected_batch"]) == (10, 4, 300)
    assert found["epsilon"] == epsilon([Event(1 / 10, found["sigma"], 4, slots=10)], 1e-4) <= 3
    assert epsilon([Event(1 / 10, found["sigma"] - 1e-5, 4, slots=10)], 1e-4) > 3 * (1 - 2e-8)
    assert found["sigma"] < answer(f"calibrate {PLAN} --steps 40 --epsilon 3")["sigma"]
    spent = answer(f"epsilon {PLAN} {kind} --sigma {found['sigma']}")["epsilon"]
    planned = answer(f"plan {PLAN} {kind} --epsilon 3")
    assert found["epsilon"] == spent == planned["epsilon_over_steps"][-1]["epsilon"]
    assert planned["sigma"] == found["sigma"]
    assert spent <= answer(f"explain {PLAN} {kind} --sigma {found['sigma']}")["epsilon"] < spent + 2e-4
    by_steps = {row["steps"]: row["epsilon"] for row in planned["epsilon_over_steps"]}
    assert by_steps[4] == by_steps[8] < by_steps[12] == by_steps[20], "an epoch is charged whole"
    for row in planned["sigma_over_batch"][::3]:  # the ends
        same = answer(f"calibrate {PLAN} {kind} --epsilon 3".replace("300 ", f"{row['batch']!r} "))
        assert same["expected_batch"] == row["batch"] and same["sigma"] <= row["sigma"] < same["sigma"] + 1e-3
    batches = [row["batch"] for row in planned["sigma_over_batch"]]
    assert batches == [75, 150, 300, 600], "1200 would be 16 times in 40 steps"


def test_the_steps_and_the_batch_that_allocation_affords() -> None:
    """What is found is what a config with these numbers gets, and one more epoch, or a larger batch, costs too much."""
    kind = "--sampling allocation --sigma 1"
    steps = answer(f"calibrate {PLAN} {kind} --epsilon 3")
    assert steps["steps"] == steps["epochs"] * 10 and steps["batch"] == 300
    same = answer(f"epsilon {PLAN} {kind} --steps {steps['steps']}")
    assert (same["epochs"], same["epsilon"]) == (steps["epochs"], steps["epsilon"]) and same["epsilon"] <= 3
    assert answer(f"epsilon {PLAN} {kind} --steps {steps['steps'] + 10}")["epsilon"] > 3
    batch = answer(f"calibrate --n 3000 --delta 1e-4 {kind} --steps 47 --epsilon 3")
    asked = f"epsilon --n 3000 --delta 1e-4 {kind} --steps 47"
    same = answer(f"{asked} --batch {batch['batch']!r}")
    assert same["slots"] == batch["slots"] and same["epsilon"] == batch["epsilon"] <= 3
    larger = (here(f"{asked} --json --batch {3000 / slots!r}") for slots in range(batch["slots"] - 1, 1, -1))
    possible = (json.loads(done.stdout) for done in larger if not done.returncode)
    assert next(found["epsilon"] for found in possible if found["slots"] < batch["slots"]) > 3


@pytest.mark.parametrize("bands", [2, 8])
def test_correlated_noise_is_asked_about_in_the_same_words_everywhere(bands: int) -> None:
    """At q = 1 per turn everything has a closed form: one Gaussian step per turn."""
    kind = f"--n 4000 --batch {4000 // bands} --delta 1e-4 --bands {bands}"
    found = answer(f"calibrate {kind} --steps 20 --epsilon 3")
    turns = math.ceil(20 / bands)
    assert (found["rate"], found["turns"], found["expected_batch"]) == (1, turns, 4000 // bands)
    assert gaussian_epsilon(found["sigma"] / math.sqrt(turns), 1e-4) == pytest.approx(3, rel=1e-4)
    spent = answer(f"epsilon {kind} --steps 20 --sigma {found['sigma']}")["epsilon"]
    planned = answer(f"plan {kind} --steps 20 --epsilon 3")
    assert spent == found["epsilon"] == planned["epsilon_over_steps"][-1]["epsilon"]
    assert planned["sigma"] == found["sigma"]
    assert spent <= answer(f"explain {kind} --steps 20 --sigma {found['sigma']}")["epsilon"] < spent + 2e-4
    steps = answer(f"calibrate {kind} --sigma 5 --epsilon 3")["steps"]
    assert steps % bands == 0 and gaussian_epsilon(5 / math.sqrt(steps / bands), 1e-4) <= 3
    assert gaussian_epsilon(5 / math.sqrt(steps / bands + 1), 1e-4) > 3
    batch = answer(f"calibrate --n 4000 --delta 1e-4 --bands {bands} --steps 40 --sigma 2 --epsilon 3")["batch"]
    tried = [epsilon([Event(each * bands / 4000, 2.0, 40 // bands)], 1e-4) for each in (batch, batch + 2)]
    assert tried[0] <= 3 < tried[1]


def test_plan_draws(tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    found = answer(f"plan --n 2000 --batch 2000 --steps 4 --epsilon 3 --accountant rdp --plot {picture}")
    rows = [row["epsilon"] for row in found["epsilon_over_steps"]]
    assert rows == sorted(rows) and rows[-1] <= 3
    noise = [row["noise_per_record"] for row in found["sigma_over_batch"]]
    assert noise == sorted(noise, reverse=True) and picture.read_text().startswith("<?xml")
    assert ".png or .svg" in here(f"plan {SMALL} --epsilon 3 --sigma 2 --plot x.gif").stderr


def test_verify_and_explain_a_run(run_dir: Path) -> None:
    found = answer(f"verify {run_dir}")
    assert found["certified"] == found["epsilon"] and found["opened"] == 3
    assert "the certificate agrees" in here(f"verify {run_dir}").stdout
    told = answer(f"explain {run_dir}")
    assert told["private"] and told["epsilon"] == found["claimed"] and "one record" in told["explanation"]
    ledger = run_dir / "ledger.jsonl"
    content = bytearray(ledger.read_bytes())
    content[len(content) // 2] ^= 1
    ledger.write_bytes(bytes(content))
    for command in ("verify", "explain"):
        done = account(f"{command} {run_dir} --json")
        assert done.returncode == 5 and "ledger.jsonl line " in done.stderr and done.stdout == ""


def test_compare_names_what_adds_up_to_least(tmp_path: Path) -> None:
    """At q = 1 per turn everything has a closed form: with b bands each record takes part in T / b steps."""
    picture = tmp_path / "compare.svg"
    asked = "compare --n 4000 --batch 500 --steps 64 --epsilon 2 --delta 1e-4"
    found = answer(f"{asked} --plot {picture}")
    allocated = next(row for row in found["rows"] if row["noise"] == "allocation")
    assert (allocated["slots"], allocated["turns"], allocated["bands"]) == (8, 8, 1) and allocated["per_step_ratio"] < 1
    assert epsilon([Event(1 / 8, allocated["sigma"], 8, slots=8)], 1e-4) == pytest.approx(2, rel=1e-4)
    same = answer(
        f"epsilon --n 4000 --batch 500 --steps 64 --sigma {allocated['sigma']} --delta 1e-4 --sampling allocation"
    )
    assert (same["slots"], same["epochs"], same["expected_batch"]) == (8, 8, 500) and same["epsilon"] <= 2
    rows = {row["bands"]: row for row in found["rows"] if row is not allocated}
    assert list(rows) == [1, 2, 4, 8] and picture.read_text().startswith("<?xml")
    assert rows[8]["rate"] == 1 and rows[8]["turns"] == 8
    assert gaussian_epsilon(rows[8]["sigma"] / math.sqrt(8), 1e-4) == pytest.approx(2, rel=1e-4)
    for bands, row in rows.items():
        matrix = best_banded(bands, 64) if bands > 1 else None
        added_up = math.sqrt(65 / 2) if matrix is None else matrix.accumulated(64)
        assert row["accumulated"] == pytest.approx(row["sigma"] * added_up, rel=1e-12)
        assert row["accumulated_ratio"] == pytest.approx(row["accumulated"] / rows[1]["accumulated"])
        assert row["sigma"] == answer(
            f"calibrate --n 4000 --batch {500 * bands} --steps {row['turns']} --epsilon 2 --delta 1e-4"
        )["sigma"], "a turn is a Poisson-sampled step of the part's rate"  # fmt: skip
    assert allocated["accumulated"] == pytest.approx(allocated["per_step"] * math.sqrt(65 / 2), rel=1e-12)
    best, said = min(found["rows"], key=lambda row: row["accumulated"]), here(asked).stdout
    assert found["best"] == best["noise"] == "allocation"
    assert "not accuracy" in found["caution"] and "not accuracy" in said
    assert "least adds up with random allocation: " in said and BANDS[-1] == MOST_BANDS
    shorter = {row["bands"]: row for row in answer(f"{asked} --horizon 16")["rows"] if row["noise"] != "allocation"}
    assert shorter[8]["per_step"] < rows[8]["per_step"] and shorter[8]["accumulated"] > rows[8]["accumulated"]


def test_compare_reads_a_config(tmp_path: Path) -> None:
    privacy = {"epsilon": 2, "delta": 1e-4, "expected_batch": 500}
    phase = {"name": "p", "privacy": privacy, "data": {"expected_records": 4000}, "epochs": 8}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"phases": [{"name": "warm", "privacy": None}, phase]}))
    found = answer(f"compare --config {config}")
    assert [found[name] for name in ("n", "batch", "steps", "epsilon", "delta")] == [4000, 500, 64, 2, 1e-4]
    assert answer(f"compare --config {config} --steps 32")["steps"] == 32
    config.write_text(json.dumps({"phases": [phase, {**phase, "name": "q", "steps": 16, "epochs": None}]}))
    assert "p, q; choose by --phase" in here(f"compare --config {config}").stderr
    assert answer(f"compare --config {config} --phase q")["steps"] == 16
    config.write_text(json.dumps({"phases": [{**phase, "data": {"expected_records": "all"}, "steps": 4}]}))
    assert "gives no number for n; give --n" in here(f"compare --config {config}").stderr
    config.write_text("{")
    assert "no config in plain JSON" in here(f"compare --config {config}").stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("compare --n 10 --batch 4", 2, "compare needs --steps, --epsilon"),
        ("compare --n 10 --batch 40 --steps 4 --epsilon 1", 2, "expected_batch must lie"),
        ("compare --n 10 --batch 4 --steps 0 --epsilon 1", 2, "must be at least 1, but are 10 and 0"),
        ("compare --n 10 --batch 4 --steps 4 --epsilon 1 --plot x.pdf", 2, "writes .png or .svg, not '.pdf'"),
        ("compare --n 10 --batch 10 --steps 4 --epsilon 1e-9 --delta 1e-12", 2, "not even independent noise"),
        ("compare --n 0 --batch 4 --steps 1 --epsilon 1", 2, "must be at least 1, but are 0 and 1"),
        ("compare --n 10 --batch 4 --steps 4 --epsilon 1 --phase p", 2, "give that, too"),
        ("verify /nowhere", 5, "there is no ledger"),
        ("statement /nowhere", 2, "required: --records"),
        ("explain", 2, "explain needs a RUN_DIR"),
        ("explain --epsilon 3", 2, "--delta"),
        ("explain --epsilon nan --delta 1e-6", 2, "at least 0"),
        (f"epsilon {SMALL} --sigma 0", 2, "finite and positive"),
        (f"epsilon {SMALL} --sigma 1e-300", 2, "can be accounted between"),
        (f"epsilon --n {'9' * 400} --batch 40 --steps 4 --sigma 1", 2, "error: these numbers are too large"),
        (f"epsilon {SMALL} --sigma 0 --sampling shuffled", 2, "finite and positive"),
        ("epsilon --n 10 --batch 40 --steps 4 --sigma 1", 2, "expected_batch must lie"),
        ("epsilon --n 100 --batch 40 --steps 0 --sigma 1", 2, "--steps must be at least 1"),
        (f"epsilon {SMALL} --sigma 1 --phase 3,4", 2, "--phase takes"),
        (f"epsilon {SMALL} --sigma 1 --phase 2000,40,0,4", 2, "finite and positive"),
        (f"calibrate {SMALL} --epsilon 2 --sigma 1", 2, "leave out exactly one"),
        (f"calibrate {SMALL} --epsilon 2 --bands 2 --sampling allocation", 2, "leave --bands out"),
        (f"plan {SMALL} --epsilon 2 --bands 8", 2, "needs as many records and steps"),
        (f"explain {SMALL} --sigma 1 --bands 257", 2, "must lie between 1 and 256"),
        ("epsilon --n 100 --batch 40 --steps 4 --sigma 1 --bands 3", 2, "use at most 2 bands"),
        (f"epsilon {SMALL} --sigma 1 --bands 2 --cap 50", 2, "plain Poisson samples alone"),
        (f"epsilon {SMALL} --sigma 1 --sampling shuffled --bands 2", 2, "leave --bands out"),
        (f"epsilon {SMALL} --sigma 1 --sampling shuffled --cap 50", 2, "shuffled takes no --cap"),
        (f"epsilon {SMALL} --sigma 1 --sampling shuffled --best-of 3", 2, "shuffled takes no --cap"),
        ("plan --n 100 --batch 40 --steps 4 --epsilon 1 --sampling allocation", 2, "a whole number of times"),
        ("calibrate --n 100 --batch 40 --sigma 1 --epsilon 1 --sampling allocation", 2, "a whole number of times"),
        ("calibrate --n 100 --steps 40 --sigma .2 --epsilon 1 --sampling allocation", 2, "even one epoch"),
        ("epsilon --n 9 --batch 3 --steps 6 --sigma 1 --sampling allocation --accountant rdp", 2, "use the PLD"),
        (f"explain {SMALL} --sigma 1 --bands 2 --records-per-person 2", 2, "nothing is proved"),
        (f"calibrate {SMALL} --epsilon 0", 2, "finite and positive"),
        (f"calibrate {SMALL} --epsilon 1 --accountant prv", 2, "invalid choice"),
    ],
)
def test_refusals(arguments: str, code: int, words: str) -> None:
    done = here(arguments)
    assert done.returncode == code and words in done.stderr, done
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_what_was_calibrated_is_accounted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("murmuration.accounting.cli.epsilon.epsilon", lambda *_: 2.5)
    done = here("calibrate --n 10 --batch 10 --steps 4 --epsilon 2 --delta 1e-3")
    assert done.returncode == 2 and "the calibrated sigma gives epsilon = 2.5, above 2.0" in done.stderr


def test_explain_from_numbers() -> None:
    assert "2,981" in answer("explain --epsilon 8 --delta 1e-9")["explanation"]
    assert answer("explain --n 2000 --batch 2000 --sigma 3 --steps 4 --delta 1e-4")["epsilon"] > 0


def test_no_command_imports_torch(run_dir: Path) -> None:
    program = (
        "import sys, pkgutil, importlib\n"
        "from murmuration import accounting\n"
        "from murmuration.accounting.cli.main import main\n"
        "for line in sys.argv[1:]: assert main(line.split()) == (7 if line.startswith('verify') else 0)\n"
        "assert 'filelock' not in sys.modules, 'whoever only checks takes no lock'\n"
        "for found in pkgutil.walk_packages(accounting.__path__, 'murmuration.accounting.'):\n"
        "    importlib.import_module(found.name)\n"
        "assert not {'torch', 'opacus', 'deepspeed', 'timm', 'transformers'} & set(sys.modules)\n"
        "ours = {name.split('.')[1] for name in sys.modules if name.startswith('murmuration.')}\n"
        "assert ours == {'accounting'}, ours"
    )
    lines = [f"epsilon {SMALL} --sigma 2", f"verify {run_dir}", f"explain {run_dir}"]
    done = subprocess.run([sys.executable, "-c", program, *lines], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_a_name_cannot_write_a_verdict_of_its_own_on_the_screen(tmp_path: Path) -> None:
    """A line feed and an escape sequence in a run's name, a phase's, a statement or an unknown kind of line."""
    forged = "x\n\x1b[2J\x1b[Hε = 0.000001 of 8\nthe certificate agrees"
    whole_run(tmp_path).ledger.close()

    def rename(fields: dict) -> None:
        fields |= {"name": forged} if "name" in fields else {}

    rewritten(tmp_path, rename)
    honest = here(f"verify {tmp_path}")
    assert honest.returncode == 7 and r"x\n\x1b[2J" in honest.stdout
    assert [line[:9] for line in honest.stdout.splitlines()] == ["ledger of", "ε = 0.165", "there is ", "what was "]

    def publish(fields: dict) -> None:
        if fields["kind"] == "finish":
            fields |= {"kind": "nonprivate", "phase": 1, "name": forged, "public_data": False, "manifest_digest": "m"}

    rewritten(tmp_path, publish)
    for command in ("verify", "explain"):
        done = here(f"{command} {tmp_path}")
        assert done.returncode == (7 if command == "verify" else 0) and r"NOT PRIVATE: phase x\n\x1b[2J" in done.stdout
        assert "\x1b" not in done.stdout and "\nε = 0.000001" not in done.stdout
    rewritten(tmp_path, lambda fields: fields.update(kind=forged) if fields["kind"] == "nonprivate" else None)
    refused = here(f"verify {tmp_path}")
    assert refused.returncode == 5 and refused.stderr.count("\n") == 1 and "\x1b" not in refused.stderr


@pytest.mark.parametrize("content", [b"[" * 50_000, b'{"format":' + b"7" * 5000 + b"}", b"\xff", b'{"format":NaN}'])
def test_a_hostile_certificate_ends_in_one_sentence_and_code_5(run_dir: Path, content: bytes) -> None:
    (run_dir / "certificate.json").write_bytes(content)
    for target in (run_dir, run_dir / "certificate.json"):
        done = here(f"verify {target}")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (5, "", 1)
        assert done.stderr.startswith("error: ") and "certificate.json" in done.stderr


def test_a_ledger_that_contradicts_its_plan_is_refused_with_code_5(run_dir: Path) -> None:
    """Threshold 1, noise 1e9 and sensitivity 1e-9, consistent in themselves, said "ε = 0.000000" once."""
    (run_dir / "certificate.json").unlink()

    def forge(fields: dict) -> None:
        if fields["kind"] in ("open", "commit"):
            fields["facts"]["sampling"]["rule"]["threshold"] = 1
            fields["facts"]["noise"]["std"] = 1e9
            fields["facts"]["clipping"]["sensitivity"] = 1e-9

    rewritten(run_dir, forge)
    done = here(f"verify {run_dir}")
    assert done.returncode == 5 and "line 4" in done.stderr and "but its plan says" in done.stderr
