"""A model of one's own, trained privately on a dataset of one's own: python -m docs.own_model RUN_DIR [ENGINE]."""

import sys
from functools import partial

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import murmuration

x = torch.randn(2000, 8, generator=torch.Generator().manual_seed(1))
y = x[:, 0] - 0.5 * x[:, 1]
with murmuration.PrivateTraining(
    lambda: nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)), TensorDataset(x, y),
    murmuration.Settings(
        privacy=murmuration.Privacy(epsilon=4, expected_batch=200), steps=100, dataset="a plane, version 1",
        run_dir=sys.argv[1], engine=(sys.argv[2:] or ["local"])[0],
    ),
    loss=lambda model, batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1], reduction="none"),
    optimizer=partial(optim.AdamW, lr=0.01), schedule=partial(optim.lr_scheduler.CosineAnnealingLR, T_max=100),
    example=(torch.zeros(8), torch.zeros(())),
) as training:  # fmt: skip
    for _ in training:
        pass  # look at training.model, or measure it on public records with training.evaluate(...)
    print(training.finish())
