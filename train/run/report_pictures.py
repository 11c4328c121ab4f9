"""A few public held-out images for the report, each with the caption that the model writes or with what it fills in.

Only public images, and the weights of the durable checkpoint: nothing of a private record is ever shown.
"""

from __future__ import annotations

import base64
import io
from contextlib import closing

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from murmuration.data.batch.reader import TARGET, BatchReader, DataSpec
from murmuration.model.build import build
from murmuration.model.captioner import Captioner
from murmuration.model.mae import MaskedAutoencoder
from murmuration.model.trainable import select
from murmuration.train.config.section import RecipeError
from murmuration.train.measures.captions import greedy_captions
from murmuration.train.recipe.held_out import HeldOut
from murmuration.train.recipe.ready_phase import ReadyPhase
from murmuration.train.storage.checkpoint import Loaded

SAMPLES = 12
MASKS = b"masks of the report's pictures"  # public, so that two reports hide the same patches
GREY = 0.5


def samples(phases: list[ReadyPhase], latest: Loaded) -> list[dict[str, str]]:
    """One PNG per image with the text below it; empty where the last phase has no public held-out images to show."""
    phase = phases[latest.position.phase]
    held = phase.measured
    if held is None or phase.settings.objective in ("classify", "text") or not (held.has_loss or held.classes):
        return []
    model = build(phase.shape, phase.settings.objective)
    select(model, phase.settings.trainable)
    model.load_state_dict(latest.state_dict(model.state_dict()))
    model.eval()
    inputs = first_usable(held)
    if isinstance(model, MaskedAutoencoder):
        return reconstructions(model, inputs, held.spec)
    assert isinstance(model, Captioner) and phase.text is not None
    written = greedy_captions(model, inputs["images"], phase.text, length=phase.shape.text_length)
    if held.text is not None:
        truths = [phase.text.decode(row.tolist()) for row in inputs["tokens"]]
    else:
        truths = [held.class_names[label][0] for label in inputs[TARGET].tolist()]
    pictures = [png(pixels(image, held.spec)) for image in inputs["images"]]
    return [{"png": p, "caption": c, "truth": t} for p, c, t in zip(pictures, written, truths, strict=True)]


def first_usable(held: HeldOut) -> dict[str, Tensor]:
    """The inputs of the first SAMPLES records that can be read, or of as many as there are."""
    found: list[dict[str, Tensor]] = []
    with closing(BatchReader(held.index, held.spec, held.text, mask_key=MASKS)) as reader:
        for record in held.ids:
            batch = reader.read(np.array([record]), 0)
            found += [batch.inputs] if bool(batch.present.all()) else []
            if len(found) == SAMPLES:
                break
    if not found:
        raise RecipeError(f"{held.evaluation.path}: no record can be read any more; restore them")
    return {name: torch.cat([inputs[name] for inputs in found]) for name in found[0]}


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
