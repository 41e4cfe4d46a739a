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
from meshwright.pipeline.aliases import Array
from meshwright.program.flops import forward_flops
from meshwright.trees import PyTree, is_key

Layer = (
    nnx.Module
    | linen.Module
    | Callable[[PyTree], PyTree]
    | tuple[Callable[[PyTree, PyTree], PyTree], PyTree]
)
"""A module, a function of x, or a pair (function(params, x), params)."""

EVALUATION = {"deterministic": True, "use_running_average": True}
"""What evaluation means to a Linen module that has these attributes, as to any NNX module."""


@dataclass(frozen=True)
class Part:
    """A piece of a model as a pure function.

    Attributes:
        apply: from (params, state, x) to (y, state), in the mode the module is in.
        evaluate: from (params, state, x) to y, in evaluation mode.
        params: what is trained.
        state: its other state: statistics, counters, random streams.
        rebuild: from (params, state) to the user's layers, with these values.
    """

    apply: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
    evaluate: Callable[[PyTree, PyTree, PyTree], PyTree]
    params: PyTree
    state: PyTree
    rebuild: Callable[[PyTree, PyTree], list[Layer]]


@dataclass(frozen=True)
class TracedPart:
    """What is known of a part without running it.

    Attributes:
        output: shapes of its output.
        flops: products of its forward pass.
    """

    output: PyTree
    flops: int


def read_part(layer: object, x: PyTree, key: Array) -> Part:
    """Read a layer: an NNX or Linen module, a function of x, or a pair (function, params).

    Args:
        layer: what the user wrote.
        x: an example of its input, as arrays or shapes; Linen modules are created for it.
        key: for the parameters of Linen modules.
    """
    if isinstance(layer, nnx.Module):
        return _from_nnx(layer)
    if isinstance(layer, linen.Module):
        return _from_linen(layer, x, key)
    if isinstance(layer, tuple) and len(layer) == 2 and callable(layer[0]):
        function, params = layer
        _check_floats(function, params)
        return _from_function(function, params, lambda params: (function, params))
    if callable(layer):
        return _from_function(lambda params, x: layer(x), (), lambda params: layer)
    raise UserError(
        f"a stage cannot be a {type(layer).__name__}",
        why="it is neither a module nor a function",
        fix="give an NNX or Linen module, a function of x, or a pair (function(params, x), params)",
    )


def _check_floats(function: object, params: PyTree) -> None:
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

    def apply(params: PyTree, state: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        after: list[PyTree] = []
        for part, own, before in zip(parts, params, state, strict=True):
            x, new = part.apply(own, before, x)
            after.append(new)
        return x, tuple(after)

    def evaluate(params: PyTree, state: PyTree, x: PyTree) -> PyTree:
        for part, own, before in zip(parts, params, state, strict=True):
            x = part.evaluate(own, before, x)
        return x

    return Part(
        apply,
        evaluate,
        tuple(part.params for part in parts),
        tuple(part.state for part in parts),
        lambda params, state: [
            layer
            for part, own, before in zip(parts, params, state, strict=True)
            for layer in part.rebuild(own, before)
        ],
    )


def trace(part: Part, x: PyTree) -> TracedPart:
    """Return the shapes of a part's output for an input, and its FLOPs."""
    closed, output = jax.make_jaxpr(lambda p, s, x: part.apply(p, s, x)[0], return_shape=True)(
        part.params, part.state, x
    )
    return TracedPart(output, forward_flops(closed.jaxpr))


def to_default_device(value: Array) -> Array:
    """Return an array as if it had just been made, on no device in particular."""
    if is_key(value):
        words = jnp.asarray(np.asarray(jax.random.key_data(value)))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(value))
    return jnp.asarray(np.asarray(value))


def _from_function(
    function: Callable[[PyTree, PyTree], PyTree],
    params: PyTree,
    rebuild: Callable[[PyTree], Layer],
) -> Part:
    return Part(
        lambda params, state, x: (function(params, x), state),
        lambda params, state, x: function(params, x),
        params,
        (),
        lambda params, state: [rebuild(params)],
    )


def _from_nnx(module: nnx.Module) -> Part:
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)

    def apply(params: PyTree, state: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        merged: Any = nnx.merge(graphdef, params, state, copy=True)
        y = merged(x)
        return y, nnx.state(merged, nnx.Not(nnx.Param))

    def evaluate(params: PyTree, state: PyTree, x: PyTree) -> PyTree:
        merged: Any = nnx.merge(graphdef, params, state, copy=True)
        merged.eval()
        return merged(x)

    def rebuild(params: PyTree, state: PyTree) -> list[Layer]:
        return [nnx.merge(graphdef, params, state)]

    return Part(apply, evaluate, params, rest, rebuild)


def _from_linen(module: linen.Module, x: PyTree, key: Array) -> Part:
    if module.scope is None:
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), x)
        variables = dict(module.init(key, zeros))
    else:
        module, bound = module.unbind()
        variables = dict(bound)
    params = variables.pop("params", {})
    settings: dict[str, Any] = {
        name: value for name, value in EVALUATION.items() if hasattr(module, name)
    }
    evaluated = module.clone(**settings)

    def run(
        module: linen.Module, params: PyTree, state: PyTree, x: PyTree
    ) -> tuple[PyTree, PyTree]:
        y, changed = module.apply({"params": params, **state}, x, mutable=list(state))
        return y, {**state, **changed}

    return Part(
        lambda params, state, x: run(module, params, state, x),
        lambda params, state, x: run(evaluated, params, state, x)[0],
        params,
        variables,
        lambda params, state: [module.bind({"params": params, **state})],
    )
