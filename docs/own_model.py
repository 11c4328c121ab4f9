"""A model of one's own, trained privately on tensors in memory: python -m docs.own_model RUN_DIR."""

import sys

import torch
from torch import nn

import murmuration


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, inputs):  # one loss per record; with `views=K`, one for each of its rows
        return (self.layers(inputs["x"]).squeeze(1) - inputs["y"]).square()


x = torch.randn(2000, 8, generator=torch.Generator().manual_seed(1))
y = x[:, 0] - 0.5 * x[:, 1]
with murmuration.PrivateTraining(
    Regression(), lambda numbers: {"x": x[numbers], "y": y[numbers]},
    synthetic=lambda size, seed: {"x": torch.randn(size, 8), "y": torch.randn(size)},
    records=2000, dataset="a line in 8 dimensions, version 1", run_dir=sys.argv[1],
    expected_batch=200, steps=100, epsilon=4,
) as training:  # fmt: skip
    print(training.prove())
    for step in training.steps():
        training.step(step, learning_rate=0.01)
        if step % 20 == 0:
            training.save()
            print(f"step {step}  ε {training.epsilon():.3f}")
    print(training.finish())
