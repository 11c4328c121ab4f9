"""Heads of the ledger, told to a real command and a real server; what does not answer ends no run."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from murmuration.accounting.ledger.facts import Charge, Head
from murmuration.accounting.ledger.heads import read_heads
from murmuration.train.commands.track import main
from murmuration.train.run.witness import Witness
from tests.support.launching import ROOT

HEAD = Head("run", 7, "f" * 64, (Charge(0, 0.5, 1.0, 3),))


def test_a_command_gets_lines_that_verify_can_read(tmp_path: Path) -> None:
    kept = tmp_path / "it's kept.jsonl"
    program = tmp_path / "keep.py"
    program.write_text("import sys; open(sys.argv[1], 'ab').write(sys.stdin.buffer.read())\n")
    said: list[str] = []
    for _ in range(2):
        Witness(f'{sys.executable} {program} "{kept}"', said.append)(HEAD)
    assert read_heads(kept) == [HEAD, HEAD] and said == []


def test_a_server_gets_a_post() -> None:
    bodies: list[bytes] = []

    class Keeps(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204 if len(bodies) < 2 else 503)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    server = HTTPServer(("127.0.0.1", 0), Keeps)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    said: list[str] = []
    try:
        for _ in range(2):
            Witness(f"http://127.0.0.1:{server.server_port}/heads", said.append)(HEAD)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert [json.loads(body)["length"] for body in bodies] == [7, 7]
    [sentence] = said
    assert "ledger line 7 could not be reported" in sentence and "503" in sentence


def test_one_that_is_not_reached_is_told_of(tmp_path: Path) -> None:
    said: list[str] = []
    absent = str(tmp_path / "absent")
    for target in (f"{sys.executable} -c 'raise SystemExit(3)'", absent, "http://127.0.0.1:1/", "'", " "):
        Witness(target, said.append)(HEAD)
    assert len(said) == 5 and "ended with 3" in said[0]


def test_one_that_speaks_another_language_ends_no_run_and_its_address_stays_secret() -> None:
    """A hook's address is often all that one needs to write to it, and this goes to the public console."""
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        Witness(f"http://127.0.0.1:{server.getsockname()[1]}/hook/SECRET", said.append)(HEAD)
        thread.join()
    Witness("http://127.0.0.1:1/hook/SECRET TOKEN", said.append)(HEAD)
    Witness("http://no-such-host.invalid/SECRET", said.append)(HEAD)
    assert len(said) == 3 and not any("SECRET" in each for each in said), said


# What `track` sends: public rows once each, at one time, and not a byte of any other file.


SECRET = "nobody may read this"
OPENED = """
import sys
opened = []
def hook(event, arguments):
    if event == "open" and str(arguments[0]).startswith(sys.argv[1]):
        opened.append(str(arguments[0])[len(sys.argv[1]) + 1 :])
sys.addaudithook(hook)
from murmuration.train.commands.track import main
code = main(sys.argv[1:])
print("opened", sorted(set(opened)))
assert not {"torch", "wandb", "mlflow"} & set(sys.modules)
sys.exit(code)
"""


