"""A model of one's own, trained privately on real handwritten digits: python -m docs.own_model RUN_DIR [ENGINE]."""

import sys
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import murmuration

images, labels = (torch.from_numpy(values) for values in load_digits(return_X_y=True))
images = images.float().view(-1, 1, 8, 8) / 8 - 1
private, held_out = slice(0, 1437), slice(1437, None)
with murmuration.PrivateTraining(
    lambda: nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
    ),
    TensorDataset(images[private], labels[private]),
    murmuration.Settings(
        privacy=murmuration.Privacy(epsilon=3, expected_batch=240), steps=60, dataset="digits of scikit-learn",
        public={"evaluation": "the last 360 digits"}, run_dir=sys.argv[1], engine=(sys.argv[2:] or ["local"])[0],
    ),
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
    optimizer=partial(optim.SGD, lr=0.5, momentum=0.9),
    schedule=partial(optim.lr_scheduler.CosineAnnealingLR, T_max=60),
    example=(torch.zeros(1, 8, 8), torch.tensor(0)),
) as training:  # fmt: skip
    for _ in training:
        pass

    def top_1(model: nn.Module) -> dict[str, float]:
        return {"top-1": float((model(images[held_out]).argmax(1) == labels[held_out]).float().mean())}

    print(training.evaluate(top_1))
    print(training.finish())
