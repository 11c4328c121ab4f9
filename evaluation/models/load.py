"""A trained model to compute with: `murmuration.load(DIR)`, of an export or a run directory.

model = murmuration.load("my-model")
images = model.see(["a.jpg", "b.png"])    # float32 [2, 3, side, side], as in the evaluation
model(images)                             # a classifier's logits, or else the features
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from murmuration.data.decode.augment import SteadyView, mask_noise
from murmuration.data.decode.record import PictureMaker
from murmuration.data.draw.normalisation import Normalisation
from murmuration.data.text.encoder import TextEncoder
from murmuration.evaluation.errors import EvaluationError
from murmuration.evaluation.models.library import HEAD
from murmuration.evaluation.models.subject import Subject
from murmuration.evaluation.models.weights import Evaluated, Sizes, features_of, open_model, open_text
from murmuration.model.build import Model
from murmuration.model.captioner import Captioner
from murmuration.model.classifier import Classifier
from murmuration.model.mae import MaskedAutoencoder
from murmuration.train.measures.captions import CaptionWriter
from murmuration.train.measures.zero_shot import class_scores

MASKS = b"masks of the pictures that a model is used on"  # public, so that the same patches are hidden each time


class LoadedModel(nn.Module):
    """In evaluation mode, without gradients. Pictures are tensors from `see`, which reads them as evaluations do."""

    def __init__(self, subject: Subject, found: Evaluated) -> None:
        super().__init__()
        self.subject, self.found = subject, found
        self.body: Model = found.model
        self.view: SteadyView = found.view
        self.eval()

    @property
    def image_size(self) -> int:
        return self.found.shape.image_size

    @property
    def pixels(self) -> Normalisation:
        """Mean and standard deviation by which `see` normalises colours from 0 to 1."""
        return self.found.pixels

    @property
    def classifies(self) -> bool:
        """Whether it has classes: a published encoder comes without a head."""
        lacks = any(name.startswith(HEAD) for name in self.found.report.left_as_initialised)
        return isinstance(self.body, Classifier) and not lacks

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of a classifier's outputs: from its list of classes, or else their numbers; empty for other models."""
        if not isinstance(self.body, Classifier) or not self.classifies:
            return ()
        known, outputs = self.found.class_names, self.body.shape.head.classes
        return (*known, *(str(number) for number in range(len(known), outputs)))

    @cached_property
    def text(self) -> TextEncoder:
        """A captioner's tokenizer."""
        return open_text(self.subject, self.found, None)

    def see(self, pictures: Sequence[str | os.PathLike[str] | bytes]) -> Tensor:
        """Files, or the bytes of files -> [B, 3, side, side]: `view` of each, colours normalised. BadRecord for what is
        no picture."""
        maker = PictureMaker(self.image_size, self.view)
        read = [data if isinstance(data, bytes) else Path(data).read_bytes() for data in pictures]
        cut = np.stack([maker.make(data, 0, 0) for data in read])
        seen = self.pixels.of(torch.from_numpy(cut), torch.ones(len(cut), dtype=torch.bool))
        return seen.to(next(self.body.parameters()).device)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """A classifier's logits [B, classes], or else the features [B, width]."""
        if isinstance(self.body, Classifier) and self.classifies:
            return self.body.logits(images)
        return self.features(images)

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """[B, width], those that `evaluate probe` takes: see docs/evaluation.md."""
        return features_of(self.found, images, "dpcap")

    @torch.no_grad()
    def shares(self, images: Tensor) -> Tensor:
        """[B, classes] from 0 to 1: the softmax, or each class by itself where it was trained so."""
        if not isinstance(self.body, Classifier) or not self.classifies:
            raise EvaluationError("this model has no classes; load a classifier, or ask a captioner for names")
        logits = self.body.logits(images).float()
        return logits.softmax(dim=1) if self.body.shape.head.loss == "softmax" else logits.sigmoid()

    @torch.no_grad()
    def captions(self, images: Tensor, beams: int = 1) -> list[str]:
        """Greedy ones, or the likeliest that a beam of this width meets."""
        model, text = self._captioner(), self.text
        written = CaptionWriter(model, text, model.shape.text_length).beam(model.encode_images(images), beams)
        return [text.decode(words) for words in written]

    @torch.no_grad()
    def surprise(self, images: Tensor, names: Sequence[str], templates: tuple[str, ...]) -> Tensor:
        """[B, names]: nats per token of each name in the templates, such as "a photo of a {}"; the lowest fits best."""
        return class_scores(self._captioner(), images, tuple((name,) for name in names), templates, self.text)

    def masked(self, images: Tensor, first: int = 0) -> dict[str, Tensor]:
        """The inputs of a masked autoencoder, whose hidden patches depend on the picture's number alone."""
        if not isinstance(self.body, MaskedAutoencoder):
            raise EvaluationError("this model fills in no patches; load a masked autoencoder")
        noise = [mask_noise(MASKS, 0, first + row, self.body.shape.patches) for row in range(len(images))]
        return {"images": images, "mask_noise": torch.from_numpy(np.stack(noise)).to(images.device)}

    def _captioner(self) -> Captioner:
        if not isinstance(self.body, Captioner):
            raise EvaluationError("this model writes no captions; load a captioner")
        return self.body


def load(path: str | os.PathLike[str], best: bool = False) -> LoadedModel:
    """The model in an export, a run directory (its last checkpoint, or with `best` the one that run.keep_best kept), or
    anything else that `evaluate` takes but for AlexNet. Everything that it needs lies beside the weights; nothing is
    downloaded."""
    subject = Subject.at(Path(path), best=best)
    return LoadedModel(subject, open_model(subject, Sizes(), headless=True))
