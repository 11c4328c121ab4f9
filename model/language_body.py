"""Builds a causal language model of transformers from the config of its folder, as the library does; a head that is the
table of words is listed once among its weights."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from murmuration.model.body import Body, drop_nothing
from murmuration.model.named import Named, NamedError, cannot_be_built, of_one_record
from murmuration.model.safety import CouplingError, refuse_coupling


class TiedHead(nn.Module):
    """A head whose weight is the table of words; the table alone lists it, so that no weight has two names."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self._table = (table,)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self._table[0].weight)


def listed_once(net: Any) -> Any:
    table, head = net.get_input_embeddings(), net.get_output_embeddings()
    if head is not None and head.weight is table.weight:
        net.set_output_embeddings(TiedHead(table))
    return net


class LanguageBody(Body):
    """A causal language model of transformers, by the config of its folder."""

    def __init__(self, named: Named) -> None:
        super().__init__()
        from transformers.models.auto.configuration_auto import AutoConfig
        from transformers.models.auto.modeling_auto import AutoModelForCausalLM

        given = of_one_record(named.arguments)
        try:
            config = AutoConfig.for_model(given.pop("model_type"), **given)
            # PyTorch's fused attention knows no cap on its scores.
            how = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
            net: Any = AutoModelForCausalLM.from_config(config, attn_implementation=how, dtype=torch.float32)
        except Exception as error:  # whatever the library raises on a config
            raise cannot_be_built(named, "a causal language model", error) from None
        self.net = drop_nothing(listed_once(net))

    def forward(self, images: Tensor) -> Tensor:
        """Tokens -> logits. Padding follows the text, where no real token sees it, so nothing has to be masked."""
        places = torch.arange(images.shape[1], device=images.device).expand_as(images)
        seen = torch.ones_like(images)
        return self.net(input_ids=images, attention_mask=seen, position_ids=places, use_cache=False).logits

    def tokens(self, images: Tensor) -> Tensor:
        raise TypeError("a language model sees no images")


@lru_cache(maxsize=64)
def width_of(named: Named, length: int) -> int:
    """Of the hidden states; refuses a model that couples records or cannot read `length` tokens."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        net: Any = LanguageBody(named).net
    try:
        refuse_coupling(net)
    except CouplingError as error:
        raise NamedError(f"{named} cannot be trained record by record: its layer {error}") from None
    most = getattr(net.config, "max_position_embeddings", None)
    if isinstance(most, int) and length > most:
        raise NamedError(f"{named} has {most} positions; set model.text_length to at most {most}.")
    return net.get_input_embeddings().embedding_dim
