"""Models in every form that users pass, converted to functions from random streams to a model."""

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from meshwright.config.base import shorten
from meshwright.config.builders import Builder, parameters_of
from meshwright.errors import UserError
from meshwright.program.trace.build_model import ModelSource
from meshwright.program.trace.requested_layouts import recorded_layouts
from meshwright.program.trace.traced_loss import Loss, Model
from meshwright.trees import Batch

UserModel = (
    nnx.Module
    | dict[str, Any]
    | linen.Module
    | Callable[..., nnx.Module | dict[str, Any] | linen.Module]
)
"""A model as users pass it: an NNX module, a dict of them, a Linen module, or a function that
builds one of these, with or without random streams."""


def exists(model: UserModel) -> bool:
    """Whether this is a model with parameters, not a function or Linen module that builds one."""
    return isinstance(model, nnx.Module | dict)


def model_source(model: UserModel, loss: Loss, sample: Callable[[], Batch]) -> ModelSource:
    """Return a function that builds the model from its random streams.

    The model is an NNX module or a dict of them, a Linen module, or a function that builds one of
    these, with or without ``rngs``. The loss is called once, on a sample, to create the parameters
    of a Linen module.
    """
    if isinstance(model, nnx.Module | dict):
        return lambda _: _check_model(model)
    build = (lambda _: model) if isinstance(model, linen.Module) else call_with_rngs(model, {})

    def source(rngs: nnx.Rngs) -> Model:
        built = build(rngs)
        if isinstance(built, linen.Module):
            return _bridge(built, rngs, loss, sample())
        return _check_model(built)

    return source


def call_with_rngs(builder: Builder, arguments: dict[str, Any]) -> ModelSource:
    """Return a function that calls a builder with random streams, as its signature requires.

    Streams are passed as ``rngs=``, as the only required argument, or not at all.
    """
    if not callable(builder):
        raise UserError(
            f"the model is {shorten(builder)}, of type {type(builder).__name__}",
            fix="write an NNX module, or a function that builds one: lambda rngs: Net(rngs=rngs)",
        )
    # A class without an `__init__` of its own takes no arguments.
    bare = isinstance(builder, type) and builder.__init__ is object.__init__
    parameters = {} if bare else parameters_of(builder)
    if "rngs" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return lambda rngs: builder(**arguments, rngs=rngs)
    required = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind is not p.VAR_POSITIONAL and name not in arguments
    ]
    if not required:
        return lambda _: builder(**arguments)
    if len(required) == 1 and parameters[required[0]].kind is not inspect.Parameter.KEYWORD_ONLY:
        return lambda rngs: builder(rngs, **arguments)
    name = getattr(builder, "__name__", "Net")
    raise UserError(
        f"{name} has required arguments besides random streams",
        why=f"it requires {', '.join(required)}",
        fix=f"write model=lambda rngs: {name}(…, rngs=rngs)",
    )


def _bridge(module: linen.Module, rngs: nnx.Rngs, loss: Loss, batch: Batch) -> nnx.Module:
    """Convert a Linen module to NNX, initialized by calling the loss on one sample."""
    sample = jax.tree.map(lambda x: jnp.zeros((1, *x.shape[1:]), x.dtype), batch)
    model = nnx.bridge.ToNNX(module, rngs=rngs)
    # `lazy_init` creates the variables of every submodule that the called method uses.
    with recorded_layouts():
        nnx.bridge.lazy_init(MethodType(loss, model), sample)
    return model


def _check_model(model: Any) -> Any:
    if isinstance(model, dict):
        linen_parts = [key for key, part in model.items() if isinstance(part, linen.Module)]
        if linen_parts:
            raise UserError(
                f"`{linen_parts[0]}` of the model is a Linen module",
                why="a Linen module is converted automatically only if it is the whole model",
                fix=f"write nnx.bridge.ToNNX({type(model[linen_parts[0]]).__name__}(…), rngs=rngs)"
                ".lazy_init(x) for it, with an example x of its input",
            )
    elif not isinstance(model, nnx.Module):
        raise UserError(
            f"the model's builder returned {shorten(model)}, of type {type(model).__name__}",
            fix="return an NNX module, a dict of them, or a Linen module",
        )
    return model
