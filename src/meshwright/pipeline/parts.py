"""Layers in every form a user writes them: NNX and Linen modules, functions, pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from meshwright.errors import UserError
from meshwright.program.flops import forward_flops
from meshwright.trees import is_key

EVALUATION = {"deterministic": True, "use_running_average": True}
"""What evaluation means to a Linen module that has these attributes, as to any NNX module."""


@dataclass(frozen=True)
class Part:
    """A piece of a model as a pure function.

    Attributes:
        apply: from (params, state, x) to (y, state), in the mode the module was given in.
        evaluate: from (params, state, x) to y, in evaluation mode.
        params: what is trained.
        state: what else it remembers: statistics, counters, random streams.
        rebuild: from (params, state) to what the user gave, with these values.
    """

    apply: Callable[[Any, Any, Any], tuple[Any, Any]]
    evaluate: Callable[[Any, Any, Any], Any]
    params: Any
    state: Any
    rebuild: Callable[[Any, Any], Any]


@dataclass(frozen=True)
class TracedPart:
    """What is known of a part without running it.

    Attributes:
        output: shapes of what it makes of an input.
        flops: products of its forward pass.
    """

    output: Any
    flops: int


def read_part(given: Any, x: Any, key: Any) -> Part:
    """Read a layer: an NNX or Linen module, a function of x, or a pair (function, params).

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
        _check_floats(function, params)
        return _from_function(function, params, lambda params: (function, params))
    if callable(given):
        return _from_function(lambda params, x: given(x), (), lambda params: given)
    raise UserError(
        f"a stage cannot be a {type(given).__name__}",
        why="it is neither a module nor a function",
        fix="give an NNX or Linen module, a function of x, or a pair (function(params, x), params)",
    )


def _check_floats(function: Any, params: Any) -> None:
    """Refuse parameters that have no gradient."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = jnp.asarray(leaf).dtype
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise UserError(
                f"params{jax.tree_util.keystr(path)} of {getattr(function, '__name__', 'a stage')} "
                f"is of type {dtype}",
                why="parameters are trained, and only floats have gradients",
                fix="take it out of params: functools.partial(function, …) can hold it",
            )


def chain(parts: Sequence[Part]) -> Part:
    """Return parts one after another as one."""

    def apply(params: Any, state: Any, x: Any) -> tuple[Any, Any]:
        after: list[Any] = []
        for part, own, before in zip(parts, params, state, strict=True):
            x, new = part.apply(own, before, x)
            after.append(new)
        return x, tuple(after)

    def evaluate(params: Any, state: Any, x: Any) -> Any:
        for part, own, before in zip(parts, params, state, strict=True):
            x = part.evaluate(own, before, x)
        return x

    return Part(
        apply,
        evaluate,
        tuple(part.params for part in parts),
        tuple(part.state for part in parts),
        lambda params, state: [
            part.rebuild(p, s) for part, p, s in zip(parts, params, state, strict=True)
        ],
    )


def trace(part: Part, x: Any) -> TracedPart:
    """Return what a part makes of an input, and what that costs."""
    closed, output = jax.make_jaxpr(lambda p, s, x: part.apply(p, s, x)[0], return_shape=True)(
        part.params, part.state, x
    )
    return TracedPart(output, forward_flops(closed.jaxpr))


def to_default_device(value: Any) -> Any:
    """Return an array as if it had just been made, on no device in particular."""
    if is_key(value):
        words = jnp.asarray(np.asarray(jax.random.key_data(value)))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(value))
    return jnp.asarray(np.asarray(value))


def _from_function(
    function: Callable[[Any, Any], Any], params: Any, rebuild: Callable[[Any], Any]
) -> Part:
    return Part(
        lambda params, state, x: (function(params, x), state),
        lambda params, state, x: function(params, x),
        params,
        (),
        lambda params, state: rebuild(params),
    )


def _from_nnx(module: nnx.Module) -> Part:
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)

    def apply(params: Any, state: Any, x: Any) -> tuple[Any, Any]:
        merged: Any = nnx.merge(graphdef, params, state, copy=True)
        y = merged(x)
        return y, nnx.state(merged, nnx.Not(nnx.Param))

    def evaluate(params: Any, state: Any, x: Any) -> Any:
        merged: Any = nnx.merge(graphdef, params, state, copy=True)
        merged.eval()
        return merged(x)

    def rebuild(params: Any, state: Any) -> Any:
        return nnx.merge(graphdef, params, state)

    return Part(apply, evaluate, params, rest, rebuild)


def _from_linen(module: linen.Module, x: Any, key: Any) -> Part:
    if module.scope is None:
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), x)
        variables = dict(module.init(key, zeros))
    else:
        module, found = module.unbind()
        variables = dict(found)
    params = variables.pop("params", {})
    settings: dict[str, Any] = {
        name: value for name, value in EVALUATION.items() if hasattr(module, name)
    }
    evaluated = module.clone(**settings)

    def run(module: Any, params: Any, state: Any, x: Any) -> tuple[Any, Any]:
        y, changed = module.apply({"params": params, **state}, x, mutable=list(state))
        return y, {**state, **changed}

    return Part(
        lambda params, state, x: run(module, params, state, x),
        lambda params, state, x: run(evaluated, params, state, x)[0],
        params,
        variables,
        lambda params, state: module.bind({"params": params, **state}),
    )
