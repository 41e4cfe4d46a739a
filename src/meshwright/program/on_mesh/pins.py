"""Pins: the layouts of activations that pass from one module to another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshwright.program.dims import Atom, DimClasses, Frame, all_frames
from meshwright.program.jaxpr.equations import Equation, Literal, Var, aval_of, name_stack
from meshwright.program.jaxpr.names import module_of

TensorDim = Callable[[Sequence[tuple[Atom, ...]]], int | None]
"""Returns which dim of an activation is divided over the tensor axis, if any."""


def find_pins(
    classes: DimClasses, *, batch_axes: Mapping[str, int], tensor_dim: TensorDim
) -> dict[Var, PartitionSpec]:
    """Return a spec for every activation that leaves its module and carries the batch.

    Args:
        classes: the dims of the program's variables.
        batch_axes: the mesh axes samples are divided over, and their sizes.
        tensor_dim: which dim of an activation is divided over the tensor axis.

    Without pins the partitioner may gather activations instead of weights, and on large meshes it
    does.
    """
    pins: dict[Var, PartitionSpec] = {}
    for frame in all_frames(classes.root):
        for variable in _crossing(frame):
            spec = activation_spec(frame, variable, classes.batch, batch_axes, tensor_dim)
            if spec is not None:
                pins[variable] = spec
    return pins


def find_weights(classes: DimClasses) -> frozenset[Var]:
    """Return the variables that hold weights, cast or rearranged, and no data."""
    return frozenset(
        variable
        for frame in all_frames(classes.root)
        for variable, value in frame.values.items()
        if value.params and not value.has_data
    )


def _crossing(frame: Frame) -> Iterator[Var]:
    """Yield the variables that another module reads, or that the jaxpr returns."""
    producers: dict[Var, str] = {}
    crossing: dict[Var, None] = {}
    for eqn in frame.jaxpr.eqns:
        module = module_of(name_stack(eqn))
        for atom in eqn.invars:
            if not isinstance(atom, Literal) and producers.get(atom, module) != module:
                crossing[atom] = None
        producers.update((variable, module) for variable in _float_results(eqn))
    for atom in frame.jaxpr.outvars:
        if not isinstance(atom, Literal) and atom in producers:
            crossing[atom] = None
    yield from crossing


def _float_results(eqn: Equation) -> list[Var]:
    return [v for v in eqn.outvars if jnp.issubdtype(aval_of(v).dtype, jnp.inexact)]


def activation_spec(
    frame: Frame,
    variable: Var,
    batch: frozenset[int],
    batch_axes: Mapping[str, int],
    tensor_dim: TensorDim,
) -> PartitionSpec | None:
    """Return the layout of an activation; None if it has no dim of samples that can be divided.

    Args:
        frame: the call in which it is a variable.
        variable: the activation.
        batch: the classes of samples.
        batch_axes: the mesh axes samples are divided over, and their sizes.
        tensor_dim: which dim is divided over the tensor axis.
    """
    dims = frame.dims(variable)
    replicas = math.prod(batch_axes.values())
    entries: list[str | tuple[str, ...] | None] = [None] * len(dims)
    for number, atoms in enumerate(dims):
        if atoms and atoms[0].id in batch and atoms[0].size % replicas == 0:
            entries[number] = tuple(batch_axes)
            break
    else:
        return None
    divided = tensor_dim(dims)
    if divided is not None and entries[divided] is None:
        entries[divided] = "tensor"
    return PartitionSpec(*entries)
