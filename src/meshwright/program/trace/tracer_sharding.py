"""Asking a traced array for its sharding, which Flax does whenever a random stream advances."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from jax.core import Tracer


@contextmanager
def brief_about_sharding() -> Generator[None]:
    """Do not look for the origin of a traced array that is asked for its sharding.

    Traced arrays have none. Before 0.12, JAX looks up all operations that the array comes from to
    say so, and Flax drops the message: that was half of the time it took to trace a deep model
    with dropout.
    """

    def sharding(tracer: Any) -> None:
        raise AttributeError(f"a traced array ({tracer.aval}) has no `sharding`")

    with mock.patch.object(Tracer, "sharding", property(sharding)):
        yield
