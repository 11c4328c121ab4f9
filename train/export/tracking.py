"""A run's public values for tracking servers: MLflow by its HTTP interface, W&B by its package.

Only two public files are read, so that nothing private can be sent. Every point has the same time: a server that knew
when each private step ended would know roughly how many records it drew.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from murmuration.train.export.errors import ExportError

LOG, CERTIFICATE = Path("logs") / "public.jsonl", "certificate.json"
RUN_TAG, ROWS_TAG = "murmuration.run", "murmuration.rows"
MOST_AT_ONCE = 1000
"""Metrics in one request, by MLflow's own limit."""
LONGEST_VALUE = 500
SECONDS = 30
_ODD = re.compile(r"[^A-Za-z0-9_./ -]")


@dataclass(frozen=True)
class Row:
    """What one line of the public log says: values by name, at a step of a phase."""

    phase: str
    step: int
    values: dict[str, float]


@dataclass(frozen=True)
class Curves:
    """`time` is that of all points, in milliseconds: when they were published. `claim` is empty until the run is
    certified."""

    run: str
    name: str
    rows: list[Row]
    claim: dict[str, str]
    time: int


def published(run_dir: Path) -> Curves:
    log = run_dir / LOG
    try:
        lines = log.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ExportError(f"{log} cannot be read ({error.strerror}); name a run directory") from None
    rows = _named([row for line in lines if (row := _row(line)) is not None])
    claim = _claim(run_dir / CERTIFICATE)
    # When it is published, which the server sees anyway, and not the file's time: that tells when a step ended.
    published_at = int(time.time() * 1000)
    return Curves(claim.get("run", run_dir.resolve().name), run_dir.resolve().name, rows, claim, published_at)


def _row(line: str) -> Row | None:
    """None for a line that a kill cut off."""
    try:
        told = json.loads(line)
        phase, step = str(told.pop("phase")), int(told.pop("step"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    numbers = {_ODD.sub("_", name): float(value) for name, value in told.items() if isinstance(value, int | float)}
    return Row(phase, step, {name: value for name, value in numbers.items() if math.isfinite(value)})


def _named(rows: list[Row]) -> list[Row]:
    """As on the public board: no tag may look like a private value, and a phase without privacy has no epsilon."""
    spends = any("epsilon" in row.values for row in rows if row.phase == "private")
    other = "dp" if spends else "without-dp"
    return [replace(row, phase=other) if row.phase == "private" else row for row in rows]


def _claim(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    try:
        told = json.loads(path.read_bytes())
        found = {"run": told["run"], "claim": told["claim"]["statement"], "unit": told["unit"]}
    except (OSError, ValueError, KeyError, TypeError):
        raise ExportError(f"{path} is no certificate; run: python launch/account.py verify {path.parent}") from None
    return {name: str(value)[:LONGEST_VALUE] for name, value in found.items()}


def send(curves: Curves, to: str, project: str, server: str | None) -> int:
    """How many rows were new there."""
    if to == "wandb":
        if server is not None:
            raise ExportError("--server is MLflow's; wandb takes its own settings (WANDB_BASE_URL)")
        return _to_wandb(curves, project)
    found = server or os.environ.get("MLFLOW_TRACKING_URI", "")
    if urllib.parse.urlsplit(found).scheme not in ("http", "https"):
        raise ExportError("MLflow's server is not known; name it with --server http://… or MLFLOW_TRACKING_URI")
    return MLflow(found.rstrip("/")).send(curves, project)


class MLflow:
    def __init__(self, server: str) -> None:
        self._server = server
        self._headers = {"Content-Type": "application/json"}
        user, password = (os.environ.get(f"MLFLOW_TRACKING_{name}") for name in ("USERNAME", "PASSWORD"))
        if token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
            self._headers["Authorization"] = f"Bearer {token}"
        elif user is not None:
            secret = base64.b64encode(f"{user}:{password or ''}".encode()).decode()
            self._headers["Authorization"] = f"Basic {secret}"

    def send(self, curves: Curves, project: str) -> int:
        experiment = self._experiment(project)
        run, known = self._run(experiment, curves)
        fresh = curves.rows[known:]
        metrics = iter(
            {"key": f"{row.phase}/{name}", "value": value, "timestamp": curves.time, "step": row.step}
            for row in fresh
            for name, value in row.values.items()
        )
        while part := list(islice(metrics, MOST_AT_ONCE)):
            self._ask("runs/log-batch", {"run_id": run, "metrics": part})
        tags = {**curves.claim, ROWS_TAG: str(known + len(fresh))}
        for name, value in tags.items():
            self._ask("runs/set-tag", {"run_id": run, "key": name, "value": value})
        self._ask("runs/update", {"run_id": run, "status": "FINISHED", "end_time": curves.time})
        return len(fresh)

    def _experiment(self, name: str) -> str:
        asked = urllib.parse.urlencode({"experiment_name": name})
        found = self._ask(f"experiments/get-by-name?{asked}", missing=True)
        if found is None:
            return self._ask("experiments/create", {"name": name})["experiment_id"]
        return found["experiment"]["experiment_id"]

    def _run(self, experiment: str, curves: Curves) -> tuple[str, int]:
        """The run's id there, and how many rows it has."""
        quoted = curves.name.replace("'", "_")
        asked = {"experiment_ids": [experiment], "filter": f"tags.`{RUN_TAG}` = '{quoted}'", "max_results": 1}
        for run in self._ask("runs/search", asked).get("runs", ()):
            tags = {tag["key"]: tag["value"] for tag in run["data"].get("tags", ())}
            return run["info"]["run_id"], int(tags.get(ROWS_TAG, 0))
        tags = [{"key": RUN_TAG, "value": quoted}]
        begun = {"experiment_id": experiment, "run_name": curves.name, "start_time": curves.time, "tags": tags}
        return self._ask("runs/create", begun)["run"]["info"]["run_id"], 0

    def _ask(self, what: str, body: dict[str, Any] | None = None, missing: bool = False) -> Any:
        """A request with a body is a POST. `missing`: None if there is no such thing."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._server}/api/2.0/mlflow/{what}", data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            if missing and error.code == 404:
                return None
            said = error.read(500).decode("utf-8", "replace")
            raise ExportError(f"MLflow refused {what.partition('?')[0]} ({error.code}): {said}") from None
        except (OSError, ValueError) as error:
            raise ExportError(f"{self._server} does not answer as MLflow does ({error}); check --server") from None


def _to_wandb(curves: Curves, project: str) -> int:
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ExportError("W&B needs the package wandb: pip install wandb; or send to mlflow") from None
    # Nothing of the console, the code or the machine goes along, but versions of Python and of packages.
    quiet = wandb.Settings(
        console="off", silent=True, disable_git=True, disable_code=True, save_code=False, x_disable_stats=True,
        x_disable_meta=True, x_disable_machine_info=True, host="",
    )  # fmt: skip
    try:
        run = wandb.init(
            project=project, id=_ODD.sub("_", curves.name).replace("/", "_"), name=curves.name, resume="allow",
            config=curves.claim, settings=quiet,
        )  # fmt: skip
        fresh = curves.rows[run.step :]
        for row in fresh:
            at = {f"{row.phase}/step": row.step, "_timestamp": curves.time / 1000}
            run.log({**{f"{row.phase}/{name}": value for name, value in row.values.items()}, **at})
        run.finish()
    except wandb.Error as error:
        raise ExportError(f"W&B: {error}") from None
    return len(fresh)
