"""A map-style dataset as what a `FunctionReader` asks for: PyTorch's, Hugging Face's, or anything with len() and []."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from murmuration.accounting.errors import InputError
from murmuration.data.batch.function_reader import Read


def as_read(data: Any, records: int | None) -> tuple[Read, int]:
    """The function, and how many records there are."""
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        if records not in (None, len(data)):
            raise InputError(f"records = {records}, but the dataset has {len(data)}; leave records out")

        def read(number: np.ndarray) -> Mapping[str, Tensor]:
            return as_inputs(data[int(number[0])])

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
    """One item as the model's inputs, with one row: a dict keeps its names, a tuple's are its places."""
    if isinstance(item, Mapping):
        named = {str(name): value for name, value in item.items()}
    elif isinstance(item, tuple | list):
        named = {str(place): value for place, value in enumerate(item)}
    else:
        raise TypeError(f"an item must be a dict or a tuple of tensors and numbers, but is a {type(item).__name__}")
    return {name: torch.as_tensor(value).unsqueeze(0) for name, value in named.items()}
