"""Language models of transformers, with one loss per text. Called as `model({"tokens": [B, T]})`.

GPT-2 is built from sizes alone. Two things differ from the library's whole model, and neither changes what is computed:
the table of words is one module that is called twice, for the words and for the logits, so that whatever gathers or
watches a module's weights does so both times; and positions have a row for each record, since a gradient that belongs
to all records at once is nobody's.

Any other is the library's own module (`model/language_body.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from murmuration.model.captioner import PAD, mean_over
from murmuration.model.inputs import Inputs, weighted
from murmuration.model.language_body import LanguageBody
from murmuration.model.settings import Shape


class WordTable(nn.Embedding):
    """Tokens -> rows of the table; or hidden states -> products with all of its rows."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight) if input.is_floating_point() else super().forward(input)


class LanguageModel(nn.Module):
    """Parameters have the names of GPT2LMHeadModel's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        # Only here: it imports the library.
        from transformers.models.gpt2.configuration_gpt2 import GPT2Config
        from transformers.models.gpt2.modeling_gpt2 import GPT2Model

        stack = shape.text
        more: Any = {"attn_implementation": "sdpa", "bos_token_id": None, "eos_token_id": None}
        config = GPT2Config(
            vocab_size=shape.vocabulary, n_positions=shape.text_length, n_embd=stack.width, n_layer=stack.depth,
            n_head=stack.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **more,
        )  # fmt: skip
        self.shape = shape
        self.transformer: Any = GPT2Model(config)
        self.transformer.wte = WordTable(shape.vocabulary, stack.width)

    def logits(self, tokens: Tensor) -> Tensor:
        """[B, T, vocabulary]; row t predicts token t + 1 from tokens 0…t; T <= text_length."""
        body = self.transformer
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = body.wte(tokens) + body.wpe(places)
        for block in body.h:
            x = block(x)
        return body.wte(body.ln_f(x))

    def counted(self, targets: Tensor) -> Tensor:
        """Which are the text's own."""
        return targets != PAD

    def forward(self, inputs: Inputs) -> Tensor:
        """Per-text losses [B]: next-token cross-entropy, mean over the text's own tokens, in fp32."""
        tokens = inputs["tokens"]
        targets = tokens[:, 1:]
        return weighted(mean_over(self.counted(targets), self.logits(tokens[:, :-1]), targets.clamp(min=0)), inputs)


class NamedLanguageModel(LanguageModel):
    """In its texts, whatever follows the end is -1: tokenizers of these models have words at every other number."""

    def __init__(self, shape: Shape) -> None:
        nn.Module.__init__(self)  # no GPT-2 of ours
        assert shape.named is not None
        self.shape, self.body = shape, LanguageBody(shape.named)

    def logits(self, tokens: Tensor) -> Tensor:
        return self.body(tokens.clamp(min=0))

    def counted(self, targets: Tensor) -> Tensor:
        return targets >= 0
