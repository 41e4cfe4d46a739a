"""Sharding constraints: layouts of activations between modules, and those that a model asks for."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshwright.mesh.axes import AXES, BATCH_AXES, CONTEXT, PIPE, resolve_alias
from meshwright.program.dims.classes import DimClasses
from meshwright.program.dims.factors import DimFactor
from meshwright.program.dims.walk import ProgramDims, all_programs
from meshwright.program.jaxpr.equations import Literal, Var, aval_of, equation_module
from meshwright.program.kernels.find_kernels import LayoutOf
from meshwright.program.trace.requested_layouts import RequestedLayout, requested_layout

TensorDim = Callable[[Sequence[tuple[DimFactor, ...]]], int | None]
"""Returns which dim of an activation is sharded over the tensor axis, if any."""


def find_constraints(classes: DimClasses, layout: LayoutOf) -> dict[Var, PartitionSpec]:
    """Return a spec for every activation that leaves its module and carries the batch.

    Without them, the partitioner may gather activations instead of weights, and on large meshes it
    does.
    """
    programs = all_programs(classes.root)
    found = ((v, layout(program, v)) for program in programs for v in _crossing(program))
    return {variable: spec for variable, spec in found if spec is not None}


def find_weights(classes: DimClasses) -> frozenset[Var]:
    """Return the variables that hold weights, cast or rearranged, and no data."""
    return frozenset(
        variable
        for program in all_programs(classes.root)
        for variable, value in program.values.items()
        if value.params and not value.has_data
    )


def _crossing(program: ProgramDims) -> Iterator[Var]:
    """Yield the variables that another module reads, or that the jaxpr returns."""
    producers: dict[Var, str] = {}
    crossing: dict[Var, None] = {}
    for eqn in program.jaxpr.eqns:
        module = equation_module(eqn)
        for atom in eqn.invars:
            if not isinstance(atom, Literal) and producers.get(atom, module) != module:
                crossing[atom] = None
        floats = (v for v in eqn.outvars if jnp.issubdtype(aval_of(v).dtype, jnp.inexact))
        producers.update(dict.fromkeys(floats, module))
    for atom in program.jaxpr.outvars:
        if not isinstance(atom, Literal) and atom in producers:
            crossing[atom] = None
    yield from crossing


def activation_layouts(
    classes: DimClasses, batch_axes: Mapping[str, int], tensor_dim: TensorDim, context: int = 1
) -> LayoutOf:
    """Return what gives the layout of an activation, or None if nothing of it can be sharded.

    Samples are sharded over the ``batch_axes``, of these sizes, and ``tensor_dim`` over the tensor
    axis.

    Rows are sharded over the context axis, also where the batch axes do not divide the samples.
    What relates positions to each other, as scores and masks do, is left to what attention reads.
    """
    replicas = math.prod(batch_axes.values())

    def layout(program: ProgramDims, variable: Var) -> PartitionSpec | None:
        dims = program.dims(variable)
        entries: list[str | tuple[str, ...] | None] = [None] * len(dims)
        rows = classes.positions(program, variable) if context > 1 else []
        if len(rows) > 1:
            return None
        samples = [n for n, dim in enumerate(dims) if dim and dim[0].id in classes.batch]
        whole = next((n for n in samples if dims[n][0].size % replicas == 0), None)
        if whole is not None:
            entries[whole] = tuple(batch_axes)
        elif not rows or (replicas > 1 and not samples):
            return None
        for number in rows:
            entries[number] = CONTEXT
        sharded = tensor_dim(dims)
        if sharded is not None and entries[sharded] is None:
            entries[sharded] = "tensor"
        return PartitionSpec(*entries)

    return layout


@dataclass(frozen=True)
class ModelLayouts:
    """What became of the sharding constraints in a model's code: layouts by variable.

    For each kind of constraint that is not followed, there is a sentence in ``ignored``.
    """

    constraints: Mapping[Var, PartitionSpec]
    ignored: tuple[str, ...]


def find_model_layouts(
    classes: DimClasses, *, sizes: Mapping[str, int], batch_axes: Sequence[str]
) -> ModelLayouts:
    """Return the layouts that constraints in the model ask for, under the names of this mesh.

    ``sizes`` are those of its axes; samples are sharded over the ``batch_axes``.
    """
    constraints: dict[Var, PartitionSpec] = {}
    ignored: dict[tuple[str, str], dict[str, None]] = {}
    if all(size == 1 for size in sizes.values()):
        return ModelLayouts({}, ())
    for program, eqn in classes.equations():
        request = requested_layout(eqn)
        if request is None:
            continue
        (result,) = eqn.outvars
        problem = _problem(request, aval_of(result).shape)
        if not problem:
            leading = [dim[0].id if dim else None for dim in program.dims(result)]
            dims = _axes(request, [first in classes.batch for first in leading], batch_axes)
            problem = _uneven(dims, aval_of(result).shape, sizes)
            constraints |= {} if problem else {result: _spec(dims, sizes)}
        if problem:
            where = equation_module(eqn) or "the loss"
            ignored.setdefault((str(request), problem), {})[where] = None
    return ModelLayouts(
        constraints, tuple(_sentence(*key, list(at)) for key, at in ignored.items())
    )


def _problem(request: RequestedLayout, shape: Sequence[int]) -> str:
    if request.other:
        return "only sharding over mesh axes can be followed"
    if len(request.dims) != len(shape):
        return "it is inside a vmap, which adds a dim"
    names = [name for dim in request.dims for name in dim or ()]
    unknown = [name for name in names if resolve_alias(name) not in AXES]
    if unknown:
        return f"there is no mesh axis `{unknown[0]}` (the axes are {', '.join(sorted(AXES))})"
    if any(resolve_alias(name) == PIPE for name in names):
        return f"`{PIPE}` divides the blocks of a model, not its activations"
    return ""


def _axes(
    request: RequestedLayout, is_batch: Sequence[bool], batch_axes: Sequence[str]
) -> list[list[str] | None]:
    """Return the mesh axes of each dim.

    Samples are sharded over all batch axes where the model names one of them: a model written for
    `data` alone means its samples, which `fsdp` shards as well.
    """
    dims = [None if dim is None else [resolve_alias(n) for n in dim] for dim in request.dims]
    for number, dim in enumerate(dims):
        if not dim or not is_batch[number] or not set(dim) & set(BATCH_AXES):
            continue
        elsewhere = {axis for n, other in enumerate(dims) if n != number for axis in other or ()}
        own = [axis for axis in batch_axes if axis in dim or axis not in elsewhere]
        dims[number] = [*own, *(axis for axis in dim if axis not in {*own, *BATCH_AXES})]
    return dims


def _uneven(
    dims: Sequence[Sequence[str] | None], shape: Sequence[int], sizes: Mapping[str, int]
) -> str:
    for number, (axes, size) in enumerate(zip(dims, shape, strict=True)):
        present = [axis for axis in axes or () if sizes.get(axis, 1) > 1]
        if size % math.prod(sizes[axis] for axis in present):
            parts = " × ".join(f"{axis}={sizes[axis]}" for axis in present)
            return f"dim {number} has size {size}, which is not divisible by {parts}"
    return ""


def _spec(dims: Sequence[Sequence[str] | None], sizes: Mapping[str, int]) -> PartitionSpec:
    free = PartitionSpec.UNCONSTRAINED
    present = [tuple(axis for axis in axes or () if sizes.get(axis, 1) > 1) for axes in dims]
    pairs = zip(dims, present, strict=True)
    return PartitionSpec(*(free if axes is None else own for axes, own in pairs))


def _sentence(request: str, problem: str, modules: Sequence[str]) -> str:
    others = len(modules) - 1
    more = f" (and {others} more module{'s' if others > 1 else ''})" if others else ""
    return f"a sharding constraint in `{modules[0]}`{more} is ignored: {request}: {problem}"
