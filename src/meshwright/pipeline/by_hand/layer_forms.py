"""Layers in every form that users pass: NNX and Linen modules, functions, pairs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jax import Array

from meshwright.errors import UserError
from meshwright.program.flops import forward_flops
from meshwright.text.units import a_type
from meshwright.trees import PyTree, is_key

Layer = (
    nnx.Module
    | linen.Module
    | Callable[[PyTree], PyTree]
    | tuple[Callable[[PyTree, PyTree], PyTree], PyTree]
)
"""A module, a function of x, or a pair (function(params, x), params)."""

EVALUATION = {"deterministic": True, "use_running_average": True}
"""Attributes of Linen modules that switch to evaluation mode."""


@dataclass(frozen=True)
class Part:
    """A piece of a model as a pure function.

    ``apply`` goes from (params, state, x) to (y, state) in the mode the module is in, ``evaluate``
    to y in evaluation mode, and ``rebuild`` from (params, state) to the user's layers. The state is
    all that is not trained: statistics, counters, random streams.
    """

    apply: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
    evaluate: Callable[[PyTree, PyTree, PyTree], PyTree]
    params: PyTree
    state: PyTree
    rebuild: Callable[[PyTree, PyTree], list[Layer]]


@dataclass(frozen=True)
class TracedPart:
    """The output shapes and FLOPs of a part's forward pass, known without running it."""

    output: PyTree
    flops: int


def read_part(layer: object, x: PyTree, key: Array) -> Part:
    """Read a layer in any form; Linen modules are initialized for the shapes of ``x``."""
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
        f"a stage cannot be {a_type(layer)}",
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
                fix="remove it from params; functools.partial(function, …) can hold it",
            )


def chain(parts: Sequence[Part]) -> Part:
    """Return the composition of parts."""

    def apply(params: PyTree, state: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        after: list[PyTree] = []
        for part, part_params, before in zip(parts, params, state, strict=True):
            x, new = part.apply(part_params, before, x)
            after.append(new)
        return x, tuple(after)

    def evaluate(params: PyTree, state: PyTree, x: PyTree) -> PyTree:
        for part, part_params, part_state in zip(parts, params, state, strict=True):
            x = part.evaluate(part_params, part_state, x)
        return x

    return Part(
        apply,
        evaluate,
        tuple(part.params for part in parts),
        tuple(part.state for part in parts),
        lambda params, state: [
            layer
            for part, part_params, part_state in zip(parts, params, state, strict=True)
            for layer in part.rebuild(part_params, part_state)
        ],
    )


def trace(part: Part, x: PyTree) -> TracedPart:
    """Return the shapes of a part's output for an input, and its FLOPs."""
    closed, output = jax.make_jaxpr(lambda p, s, x: part.apply(p, s, x)[0], return_shape=True)(
        part.params, part.state, x
    )
    return TracedPart(output, forward_flops(closed.jaxpr))


def to_default_device(value: Array) -> Array:
    """Return a copy of an array on the default device, not committed to it."""
    if is_key(value):
        words = jnp.asarray(np.asarray(jax.random.key_data(value)))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(value))
    return jnp.asarray(np.asarray(value))


def _from_function(
    function: Callable[[PyTree, PyTree], PyTree], params: PyTree, rebuild: Callable[[PyTree], Layer]
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
        return merged(x), nnx.state(merged, nnx.Not(nnx.Param))

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
