"""Models on an encoder of timm or Hugging Face: our head on its pooled features, our text decoder on its tokens.

Parameters that the loss cannot depend on, such as the token that stands for masked patches, are frozen: there is
nothing to clip or to train.
"""

from __future__ import annotations

from torch import Tensor, nn

from murmuration.model.body import Body, Facts, facts_of, make_body, token_facts_of
from murmuration.model.captioner import Captioner
from murmuration.model.classifier import Classifier
from murmuration.model.drop import RowKeys
from murmuration.model.encoder import check_images
from murmuration.model.named import Named
from murmuration.model.settings import SettingsError, Shape


def named_of(shape: Shape) -> Named:
    if shape.named is None:
        raise SettingsError('the model names no encoder; set model.family to "timm" or "hf", and model.name.')
    return shape.named


def body_of(shape: Shape, facts: Facts) -> Body:
    body = make_body(named_of(shape), shape.image_size)
    freeze(body, facts.unused)
    return body


def freeze(body: Body, unused: frozenset[str]) -> None:
    for name, parameter in body.named_parameters():
        if name in unused:
            parameter.requires_grad_(False)


class NamedClassifier(Classifier):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.body = body_of(shape, facts_of(named_of(shape), shape.image_size))
        self.add_head(shape)

    def features(self, images: Tensor) -> Tensor:
        check_images(images, self.shape.image_size)
        return self.body(images)


class NamedCaptioner(Captioner):
    """The text decoder attends to all tokens of the encoder, class and register tokens included, as the library orders
    them; the encoder has told them their places."""

    def __init__(self, shape: Shape) -> None:
        nn.Module.__init__(self)  # no encoder of ours
        self.shape, self.row_keys = shape, RowKeys()
        facts = token_facts_of(named_of(shape), shape.image_size)
        self.body = body_of(shape, facts)
        self._add_text_decoder(shape, facts.width, placed=False)

    def tokens(self, images: Tensor, kept: Tensor | None = None) -> Tensor:
        if kept is not None:
            raise ValueError(f"{self.shape.named} reads whole pictures; pass no `kept`.")
        check_images(images, self.shape.image_size)
        return self.body.tokens(images)

    def encode_images(self, images: Tensor) -> Tensor:
        return self.decoder_embed(self.tokens(images)) + self.decoder_image_type_embedding
