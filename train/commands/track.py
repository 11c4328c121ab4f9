"""track RUN_DIR --to mlflow|wandb: sends a run's public values to a tracking server, after the run or during it.

What is sent: the curves of logs/public.jsonl, which the console and TensorBoard's public board show too, and the claim
of the certificate once there is one. Nothing else of the run directory is opened, and no file beside these. All points
carry one time, since the times of private steps would tell how large their batches were; a server sees when the
command was run. The same command again sends what is new.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from murmuration.accounting.errors import DONE, RunError
from murmuration.accounting.escaping import sentence

EPILOG = """MLflow: the server is --server or MLFLOW_TRACKING_URI (http or https), with MLFLOW_TRACKING_TOKEN, or
MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; no package is needed. W&B: needs the package wandb and its own
settings (WANDB_API_KEY, WANDB_MODE, ...)."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="track.py", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path, help="run directory")
    parser.add_argument("--to", required=True, choices=("mlflow", "wandb"), help="what receives the values")
    parser.add_argument("--project", default="murmuration", metavar="NAME", help="project of W&B, experiment of MLflow")
    parser.add_argument("--server", metavar="URL", help="MLflow's server")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    from murmuration.train.export.tracking import published, send

    try:
        curves = published(arguments.run_dir)
        sent = send(curves, arguments.to, arguments.project, arguments.server)
    except RunError as error:
        print(f"error: {sentence(error)}", file=sys.stderr)
        return error.exit_code
    print(f"{sent} of {len(curves.rows)} public rows sent to {arguments.to}, project {arguments.project}")
    return DONE
