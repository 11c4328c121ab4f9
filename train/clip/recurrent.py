"""Recurrent layers and cells, written as functions that take one weight at a time.

PyTorch runs a whole LSTM as one function of all its weights, for which vmap has no rule. Here every step is a product
of its own; the book joins those of one weight (`accumulator.joined`). The formulas are those of `torch.nn`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from murmuration.train.clip.isolated import is_of_records
from murmuration.train.clip.rule import ClipError
from murmuration.train.clip.tracker import ParameterTracker

State = tuple[Tensor, ...]
Step = Callable[[Tensor, Tensor, State], State]
"""Takes what comes from the input, what comes from the state before, and that state; the output is the first of the
new one."""


def _lstm(given: Tensor, before: Tensor, state: State) -> State:
    enter, forget, cell, leave = (given + before).chunk(4, -1)
    kept = forget.sigmoid() * state[1] + enter.sigmoid() * cell.tanh()
    return leave.sigmoid() * kept.tanh(), kept


def _gru(given: Tensor, before: Tensor, state: State) -> State:
    of_input, of_state = given.chunk(3, -1), before.chunk(3, -1)
    reset, update = (of_input[0] + of_state[0]).sigmoid(), (of_input[1] + of_state[1]).sigmoid()
    new = (of_input[2] + reset * of_state[2]).tanh()
    return (((1 - update) * new + update * state[0]),)


def _tanh(given: Tensor, before: Tensor, state: State) -> State:
    del state
    return ((given + before).tanh(),)


def _relu(given: Tensor, before: Tensor, state: State) -> State:
    del state
    return ((given + before).relu(),)


def _layers(function: Any, step: Step) -> Callable[..., tuple[Tensor, ...]]:
    def run(
        tracker: ParameterTracker, input: Tensor, hx: Any, weights: Any, *settings: Any
    ) -> tuple[Tensor, ...]:  # fmt: skip
        if not isinstance(settings[0], bool):
            packed(tracker)
        bias, layers, dropout, training, bidirectional, batch_first = settings
        states: State = tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)
        if not is_of_records(input):
            return tracker.otherwise(function, (input, hx, weights, *settings), {})
        each, directions = 2 + 2 * bias, 2 if bidirectional else 1
        if len(weights) != each * layers * directions:
            raise ClipError("an LSTM with proj_size has no clipping rule; leave it out")
        last: list[State] = []
        with tracker:
            x = input.transpose(0, 1) if batch_first else input
            for layer in range(layers):
                if layer and dropout and training:
                    x = F.dropout(x, dropout)
                outputs = []
                for direction in range(directions):
                    number = layer * directions + direction
                    w_ih, w_hh, *biases = weights[number * each : (number + 1) * each]
                    b_ih, b_hh = biases or (None, None)
                    given = F.linear(x, w_ih, b_ih)
                    state = tuple(whole[number] + torch.zeros_like(x[0, :, :1]) for whole in states)
                    steps: list[Tensor] = []
                    for own in given.flip(0) if direction else given:
                        state = step(own, F.linear(state[0], w_hh, b_hh), state)
                        steps.append(state[0])
                    outputs.append(torch.stack(steps[::-1] if direction else steps))
                    last.append(state)
                x = torch.cat(outputs, -1) if directions > 1 else outputs[0]
            out = x.transpose(0, 1) if batch_first else x
            return out, *(torch.stack(parts) for parts in zip(*last, strict=True))

    return run


def _cell(function: Any, step: Step) -> Callable[..., Any]:
    def run(
        tracker: ParameterTracker, input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:  # fmt: skip
        states: Sequence[Tensor] = hx if isinstance(hx, (tuple, list)) else (hx,)
        if not is_of_records(input):
            return tracker.otherwise(function, (input, hx, w_ih, w_hh, b_ih, b_hh), {})
        with tracker:
            state = tuple(own + torch.zeros_like(input[..., :1]) for own in states)
            new = step(F.linear(input, w_ih, b_ih), F.linear(state[0], w_hh, b_hh), state)
        return new if len(new) > 1 else next(iter(new))

    return run


def packed(*given: Any, **settings: Any) -> Any:
    del given, settings
    raise ClipError(
        "packed sequences put records of different lengths side by side; give the layer padded sequences, and mask "
        "their loss"
    )


RECURRENT_RULES = {
    torch._VF._pack_padded_sequence: packed,  # pyright: ignore[reportAttributeAccessIssue]
    torch.lstm: _layers(torch.lstm, _lstm),
    torch.gru: _layers(torch.gru, _gru),
    torch.rnn_tanh: _layers(torch.rnn_tanh, _tanh),
    torch.rnn_relu: _layers(torch.rnn_relu, _relu),
    torch.lstm_cell: _cell(torch.lstm_cell, _lstm),
    torch.gru_cell: _cell(torch.gru_cell, _gru),
    torch.rnn_tanh_cell: _cell(torch.rnn_tanh_cell, _tanh),
    torch.rnn_relu_cell: _cell(torch.rnn_relu_cell, _relu),
}
