"""Models are tiny and take one thread; shards are made as for tests of the data."""

from __future__ import annotations

from tests.data.conftest import picture, write_tar
from tests.train.conftest import _one_thread

__all__ = ["_one_thread", "picture", "write_tar"]
