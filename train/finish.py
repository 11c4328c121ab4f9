"""After the last step: public captions, the certificate, the report. Everything from the durable checkpoint."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from typing import Any

import numpy as np
import torch
from PIL import Image

from accounting import certificate
from accounting.journal import Journal
from data.batches import BatchReader
from evaluation.captions import greedy_captions
from model.build import build
from model.captioner import Captioner
from train.board import Board
from train.checkpoint import Loaded
from train.clip_rule import MOST_ALLOWANCE
from train.config import Config
from train.engines import describe_engine
from train.recipe import ReadyPhase
from train.report import outcomes, read_curves, write_report
from train.run_dir import RunDir
from train.siblings import siblings

SAMPLES = 12
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
    samples = _captions(phases, latest)
    run_dir.evaluation.write_text(json.dumps(samples) + "\n")
    identity = json.dumps(config.model_dump(by_alias=True), sort_keys=True).encode()
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
            "checkpoint_manifest_sha256": latest.digest,
        },
    }
    document = certificate.compose(journal.history, journal.ledger.entries, extra)
    certificate.write(document, run_dir.root)
    write_report(run_dir, config, document, samples)
    # The claim and what it rests on; what it means in plain words stands in the files.
    board.say(certificate.markdown(document).partition("## What this means")[0])
    for text in outcomes(config, read_curves(run_dir)):
        board.say(text)


def _captions(phases: list[ReadyPhase], latest: Loaded) -> list[dict[str, str]]:
    """A few public held-out images, as PNG, with what the model writes beside them and what was true."""
    phase = phases[latest.position.phase]
    if phase.held_out is None or phase.text is None or phase.settings.objective != "caption":
        return []
    model = build(phase.shape, "caption")
    assert isinstance(model, Captioner)
    model.load_state_dict(latest.state_dict(model.state_dict()))
    spec = phase.data_spec(augment=False)
    batch = BatchReader(phase.held_out, spec, phase.text).read(np.arange(SAMPLES), 0)
    images = batch.inputs["images"][batch.present]
    written = greedy_captions(model.eval(), images, phase.text, length=phase.shape.text_length)
    truths = [phase.text.decode(row.tolist()) for row in batch.inputs["tokens"][batch.present]]
    mean, std = torch.tensor(spec.mean).view(3, 1, 1), torch.tensor(spec.std).view(3, 1, 1)
    found = []
    for image, caption, truth in zip(images, written, truths, strict=True):
        pixels = ((image * std + mean).clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        found.append({"png": base64.b64encode(buffer.getvalue()).decode(), "caption": caption, "truth": truth})
    return found
