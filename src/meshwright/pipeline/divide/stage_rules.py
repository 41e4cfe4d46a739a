"""The evaluation rule inside a pipeline stage: no equation may exchange values between stages.

Stages run different operations at the same time, and may exchange values only among their own
devices. Compilers move pieces of a sharded dim by an exchange of all devices of the mesh, and
stages would deadlock. So dims along which values move, or are looked up, are whole on every device.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshwright.mesh.axes import entry_names
from meshwright.program.evaluate.evaluator import Environment
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.jaxpr.equations import Atom, Equation, Literal, Value, aval_of, bind
from meshwright.program.on_mesh.mesh_rules import operands_in_param_dtype


@dataclass(frozen=True)
class WithinStage:
    """Evaluates operations that move or look up values along a dim, with that dim whole."""

    mesh: MeshView

    def __call__(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Evaluate an equation that would cross stages; None for others."""
        if self.mesh.num_auto == 1:
            return None
        if eqn.primitive.name in SCATTERS:
            return self._scattered(eqn, env)
        find = _MOVES.get(eqn.primitive.name)
        if find is not None and (dims := find(eqn)):
            return self._moved(eqn, env, dims)
        return self._looked_up(eqn, env) if eqn.primitive.name == "gather" else None

    def _scattered(self, eqn: Equation, env: Environment) -> list[Value]:
        mesh = self.mesh.for_constraints
        indexed = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
        target, *others = env.operands(eqn)
        whole = env.with_operands(eqn, [make_whole(target, mesh, indexed), *others])
        # By the following rules: in float64 they also widen the scatter's combiner.
        results = env.evaluator.continue_after(self, eqn, whole)
        return [make_whole(a, mesh, indexed) for a in results]

    def _moved(self, eqn: Equation, env: Environment, dims: tuple[int, ...]) -> list[Value]:
        mesh = self.mesh.for_constraints
        operands = env.operands(eqn, operands_in_param_dtype(eqn, env))
        whole = env.with_operands(eqn, all_whole(operands, mesh, dims))
        # Results, too: their gradients move the other way.
        return all_whole(env.evaluator.continue_after(self, eqn, whole), mesh, dims)

    def _looked_up(self, eqn: Equation, env: Environment) -> list[Value] | None:
        mesh, weights = self.mesh.for_constraints, env.evaluator.weights
        table = eqn.invars[0]
        use = None if isinstance(table, Literal) else weights.uses.get(table)
        if use is not None and not divides_rows(eqn, use.whole):
            return None
        operands = env.operands(eqn, operands_in_param_dtype(eqn, env))
        if use is not None:
            rows = divided_rows(eqn, operands[0], operands[1], mesh, use.whole)
            return [weights.cast(rows, aval_of(eqn.outvars[0]).dtype)]
        if picks_one(eqn):
            return [picked(eqn, operands[0], operands[1])]
        indexed = eqn.params["dimension_numbers"].start_index_map
        return bind(eqn, [make_whole(operands[0], mesh, indexed), *operands[1:]])


def all_whole(
    arrays: Sequence[Array], mesh: Mesh | AbstractMesh, dims: Collection[int]
) -> list[Array]:
    """Return an equation's operands or results with these dims whole on every device."""
    rank = max(getattr(a, "ndim", 0) for a in arrays)
    # Operands with fewer dims are start indices, or values to fill with.
    return [make_whole(a, mesh, dims) if getattr(a, "ndim", 0) == rank else a for a in arrays]


def make_whole(array: Array, mesh: Mesh | AbstractMesh, dims: Collection[int]) -> Array:
    """Return an array whose dims ``dims`` are whole on every device, the others as they are."""
    free = PartitionSpec.UNCONSTRAINED
    spec = PartitionSpec(*(None if dim in dims else free for dim in range(array.ndim)))
    return lax.with_sharding_constraint(array, NamedSharding(mesh, spec))


def _changed(eqn: Equation, part: Atom) -> tuple[int, ...]:
    """Return the dims whose size the result, or the step, does not have."""
    sizes = zip(aval_of(eqn.invars[0]).shape, aval_of(part).shape, strict=True)
    return tuple(d for d, (whole, size) in enumerate(sizes) if whole != size)


def _named(parameter: str) -> Callable[[Equation], tuple[int, ...]]:
    def find(eqn: Equation) -> tuple[int, ...]:
        return tuple(np.atleast_1d(eqn.params[parameter]).tolist())

    return find


