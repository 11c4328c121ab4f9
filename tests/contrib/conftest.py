"""Shards for these tests are made as for those of the data."""

from __future__ import annotations

from tests.data.conftest import picture, write_tar

__all__ = ["picture", "write_tar"]
