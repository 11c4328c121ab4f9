"""A map-style dataset as what a `FunctionReader` asks for: PyTorch's, Hugging Face's, or anything with len() and []."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from murmuration.accounting.errors import InputError
from murmuration.data.batch.function_reader import Read


def is_dataset(data: Any) -> bool:
    """A dict or a tensor has len() and [], too, but its rows are no items."""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Mapping | Tensor | str)


def as_read(data: Any, records: int | None, views: int = 1) -> tuple[Read, int]:
    """The function, and how many records there are. A dataset is asked `views` times for each record of a step."""
    if is_dataset(data):
        if records not in (None, len(data)):
            raise InputError(f"records = {records}, but the dataset has {len(data)}; leave records out")

        def read(number: np.ndarray) -> Mapping[str, Tensor]:
            seen = [as_inputs(data[int(number[0])]) for _ in range(views)]
            return seen[0] if views == 1 else {name: torch.cat([each[name] for each in seen]) for name in seen[0]}

        return read, len(data)
    if not callable(data):
        raise InputError(
            f"data= must be a dataset with len() and [], or a function read(number), but is a {type(data).__name__}; "
            "an iterable one has no numbered records, which Poisson samples need"
        )
    if records is None:
        raise InputError("a function read(number) does not say how many records there are; give records=")
    read_of_program: Read = data  # pyright: ignore[reportAssignmentType]
    return read_of_program, records


def as_inputs(item: Any) -> dict[str, Tensor]:
    """One item as the model's inputs, with one row: a dict keeps its names, a tuple's are its places.

    >>> as_inputs(([1.5, 2.0], 7))
    {'0': tensor([[1.5000, 2.0000]]), '1': tensor([7])}
    """
    if isinstance(item, (tuple, list)):
        named = {str(place): value for place, value in enumerate(item)}
    elif isinstance(item, Mapping):
        named = {str(name): value for name, value in item.items()}
    else:
        raise InputError(f"an item must be a dict or a tuple of tensors and numbers, but is a {type(item).__name__}")
    found = dict[str, Tensor]()
    for name, value in named.items():
        try:
            found[name] = torch.as_tensor(value).unsqueeze(0)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(
                f"an item's {name} is a {type(value).__name__}, of which no tensor can be made; transform it in the "
                "dataset"
            ) from None
    return found
