"""Operations that move values along a dim: inside a pipeline that dim is whole on every device.

Stages run different operations at the same time, and may exchange values only among their own
devices. Compilers move pieces of a divided dim by an exchange of all devices of the mesh, which
would deadlock the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshwright.pipeline.aliases import Array
from meshwright.program.jaxpr.equations import Equation, aval_of


def moving_dims(eqn: Equation) -> tuple[int, ...]:
    """Return the dims along which an equation moves values; empty for most."""
    find = _MOVES.get(eqn.primitive.name)
    return find(eqn) if find is not None else ()


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


def _shape(eqn: Equation) -> tuple[int, ...]:
    return tuple(aval_of(eqn.invars[0]).shape)


def _changed(eqn: Equation) -> tuple[int, ...]:
    """Return the dims whose size the result does not have."""
    after = aval_of(eqn.outvars[0]).shape
    return tuple(d for d, size in enumerate(_shape(eqn)) if size != after[d])


def _padded(eqn: Equation) -> tuple[int, ...]:
    return tuple(d for d, amounts in enumerate(eqn.params["padding_config"]) if any(amounts))


def _updated(eqn: Equation) -> tuple[int, ...]:
    update = aval_of(eqn.invars[1]).shape
    return tuple(d for d, size in enumerate(_shape(eqn)) if size != update[d])


def _windowed(eqn: Equation) -> tuple[int, ...]:
    return tuple(d for d, size in enumerate(eqn.params["window_dimensions"]) if size > 1)


def _named(parameter: str) -> Callable[[Equation], tuple[int, ...]]:
    def find(eqn: Equation) -> tuple[int, ...]:
        return tuple(np.atleast_1d(eqn.params[parameter]).tolist())

    return find


def _last(eqn: Equation) -> tuple[int, ...]:
    return (len(_shape(eqn)) - 1,)


_MOVES: dict[str, Callable[[Equation], tuple[int, ...]]] = {
    "rev": _named("dimensions"),
    "slice": _changed,
    "dynamic_slice": _changed,
    "dynamic_update_slice": _updated,
    "pad": _padded,
    "concatenate": _named("dimension"),
    "split": _named("axis"),
    "sort": _named("dimension"),
    "top_k": _last,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _named("axis")),
    **dict.fromkeys(
        ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"), _windowed
    ),
}
