"""The model of a phase: fresh, from its own checkpoint, or with the weights of what came before; and what it trains."""

from __future__ import annotations

from torch import nn

from model.build import build
from model.trainable import select
from train.checkpoint import Loaded
from train.engine import ShardedEngine
from train.optim_settings import Carry
from train.recipe import ReadyPhase
from train.warm_start import hand_over

FIRST_MOMENT = "exp_avg"


def initial_model(phase: ReadyPhase, loaded: Loaded | None, resumed: bool) -> nn.Module:
    """Weights first, then the choice of what is trained; adapters belong to the phase, so its own come after them."""
    settings = phase.settings
    model = build(phase.shape, settings.objective)
    if loaded is not None and not resumed:
        hand_over(loaded.weights(), model)
    select(model, settings.trainable)
    if loaded is not None and resumed:
        model.load_state_dict(loaded.state_dict(model.state_dict()))
    return model


def carry_over(loaded: Loaded, engine: ShardedEngine, how: Carry) -> None:
    """Optimizer state from the end of the phase before. Learning rates start anew in any case.

    Bu et al. (2402.18752) hand AdamW over with its first moment zeroed: it points where public gradients led, while
    the second one is a scale that holds. The step count stays with it, so that no correction inflates it again.
    """
    if how == "none" or not loaded.manifest["optimizer_step"]:
        return  # a phase that was ended by hand before its first step has no state to give
    loaded.restore_optimizer(engine)
    if how == "second-moment":
        for shard in engine.shards():
            shard.state[FIRST_MOMENT].zero_()
