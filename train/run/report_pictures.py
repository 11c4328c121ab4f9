"""A few public held-out images for the report, each with the caption that the model writes or with what it fills in.

Only public images, and the weights of the durable checkpoint: nothing of a private record is ever shown.
"""

from __future__ import annotations

import base64
import io

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from murmuration.data.batch.reader import BatchReader, DataSpec
from murmuration.evaluation.captions import greedy_captions
from murmuration.model.build import build
from murmuration.model.captioner import Captioner
from murmuration.model.mae import MaskedAutoencoder
from murmuration.model.trainable import select
from murmuration.train.recipe.ready_phase import ReadyPhase
from murmuration.train.storage.checkpoint import Loaded

SAMPLES = 12
MASKS = b"masks of the report's pictures"  # public, so that two reports hide the same patches
GREY = 0.5


def samples(phases: list[ReadyPhase], latest: Loaded) -> list[dict[str, str]]:
    """One PNG per image with the text below it; empty where the last phase has no public held-out images to show."""
    phase = phases[latest.position.phase]
    if phase.held_out is None or phase.settings.objective == "classify":
        return []
    model = build(phase.shape, phase.settings.objective)
    select(model, phase.settings.trainable)
    model.load_state_dict(latest.state_dict(model.state_dict()))
    model.eval()
    spec = phase.evaluation_spec()
    reader = BatchReader(phase.held_out, spec, phase.text, mask_key=MASKS)
    batch = reader.read(np.arange(min(SAMPLES, phase.held_out.records)), 0)
    reader.close()
    inputs = {name: tensor[batch.present] for name, tensor in batch.inputs.items()}
    if isinstance(model, MaskedAutoencoder):
        return reconstructions(model, inputs, spec)
    assert isinstance(model, Captioner) and phase.text is not None
    written = greedy_captions(model, inputs["images"], phase.text, length=phase.shape.text_length)
    truths = [phase.text.decode(row.tolist()) for row in inputs["tokens"]]
    pictures = [png(pixels(image, spec)) for image in inputs["images"]]
    return [{"png": p, "caption": c, "truth": t} for p, c, t in zip(pictures, written, truths, strict=True)]


def reconstructions(model: MaskedAutoencoder, inputs: dict[str, Tensor], spec: DataSpec) -> list[dict[str, str]]:
    """Side by side: what the model saw, what it made of it, and the image."""
    made = model.reconstruct(inputs)
    side = model.shape.patch_size
    found: list[dict[str, str]] = []
    for image, whole, hidden in zip(inputs["images"], made.images, made.removed, strict=True):
        grid = hidden.view(model.shape.grid, model.shape.grid)
        covered = grid.repeat_interleave(side, 0).repeat_interleave(side, 1)
        true, guess = pixels(image, spec), pixels(whole, spec)
        seen = torch.where(covered, torch.full_like(true, GREY), true)
        error = float((image - whole).square()[:, covered].mean())
        caption = f"seen, filled in, true; error {error:.3f}"
        found.append({"png": png(torch.cat([seen, guess, true], 2)), "caption": caption, "truth": ""})
    return found


def pixels(image: Tensor, spec: DataSpec) -> Tensor:
    mean, std = (torch.tensor(each, device=image.device).view(3, 1, 1) for each in (spec.mean, spec.std))
    return (image * std + mean).clamp(0, 1)


def png(pixels: Tensor) -> str:
    buffer = io.BytesIO()
    Image.fromarray((pixels * 255).round().byte().permute(1, 2, 0).cpu().numpy()).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()
