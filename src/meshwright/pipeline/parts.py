"""Stages in every form a user writes them: NNX and Linen modules, functions, pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from meshwright.errors import UserError


@dataclass(frozen=True)
class Part:
    """A piece of a model as a pure function.

    Attributes:
        apply: from (params, state, x) to (y, state).
        params: what is trained.
        state: what else it remembers: statistics, counters, random streams.
        rebuild: from (params, state) to what the user gave, with these values.
    """

    apply: Callable[[Any, Any, Any], tuple[Any, Any]]
    params: Any
    state: Any
    rebuild: Callable[[Any, Any], Any]


def read_part(given: Any, x: Any, key: Any) -> Part:
    """Read a stage: an NNX or Linen module, a function of x, or a pair (function, params).

    Args:
        given: what the user wrote.
        x: an example of its input, as arrays or shapes; Linen modules are created for it.
        key: for the parameters of Linen modules.
    """
    if isinstance(given, nnx.Module):
        return _from_nnx(given)
    if isinstance(given, linen.Module):
        return _from_linen(given, x, key)
    if isinstance(given, tuple) and len(given) == 2 and callable(given[0]):
        function, params = given
        return Part(
            lambda params, state, x: (function(params, x), state),
            params,
            (),
            lambda params, state: (function, params),
        )
    if callable(given):
        return Part(lambda params, state, x: (given(x), state), (), (), lambda params, state: given)
    raise UserError(
        f"a stage cannot be {given!r}",
        why="it is neither a module nor a function",
        fix="give an NNX or Linen module, a function of x, or a pair (function(params, x), params)",
    )


def chain(parts: Sequence[Part]) -> Part:
    """Return parts one after another as one."""

    def apply(params: Any, state: Any, x: Any) -> tuple[Any, Any]:
        after: list[Any] = []
        for part, own, before in zip(parts, params, state, strict=True):
            x, new = part.apply(own, before, x)
            after.append(new)
        return x, tuple(after)

    return Part(
        apply,
        tuple(part.params for part in parts),
        tuple(part.state for part in parts),
        lambda params, state: [
            part.rebuild(p, s) for part, p, s in zip(parts, params, state, strict=True)
        ],
    )


def shape_after(part: Part, x: Any) -> Any:
    """Return the shapes of what a part makes of an input."""
    return jax.eval_shape(lambda p, s, x: part.apply(p, s, x)[0], part.params, part.state, x)


def _from_nnx(module: nnx.Module) -> Part:
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)

    def apply(params: Any, state: Any, x: Any) -> tuple[Any, Any]:
        merged: Any = nnx.merge(graphdef, params, state, copy=True)
        y = merged(x)
        return y, nnx.state(merged, nnx.Not(nnx.Param))

    return Part(apply, params, rest, lambda params, state: nnx.merge(graphdef, params, state))


def _from_linen(module: linen.Module, x: Any, key: Any) -> Part:
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), x)
    variables = dict(module.init(key, zeros))
    params = variables.pop("params", {})

    def apply(params: Any, state: Any, x: Any) -> tuple[Any, Any]:
        y, changed = module.apply({"params": params, **state}, x, mutable=list(state))
        return y, {**state, **changed}

    return Part(apply, params, variables, lambda params, state: (module, params))
