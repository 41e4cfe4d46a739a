"""Masks that depend on no token: how far back, and ahead, they let rows see."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshwright.program.evaluate.evaluator import Evaluator
from meshwright.program.jaxpr.equations import ClosedJaxpr
from meshwright.program.kernels.masks import program_key

LOW = -9999.0
"""Scores at most this much are masked: their exponentials vanish beside any other."""
_FAR = 2**31 - 1


class Span(NamedTuple):
    """How many positions before their rows keys are, at least and at most."""

    least: int
    most: int

    def excludes(self, window: int) -> bool:
        """Whether it has no later keys; with a window, none that are so much earlier."""
        return self.most < window if window else self.least >= 0


_known: dict[Hashable, tuple[Span, Span, Span]] = {}


def mask_spans(program: ClosedJaxpr, row: int, key: int) -> tuple[Span, Span, Span]:
    """Return where the value of a program is not zero, where it is zero, and where it is not low.

    It is evaluated without being stored: compilers fuse it into the reductions.
    """
    name = program_key(program), row, key
    if name not in _known:
        with jax.ensure_compile_time_eval():
            found = jax.device_get(jax.jit(lambda: _facts(program, row, key))())
        _known[name] = tuple(Span(int(least), int(most)) for least, most in found)
    return _known[name]


def _facts(program: ClosedJaxpr, row: int, key: int) -> list[tuple[Any, Any]]:
    (value,) = Evaluator().run(program, [])
    at, keys = (jax.lax.broadcasted_iota(jnp.int32, value.shape, dim) for dim in (row, key))
    before = at - keys
    low = jnp.zeros_like(value, bool) if value.dtype == bool else value <= LOW
    return [
        (jnp.where(where, before, _FAR).min(), jnp.where(where, before, -_FAR).max())
        for where in (value != 0, value == 0, ~low)
    ]
