"""Running a program output by output: what is computed alike is compiled once.

The program that initializes a model draws each parameter by code of its own. Compilers may take
longer for it than for the step, although most outputs differ in nothing but their random key. Later
models of the same process use what earlier ones compiled.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from meshwright.program.blocks.parts import Part
from meshwright.program.jaxpr.equations import Jaxpr, Var
from meshwright.trees import is_key

REPEATED = 2
"""Parts that share equations are computed apart if they have at most this many times as many
equations as the program."""

MOST_KINDS = 512
"""Kinds of parts whose functions are remembered; beyond, the oldest are forgotten."""

_functions: dict[Hashable, list[tuple[Part, Any]]] = {}


def forget_functions() -> None:
    """Forget all compiled functions, so that parts are compiled anew."""
    _functions.clear()


def repeat_little(parts: Sequence[Part]) -> bool:
    """Whether computing parts apart repeats little work that they share."""
    apart = sum(len(part.eqns) for part in parts)
    together = len({id(eqn) for part in parts for eqn in part.eqns})
    return apart <= REPEATED * together


class ProgramsByKind:
    """Computes parts of one program; those that are alike share a compiled function.

    Args:
        whole: the program.
        known: the values that the parts read.
        compiler_options: for every function.
    """

    def __init__(
        self, whole: Jaxpr, known: Mapping[Var, Any], compiler_options: Mapping[str, Any] | None
    ) -> None:
        self._whole, self._known = whole, known
        self._options = dict(compiler_options or {}) or None

    def compute(self, part: Part, sharding: Sharding) -> Any:
        """Return the output of a part."""
        return self._compiled(part, sharding)(*map(self._input, part.inputs))

    def compute_rows(self, parts: Sequence[Part], sharding: Sharding) -> Any | None:
        """Return the outputs of parts as rows of one array; None if they are not alike."""
        first = parts[0]
        if not all(first.is_like(part) for part in parts[1:]):
            return None
        inputs = zip(*([self._input(v) for v in part.inputs] for part in parts), strict=True)
        compiled = self._compiled(first, sharding, rows=len(parts))
        return compiled(*(np.stack(rows) for rows in inputs))

    def _input(self, variable: Var) -> Any:
        value = self._known[variable]
        return np.asarray(jax.random.key_data(value)) if is_key(value.dtype) else value

    def _compiled(self, part: Part, sharding: Sharding, rows: int | None = None) -> Any:
        formats = tuple(self._format(variable) for variable in part.inputs)
        options = tuple((self._options or {}).items())
        kind = (part.outline, formats, sharding, rows, options)
        for known, function in _functions.get(kind, ()):
            if known.is_like(part):
                return function
        one = self._function(part)
        several = jax.vmap(lambda _, *inputs: one(*inputs))
        function = jax.jit(
            one if rows is None else lambda *inputs: several(jnp.arange(rows), *inputs),
            out_shardings=sharding,
            compiler_options=self._options,
        )
        if len(_functions) >= MOST_KINDS:
            del _functions[next(iter(_functions))]
        _functions.setdefault(kind, []).append((part, function))
        return function

    def _format(self, variable: Var) -> Hashable:
        """Return what a function depends on of an input, besides its value."""
        value = self._known[variable]
        kind = str(jax.random.key_impl(value)) if is_key(value.dtype) else ""
        return np.shape(value), str(value.dtype), kind

    def _function(self, part: Part) -> Any:
        """Return a function of the inputs, with the words of random keys instead of the keys."""
        compute = part.function(self._whole)
        known = [self._known[variable] for variable in part.inputs]
        kinds = [jax.random.key_impl(value) if is_key(value.dtype) else None for value in known]

        def of_words(*inputs: Any) -> Any:
            return compute(
                *(
                    x if kind is None else jax.random.wrap_key_data(x, impl=kind)
                    for x, kind in zip(inputs, kinds, strict=True)
                )
            )

        return of_words
