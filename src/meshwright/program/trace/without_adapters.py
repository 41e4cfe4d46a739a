"""The model without its adapters, as a part of a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from meshwright.errors import Setting, UserError
from meshwright.program.jaxpr.equations import ClosedJaxpr, Equation
from meshwright.program.jaxpr.walks import all_equations

_MARK = "meshwright.reference"


def reference(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of the model with the adapters switched off, without gradients.

    ``mw.reference(model, tokens)`` is what ``model(tokens)`` returned before training, and
    ``mw.reference(log_probabilities, model, batch)`` calls any function that gets the model. Only a
    training with adapters (``lora=``) has such a reference.

    Args:
        function: the model, or a function that is called with it.
        args: its arguments.
        kwargs: its named arguments.
    """
    variables = [
        variable
        for part in jax.tree.leaves((function, args, kwargs), is_leaf=_is_module)
        if _is_module(part)
        for _, variable in nnx.iter_graph(part)
        if isinstance(variable, nnx.Param)
    ]
    if not variables:
        raise UserError(
            "mw.reference was not given a model",
            fix="write mw.reference(model, x), or mw.reference(function, model, x) for a function "
            "of the model",
        )
    before = [variable.get_raw_value() for variable in variables]
    marked = [checkpoint_name(value, _MARK) for value in before]
    for variable, value in zip(variables, marked, strict=True):
        variable.set_raw_value(value)
    try:
        return jax.lax.stop_gradient(function(*args, **kwargs))
    finally:
        for variable, value, own in zip(variables, before, marked, strict=True):
            if variable.get_raw_value() is own:
                variable.set_raw_value(value)


def is_reference(eqn: Equation) -> bool:
    """Whether an equation takes a weight for the reference."""
    return eqn.primitive.name == "name" and eqn.params["name"] == _MARK


def refuse_reference(closed: ClosedJaxpr) -> None:
    """Raise if a program without adapters computes a reference: it would be the model itself."""
    if has_reference(closed):
        raise UserError(
            "the loss uses mw.reference, and the model has no adapters",
            why="the reference is the model with its adapters switched off; without any it would "
            "be the trained model itself",
            fix=f"train adapters ({Setting('lora.rank', 16)}), or give the loss a frozen copy of "
            "the model",
        )


def has_reference(closed: ClosedJaxpr) -> bool:
    """Whether a program computes a reference."""
    return any(is_reference(eqn) for eqn, _ in all_equations(closed.jaxpr))


def _is_module(value: Any) -> bool:
    return isinstance(value, nnx.Module)