_MOVES: dict[str, Callable[[Equation], tuple[int, ...]]] = {
    "rev": _named("dimensions"),
    "slice": lambda eqn: _changed(eqn, eqn.outvars[0]),
    "dynamic_slice": lambda eqn: _changed(eqn, eqn.outvars[0]),
    "dynamic_update_slice": lambda eqn: _changed(eqn, eqn.invars[1]),
    "pad": lambda eqn: tuple(d for d, by in enumerate(eqn.params["padding_config"]) if any(by)),
    "concatenate": _named("dimension"),
    "split": _named("axis"),
    "sort": _named("dimension"),
    "top_k": lambda eqn: (len(aval_of(eqn.invars[0]).shape) - 1,),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _named("axis")),
    **dict.fromkeys(
        ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"),
        lambda eqn: tuple(d for d, n in enumerate(eqn.params["window_dimensions"]) if n > 1),
    ),
}
"""By primitive, what returns the dims along which an equation moves values."""


SCATTERS = frozenset({"scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"})


def divides_rows(eqn: Equation, spec: PartitionSpec | None) -> bool:
    """Whether an equation looks up whole rows of a table whose rows are sharded."""
    return spec is not None and len(spec) > 0 and spec[0] is not None and _takes_rows(eqn)


def divided_rows(
    eqn: Equation, table: Array, indices: Array, mesh: Mesh | AbstractMesh, spec: PartitionSpec
) -> Array:
    """Look up rows of a table whose rows are sharded: each device in its part, then summed."""
    axes = entry_names(spec[0])
    parts = math.prod(mesh.shape[axis] for axis in axes)
    each = table.shape[0] // parts
    divided = NamedSharding(mesh, PartitionSpec(axes, None, *spec[1:]))
    pieces = lax.with_sharding_constraint(table.reshape(parts, each, *table.shape[1:]), divided)
    wanted = _within(eqn, indices[..., 0], table.shape[0])
    starts = jnp.arange(parts, dtype=wanted.dtype) * each
    local = wanted[None] - starts.reshape(parts, *[1] * wanted.ndim)
    mine = (local >= 0) & (local < each)
    # The compiler cannot shard lookups; the looked-up dims are whole here.
    rows = jax.vmap(lambda piece, at: jnp.take(piece, at, axis=0, mode="clip"))(pieces, local)
    mask = mine.reshape(*mine.shape, *[1] * (rows.ndim - mine.ndim))
    summed = jnp.where(mask, rows, jnp.zeros((), rows.dtype)).sum(0)
    return _filled(eqn, summed, indices[..., 0], table.shape[0])


def picks_one(eqn: Equation) -> bool:
    """Whether an equation picks elements along the last dim, one for each place in the others."""
    numbers, rank = eqn.params["dimension_numbers"], len(aval_of(eqn.invars[0]).shape)
    others = tuple(range(rank - 1))
    return (
        numbers.offset_dims == ()
        and tuple(numbers.start_index_map) == (rank - 1,)
        and tuple(numbers.operand_batching_dims) == others
        and tuple(numbers.start_indices_batching_dims) == others
    )


def picked(eqn: Equation, operand: Array, indices: Array) -> Array:
    """Pick elements along the last dim by comparison, which works however the dim is sharded."""
    size = operand.shape[-1]
    at = indices[..., 0]
    wanted = _within(eqn, at, size)
    extra = wanted.ndim - (operand.ndim - 1)
    shape = (*operand.shape[:-1], *[1] * extra, size)
    here = jnp.arange(size, dtype=wanted.dtype) == wanted[..., None]
    elements = jnp.where(here, operand.reshape(shape), jnp.zeros((), operand.dtype)).sum(-1)
    return _filled(eqn, elements, at, size)


def _takes_rows(eqn: Equation) -> bool:
    numbers, shape = eqn.params["dimension_numbers"], aval_of(eqn.invars[0]).shape
    before = len(aval_of(eqn.invars[1]).shape) - 1
    return (
        tuple(numbers.start_index_map) == (0,)
        and tuple(numbers.collapsed_slice_dims) == (0,)
        and not numbers.operand_batching_dims
        and tuple(eqn.params["slice_sizes"][1:]) == tuple(shape[1:])
        and tuple(numbers.offset_dims) == tuple(range(before, before + len(shape) - 1))
    )


def _within(eqn: Equation, at: Array, size: int) -> Array:
    """Return indices clipped to valid ones; `_filled` handles the others as the mode requires."""
    at = at.astype(jnp.int32) if at.dtype.itemsize < 4 else at
    promised = eqn.params["mode"] == lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return at if promised else at.clip(0, size - 1)


def _filled(eqn: Equation, values: Array, at: Array, size: int) -> Array:
    """Return looked-up values, with the lookup's fill value where an index is out of bounds."""
    if eqn.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return values
    fill = eqn.params["fill_value"]
    if fill is None:
        fill = jnp.nan if jnp.issubdtype(values.dtype, jnp.inexact) else 0
    valid = (at >= 0) & (at < size)
    mask = valid.reshape(*valid.shape, *[1] * (values.ndim - valid.ndim))
    return jnp.where(mask, values, jnp.asarray(fill, values.dtype))
