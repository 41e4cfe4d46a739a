"""Checks of a list of layers: no values are shared, and errors name the layer."""

import dis
import functools
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import jax
import numpy as np
from flax import linen, nnx
from flax.errors import InvalidRngError
from jax import Array

from meshwright.errors import UserError, typed_line
from meshwright.pipeline.by_hand.layer_forms import Layer
from meshwright.pipeline.by_hand.stage_checks import describe
from meshwright.trees import PyTree

WHOLE_MODEL = 'train the whole model with mw.Trainer(…, mesh="pipe=2"), where they stay tied'
MOST_NAMED = 4
"""The most parameters that an error lists; a large layer has hundreds."""


def read_layers(stages: object) -> list[Layer]:
    """Return a list of layers after checking that none shares values with another."""
    if isinstance(stages, nnx.Sequential):
        raise UserError(
            "stages is an nnx.Sequential, not a list",
            why="a pipeline divides a list of layers",
            fix="write stages=model.layers",
        )
    if not isinstance(stages, Iterable) or isinstance(stages, str | bytes | Mapping | jax.Array):
        raise UserError(
            f"stages is of type {type(stages).__name__}, not a list",
            why="a pipeline divides a list of layers; it does not look into one module",
            fix="write stages=[first, second, …]",
        )
    layers: list[Layer] = list(stages)
    if not layers:
        raise UserError(
            "there are no stages", why="stages is empty", fix="give at least one module or function"
        )
    _check_instances(layers)
    _check_repeated(layers)
    _check_shared(layers)
    for number, layer in enumerate(layers):
        _check_function(number, layer)
    return layers


@contextmanager
def naming_layer(number: int, layer: Layer, x: PyTree) -> Generator[None]:
    """Add the number of the layer and its input to errors."""
    try:
        yield
    except (UserError, jax.errors.JaxRuntimeError):
        raise
    except InvalidRngError as error:
        raise UserError(
            f"layer {number} ({layer_name(layer)}) draws random numbers, which a Linen module "
            "cannot do here in training",
            why="a stage holds a Linen module's parameters and statistics, but no random stream: "
            f"{typed_line(error)}",
            fix="give it deterministic=True, or write this layer in NNX, such as "
            "nnx.Dropout(0.1, rngs=nnx.Rngs(0))",
        ) from error
    except Exception as error:
        source = f"the output of layer {number - 1}" if number else "the input"
        shapes = _parameter_shapes(layer)
        parameters = f" and its parameters are {shapes}" if shapes else ""
        raise UserError(
            f"layer {number} ({layer_name(layer)}) fails on {source}",
            why=f"its input is {describe(x)}{parameters}: {typed_line(error)}",
            fix="make it accept this input" + (", or change the layer before it" if number else ""),
        ) from error


def layer_name(layer: object) -> str:
    """Return the name of a layer: its class, or the name of its function."""
    if isinstance(layer, tuple):
        return f"({layer_name(layer[0])}, params)"
    name = getattr(layer, "__name__", None)
    return name if isinstance(name, str) else type(layer).__name__


def _check_instances(layers: Sequence[Layer]) -> None:
    """Refuse a class of modules, which is callable and would be taken for a function."""
    for number, layer in enumerate(layers):
        if isinstance(layer, type) and issubclass(layer, nnx.Module | linen.Module):
            flax = {"flax.nnx": "nnx.", "flax.linen": "nn."}
            prefix = flax.get(".".join(layer.__module__.split(".")[:2]), "")
            raise UserError(
                f"stages[{number}] is the class {layer.__name__}, not a module",
                why="a stage runs an instance of it",
                fix=f"write {prefix}{layer.__name__}(…)",
            )


def _check_repeated(layers: Sequence[Layer]) -> None:
    # NNX modules are compared by their variables, below; one without variables may be repeated.
    seen: dict[int, int] = {}
    for number, layer in enumerate(layers):
        if not isinstance(layer, linen.Module | tuple):
            continue
        if (before := seen.setdefault(id(layer), number)) != number:
            raise UserError(
                f"layers {before} and {number} are the same {layer_name(layer)}",
                why="each would have parameters of its own, which are not tied",
                fix="create a layer for each place, or one module that contains both uses; "
                f"or {WHOLE_MODEL}",
            )


def _check_shared(layers: Sequence[Layer]) -> None:
    owners: dict[int, tuple[int, str]] = {}
    for number, layer in enumerate(layers):
        for path, variable in _variables(layer):
            before, first = owners.setdefault(id(variable), (number, path))
            if before == number:
                continue
            raise UserError(
                f"layers {before} and {number} share the {type(variable).__name__} "
                f"`{first}`" + (f" (`{path}`)" if path != first else ""),
                why="each stage trains values of its own, so the two would diverge",
                fix="give each layer its own nnx.Rngs, or a copy of the module"
                if isinstance(variable, nnx.RngState)
                else f"write one module that contains both uses, or {WHOLE_MODEL}",
            )


def _check_function(number: int, layer: Layer) -> None:
    """Refuse a function that uses a module, whose parameters would silently not be trained."""
    function = layer[0] if isinstance(layer, tuple) and layer else layer
    if isinstance(function, nnx.Module | linen.Module):
        return
    for value in _reachable(function):
        if isinstance(value, nnx.Module) and any(_variables(value)):
            raise UserError(
                f"layer {number} ({layer_name(layer)}) is a function around a module "
                f"({type(value).__name__})",
                why="the module's values would be constants: neither trained nor tied",
                fix="give the module itself, or one module whose __call__ does this",
            )


def _reachable(function: object) -> Iterator[object]:
    """Yield the objects a function refers to: bound arguments, closure and globals."""
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values())
        yield from _reachable(function.func)
        return
    yield getattr(function, "__self__", None)
    function = getattr(function, "__func__", function)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    code, outside = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is not None:
        used = (i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")
        yield from (outside[name] for name in used if name in outside)


def _variables(layer: object) -> Iterator[tuple[str, nnx.Variable[Array]]]:
    if isinstance(layer, nnx.Module):
        for path, node in nnx.iter_graph(layer):
            if isinstance(node, nnx.Variable):
                yield ".".join(map(str, path)), node


def _parameter_shapes(layer: Layer) -> str:
    if isinstance(layer, nnx.Module):
        shapes = [
            f"{path} {list(variable.shape)}"
            for path, variable in _variables(layer)
            if isinstance(variable, nnx.Param)
        ]
    elif isinstance(layer, tuple) and len(layer) == 2:
        shapes = [str(list(np.shape(a))) for a in jax.tree.leaves(layer[1])]
    else:
        shapes = []
    more = ", …" if len(shapes) > MOST_NAMED else ""
    return ", ".join(shapes[:MOST_NAMED]) + more