class Server(ThreadingHTTPServer):
    """MLflow's interface as far as it is documented for these calls, and all that it was told."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.heard: list[str] = []
        self.refuses = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        del format, args

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["Content-Length"])).decode())

    def _answer(self, body: str | None) -> None:
        self.server.heard.append(f"{self.path} {dict(self.headers)} {body}")
        code, found = self._act(urlsplit(self.path), json.loads(body) if body else {})
        self.send_response(self.server.refuses or code)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    def _act(self, where: Any, told: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        server, what = self.server, where.path.removeprefix("/api/2.0/mlflow/")
        if what == "experiments/get-by-name":
            (name,) = parse_qs(where.query)["experiment_name"]
            known = server.experiments.get(name)
            return (200, {"experiment": {"experiment_id": known}}) if known else (404, {})
        if what == "experiments/create":
            return 200, {"experiment_id": server.experiments.setdefault(told["name"], "7")}
        if what == "runs/search":
            wanted = re.fullmatch(r"tags\.`(.+)` = '(.+)'", told["filter"])
            assert wanted is not None and told["experiment_ids"] == ["7"]
            return 200, {"runs": [run for run in server.runs.values() if wanted[2] == _tags(run).get(wanted[1])]}
        if what == "runs/create":
            run = {
                "info": {"run_id": f"r{len(server.runs)}"},
                "data": {"tags": told["tags"]},
                "metrics": [],
                "told": told,
            }
            server.runs[run["info"]["run_id"]] = run
            return 200, {"run": run}
        run = server.runs[told["run_id"]]
        if what == "runs/log-batch":
            assert 0 < len(told["metrics"]) <= 1000, "MLflow takes no more"
            run["metrics"] += told["metrics"]
        elif what == "runs/set-tag":
            run["data"]["tags"] = [tag for tag in run["data"]["tags"] if tag["key"] != told["key"]]
            run["data"]["tags"].append({"key": told["key"], "value": told["value"]})
        else:
            assert what == "runs/update" and told["status"] == "FINISHED"
        return 200, {}


def _tags(run: dict[str, Any]) -> dict[str, str]:
    return {tag["key"]: tag["value"] for tag in run["data"]["tags"]}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("URI", "TOKEN", "USERNAME", "PASSWORD"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    running = Server()
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def row(step: int, **values: Any) -> str:
    return json.dumps({"phase": "private", "step": step, **values}) + "\n"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory as it is left, with something private in every file but two."""
    folder = tmp_path / "my"
    for name in ("secret/run.key", "tb/private/events", "logs/private/curves.jsonl", "ledger.jsonl", "run_state.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(SECRET)
    public = [row(step, epsilon=0.1 * step, lr=1e-3, **{"zero_shot_a'b": 0.5}) for step in range(1, 6)]
    public += [row(6, public_loss=float("nan"), epsilon=0.6)]
    warm = json.dumps({"phase": "warm-up", "step": 1, "loss": 2.0}) + "\n"
    (folder / "logs" / "public.jsonl").write_text(warm + "".join(public) + '{"phase": "priv')
    told = {"run": "r" * 32, "claim": {"statement": "(8, 1e-5)-DP", "private": True}, "unit": "one record"}
    (folder / "certificate.json").write_text(json.dumps(told))
    return folder


def test_only_two_public_files_are_opened_and_no_package_is_imported(run_dir: Path, server: Server) -> None:
    command = [sys.executable, "-c", OPENED, str(run_dir), "--to", "mlflow", "--server", server.url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "opened ['certificate.json', 'logs/public.jsonl']" in done.stdout
    assert "7 of 7 public rows sent to mlflow" in done.stdout
    assert server.heard and not any(SECRET in text for text in server.heard)


def test_each_row_is_sent_once_at_one_time_and_phases_are_called_as_on_the_board(
    run_dir: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    os.utime(run_dir / "logs" / "public.jsonl", (1_700_000_000, 1_700_000_000))
    asked = [str(run_dir), "--to", "mlflow", "--server", f"{server.url}/", "--project", "ours"]
    assert main(asked) == 0
    ((name, run),) = server.runs.items()
    points = {(each["key"], each["step"]): each["value"] for each in run["metrics"]}
    assert points["warm-up/loss", 1] == 2.0 and points["dp/epsilon", 3] == pytest.approx(0.3)
    assert points["dp/zero_shot_a_b", 5] == 0.5 and len(points) == len(run["metrics"]) == 1 + 3 * 5 + 1
    assert not any(key.startswith("private/") or value != value for (key, _), value in points.items())
    (time,) = {each["timestamp"] for each in run["metrics"]} | {run["told"]["start_time"]}
    written = (run_dir / "logs" / "public.jsonl").stat().st_mtime * 1000
    assert abs(time - written) > 3_000_000, "not when the log was written, which is when a step ended"
    assert _tags(run)["claim"] == "(8, 1e-5)-DP" and server.experiments == {"ours": "7"}

    log = run_dir / "logs" / "public.jsonl"
    log.write_text(log.read_text().rpartition("{")[0] + "".join(row(step, epsilon=1.0) for step in range(7, 1600)))
    assert main(asked) == 0
    assert list(server.runs) == [name] and len(run["metrics"]) == 17 + 1593
    assert [each["step"] for each in run["metrics"][17:]] == list(range(7, 1600))
    assert "1593 of 1600 public rows sent" in capsys.readouterr().out
    assert main(asked) == 0 and len(run["metrics"]) == 17 + 1593, "nothing new, nothing sent"


def test_a_phase_that_spends_nothing_is_not_called_private(run_dir: Path, server: Server) -> None:
    (run_dir / "logs" / "public.jsonl").write_text(row(1, loss=1.0))
    (run_dir / "certificate.json").unlink()
    assert main([str(run_dir), "--to", "mlflow", "--server", server.url]) == 0
    (run,) = server.runs.values()
    assert [each["key"] for each in run["metrics"]] == ["without-dp/loss"] and "claim" not in _tags(run)


def test_credentials_come_from_mlflows_own_variables(
    run_dir: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "word")
    assert main([str(run_dir), "--to", "mlflow"]) == 0
    assert all("'Authorization': 'Basic bWU6d29yZA=='" in text for text in server.heard)
    server.heard.clear()
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t0k")
    assert main([str(run_dir), "--to", "mlflow"]) == 0
    assert all("'Authorization': 'Bearer t0k'" in text for text in server.heard)


def test_what_does_not_work_is_one_sentence(
    run_dir: Path, server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    gone = ["--server", "http://127.0.0.1:9"]
    for asked, said in (
        ([str(run_dir / "lost"), "--to", "mlflow"], "name a run directory"),
        ([str(run_dir), "--to", "mlflow"], "name it with --server"),
        ([str(run_dir), "--to", "mlflow", *gone], "does not answer as MLflow does"),
        ([str(run_dir), "--to", "wandb"], "needs the package wandb"),
        ([str(run_dir), "--to", "wandb", *gone], "--server is MLflow's"),
    ):
        assert main(asked) == 2
        told = capsys.readouterr().err
        assert said in told and told.count("\n") == 1
    server.refuses = 403
    assert main([str(run_dir), "--to", "mlflow", "--server", server.url]) == 2
    assert "MLflow refused experiments/get-by-name (403)" in capsys.readouterr().err


def test_wandb_gets_the_same_rows_at_one_time_by_its_own_package(run_dir: Path, tmp_path: Path) -> None:
    """By its offline mode, where the package is installed: it writes what it would send."""
    pytest.importorskip("wandb")
    command = [sys.executable, str(ROOT / "launch" / "track.py"), str(run_dir), "--to", "wandb"]
    environ = {**os.environ, "WANDB_MODE": "offline"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environ)
    assert done.returncode == 0 and "7 of 7 public rows sent to wandb" in done.stdout, done.stderr
    written = [path.read_bytes() for path in (tmp_path / "wandb").rglob("*") if path.is_file()]
    (sent,) = (content for content in written if b"dp/epsilon" in content)
    assert not any(SECRET.encode() in content for content in written)
    times = set(re.findall(rb"_timestamp.{1,4}?(1\.\d+e\+09|\d{10}\.\d+)", sent, re.DOTALL))
    assert len(times) == 1, times
