"""What a learning rate that was chosen at one width is multiplied by at another, weight by weight.

Let a weight add up m inputs whose coordinates are of order 1, and let a step move each of its elements by u. Then the
step moves what the layer computes by the sum of u·x over the m inputs, and this is to stay as it was.

- *Noise* is independent in all elements, so the sum grows as u·√m. Its size does not depend on width: σC/(qn) in each
  element of the mean gradient. SGD moves an element by rate·noise. Adam divides by the root of the second moment, which
  is the same noise where noise is the larger part, so that u is about the rate. The rate must fall as m^(-1/2).
- *Signal* is a sum of few outer products, aligned with the inputs. Where it fills the second moment (batches so large
  that noise is not felt), Adam moves each element by about the rate, and the sum grows as u·m. The rate must fall as
  1/m: ordinary µP (Yang et al., arXiv 2203.03466; the same as a bound on spectral norms: 2310.17813).
- Where noise fills the second moment, Adam is SGD with a constant rate, and clipping gives the gradient of all weights
  a length of C at most, whatever the width. With a rate of m^(-1/2), what signal in one layer does to the model's
  output also stays the same: it is the rate times the product of two lengths, of the clipped gradient, which stays, and
  of the output's derivative by the layer's weights, which grows as √m (last weights of order m^(-1/2), as this random
  walk leaves them, times inputs of length √m). Coordinates inside the model follow the signal less and less, as
  m^(-1/2); a rate that kept these would let noise grow as √m.
- Biases, norms, tokens and rows of embeddings have m = 1, and filters of patches a fixed m: their rate stays.
- LAMB's trust ratio moves an element by the rate times the root mean square of the weights, which for a matrix is of
  order m^(-1/2) already: no factor for noise, m^(-1/2) for signal. A weight that starts at zero has no such size:
  its first step is Adam's, and those that follow are multiples of it, so no one factor serves both.

Decay per step, rate times decay, stays what it was. None of this touches ε: a step's noised sum is public here.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from murmuration.model.classifier import Classifier
from murmuration.model.fan_in import Widths, fan_in_ratios
from murmuration.model.settings import SettingsError
from murmuration.train.config.optimizer import LimitedBy, Optimizer, OptimizerType
from murmuration.train.config.section import RecipeError


def exponent(kind: OptimizerType, limited_by: LimitedBy, trust_ratio: bool) -> float:
    """The power of 1/m with which a rate falls."""
    adam = 0.5 if limited_by == "noise" else 1.0
    return adam - 0.5 if kind == "LAMB" and trust_ratio else adam


@dataclass(frozen=True)
class WidthFactors:
    """The factors of one optimizer and model."""

    kind: OptimizerType
    limited_by: LimitedBy
    ratios: dict[str, float]
    """By trained parameter: its inputs over those at the width at which the rate was chosen."""
    start_at_zero: frozenset[str]

    @staticmethod
    def of(settings: Optimizer, model: nn.Module) -> WidthFactors | None:
        """None if rates are not transferred. `model`: as it is trained, before an engine shards it."""
        if (given := settings.width_transfer) is None:
            return None
        base = Widths(given.size, given.width, given.decoder_width, given.mae_decoder_width)
        try:
            ratios = fan_in_ratios(model, base)
        except SettingsError as error:
            raise RecipeError(str(error)) from None
        zero = {"head.weight"} if isinstance(model, Classifier) and model.shape.head.scale == 0 else set[str]()
        return WidthFactors(settings.type, given.limited_by, ratios, frozenset(zero))

    def of_parameter(self, name: str, trust_ratio: bool) -> float:
        """`trust_ratio`: whether one applies to it, where the optimizer has any."""
        ratio = self.ratios[name]
        if self.kind == "LAMB" and trust_ratio and name in self.start_at_zero and ratio != 1:
            raise RecipeError(
                f"optimizer.width_transfer has no factor for {name}, which starts at zero and which LAMB scales by its "
                "size; set model.head_scale, or give it trust_ratio false in optimizer.params.rules, or use AdamW"
            )
        return ratio ** -exponent(self.kind, self.limited_by, trust_ratio)
