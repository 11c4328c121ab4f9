"""Image-text models of transformers, with one loss per record: a captioner whose parts are the library's."""

from __future__ import annotations

from torch import Tensor, nn

from murmuration.model.captioner import mean_over
from murmuration.model.drop import RowKeys
from murmuration.model.image_text_body import ImageTextBody, facts_of
from murmuration.model.named_models import NamedCaptioner, freeze, named_of
from murmuration.model.settings import Shape


class ImageTextModel(NamedCaptioner):
    """In its texts, whatever follows the end is -1: tokenizers of these models have words at every other number."""

    body: ImageTextBody

    def __init__(self, shape: Shape) -> None:
        nn.Module.__init__(self)  # no decoder of ours
        self.shape, self.row_keys = shape, RowKeys()
        named = named_of(shape)
        self.body = ImageTextBody(named)
        freeze(self.body, facts_of(named, shape.image_size, shape.text_length).unused)

    def encode_images(self, images: Tensor) -> Tensor:
        return self.tokens(images)

    def decode(self, memory: Tensor, tokens: Tensor) -> Tensor:
        return self.body.logits(memory, tokens.clamp(min=0))

    def caption_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        return mean_over(targets >= 0, logits, targets.clamp(min=0))
