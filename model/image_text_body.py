"""Builds an image-text model of transformers from the config of its folder, as the library does.

The library's own forward pass looks for the image's place in each text, and compares how many places it found. Here the
place is the same for every record: after the first token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from murmuration.model.body import Body, drop_nothing, unused_by
from murmuration.model.language_body import listed_once
from murmuration.model.named import Named, NamedError, cannot_be_built, of_one_record
from murmuration.model.safety import CouplingError, refuse_coupling


class ImageTextBody(Body):
    def __init__(self, named: Named) -> None:
        super().__init__()
        from transformers.models.auto.configuration_auto import AutoConfig
        from transformers.models.auto.modeling_auto import AutoModelForImageTextToText

        given = of_one_record(named.arguments)
        try:
            config = AutoConfig.for_model(given.pop("model_type"), **given)
            net: Any = AutoModelForImageTextToText.from_config(
                config, attn_implementation="sdpa", dtype=torch.float32
            )  # fmt: skip
        except Exception as error:  # whatever the library raises on a config
            raise cannot_be_built(named, "an image-text model", error) from None
        self.net = drop_nothing(listed_once(net))

    def forward(self, images: Tensor) -> Tensor:
        return self.tokens(images).mean(dim=1)

    def tokens(self, images: Tensor) -> Tensor:
        """[B, places, width]: what stands for the image among the decoder's words."""
        net: Any = self.net
        return torch.stack(tuple(net.get_image_features(pixel_values=images, return_dict=True).pooler_output))

    def logits(self, seen: Tensor, words: Tensor) -> Tensor:
        """[B, T, vocabulary]: row t predicts the word after word t; the image stands behind word 0."""
        net: Any = self.net
        embedded = net.get_input_embeddings()(words)
        x = torch.cat([embedded[:, :1], seen, embedded[:, 1:]], dim=1)
        # Padding follows the text, where no real token sees it, so nothing has to be masked.
        whole = torch.ones(x.shape[:2], dtype=torch.int64, device=x.device)
        places = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        found = net.get_decoder()(inputs_embeds=x, attention_mask=whole, position_ids=places, use_cache=False)
        return net.get_output_embeddings()(found.last_hidden_state[:, seen.shape[1] :])

    @property
    def placeholder(self) -> int:
        """The word in whose places the library puts the image."""
        net: Any = self.net
        return net.config.image_token_id


@dataclass(frozen=True)
class ImageTextFacts:
    width: int
    """Of the decoder."""
    unused: frozenset[str]
    """Parameters that the decoder does not depend on, such as layers above the one whose features are taken."""


@lru_cache(maxsize=64)
def facts_of(named: Named, image_size: int, length: int) -> ImageTextFacts:
    """Refuses a model that couples records, or does not run on such images and texts."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        body = ImageTextBody(named)
        try:
            refuse_coupling(body.net)
        except CouplingError as error:
            raise NamedError(f"{named} cannot be trained record by record: its layer {error}") from None
        try:
            with torch.enable_grad():
                seen = body.tokens(torch.zeros(2, 3, image_size, image_size))
        except Exception as error:  # whatever the library raises on images of a size that it does not take
            why = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise NamedError(
                f"{named} does not run on pictures of {image_size} px ({why}); set model.image_size to the size that "
                "it is made for."
            ) from None
        unused = unused_by(body, seen)
    net: Any = body.net
    writing = {id(each) for part in (net.get_decoder(), net.get_output_embeddings()) for each in part.parameters()}
    unused -= {name for name, each in body.named_parameters() if id(each) in writing}
    most = getattr(net.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(most, int) and length + seen.shape[1] > most:
        raise NamedError(
            f"{named} has {most} positions, of which an image takes {seen.shape[1]}; set model.text_length to at most "
            f"{most - seen.shape[1]}."
        )
    return ImageTextFacts(net.get_input_embeddings().embedding_dim, unused)
