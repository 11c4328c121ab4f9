"""One thread, as the models are tiny."""

from tests.train.conftest import _one_thread  # noqa: F401
