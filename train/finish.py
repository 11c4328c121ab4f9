"""After the last step: public captions, the certificate, the report. Everything from the durable checkpoint."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from accounting import certificate
from accounting.journal import Journal
from train.board import Board
from train.checkpoint import Loaded
from train.clip_rule import MOST_ALLOWANCE
from train.config import Config
from train.engines import describe_engine
from train.recipe import ReadyPhase
from train.report import outcomes, read_curves, write_report
from train.run_dir import RunDir
from train.samples import samples
from train.siblings import siblings

DEVIATIONS = [
    f"The fp32 sum of a micro-batch may err by the allowance (at most {MOST_ALLOWANCE}·C); C is lowered by it.",
    "Proved here on the devices listed under `machine`; kernels of other devices may round a record's gradient "
    "depending on its row.",
    "Whoever watches the console or the files while the run lasts sees when steps end, and so roughly how large their "
    "batches were; of what is kept, only the modification times of checkpoints tell anything of it.",
    "Everything is as private as the run directory's secret folder was while the run lasted.",
]


def finish(
    config: Config, phases: list[ReadyPhase], run_dir: RunDir, journal: Journal, latest: Loaded, board: Board
) -> None:
    journal.finish()
    shown = samples(phases, latest)
    run_dir.evaluation.write_text(json.dumps(shown) + "\n")
    identity = json.dumps(config.model_dump(by_alias=True), sort_keys=True).encode()
    mixed = {phase.name: phase.mixed.manifest_digest for phase in phases if phase.mixed is not None}
    extra: dict[str, Any] = {
        "known_deviations": DEVIATIONS,
        "siblings": [
            other
            for phase in phases
            if phase.private
            for other in siblings(phase.index.folder, journal.ledger.entries[0].hash)
        ],
        "engine": describe_engine(config),
        "machine": "cuda" if torch.cuda.is_available() else "cpu (gloo); not yet proved on GPUs with NCCL",
        "hashes": {
            "config_sha256": hashlib.sha256(identity).hexdigest(),
            "data_manifests": {phase.name: phase.index.manifest_digest for phase in phases},
            **({"mixed_in": mixed} if mixed else {}),
            "checkpoint_manifest_sha256": latest.digest,
        },
    }
    document = certificate.compose(journal.history, journal.ledger.entries, extra)
    certificate.write(document, run_dir.root)
    write_report(run_dir, config, document, shown)
    # The claim and what it rests on; what it means in plain words stands in the files.
    board.say(certificate.markdown(document).partition("## What this means")[0])
    for text in outcomes(config, read_curves(run_dir)):
        board.say(text)
