"""Forms of calls: named axes, arguments with more than one keyword, and static methods."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import jax

from meshwright.errors import UserError
from meshwright.runtime.jax_internals import surrounding_axes

DEFAULT_AXIS = "batch"
"""The default axis name; outside any named axis it means that arrays are global."""

AxisName = str | Sequence[str]
"""One named axis, or several."""


def resolve_axes(axis_name: AxisName) -> tuple[str, ...]:
    """Return the named axes to reduce over; none if arrays are global.

    Under plain ``jax.jit`` there is no named axis: arrays are global, and so is everything computed
    from them. The default name then resolves to no axes. An explicit name must exist, and so must
    the default inside ``shard_map`` or ``vmap``, where ignoring it would let devices diverge.
    """
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    unbound = [name for name in names if not _is_bound(name)]
    if not unbound:
        return names
    surrounding = surrounding_axes()
    if not surrounding and names == (DEFAULT_AXIS,):
        return ()
    raise UserError(
        f"no axis `{unbound[0]}` surrounds this call",
        why=f"the axes here are {', '.join(surrounding)}"
        if surrounding
        else "the call is outside shard_map and vmap, so arrays are global and already reduced",
        fix=f"pass axis_name={surrounding[0]!r}"
        if len(surrounding) == 1
        else "pass the axis_name of the surrounding shard_map or vmap, or leave the call out "
        "under plain jax.jit",
    )


def require_axes(axis_name: AxisName, operation: str) -> tuple[str, ...]:
    """Return the named axes like ``resolve_axes``, for operations that need at least one."""
    axes = resolve_axes(axis_name)
    if not axes:
        raise UserError(
            f"{operation} needs a named axis",
            why="the call is outside shard_map and vmap: arrays are global, so there is one "
            "value, not one per device",
            fix="call it inside jax.shard_map with axis_name=…, or leave it out under jax.jit",
        )
    return axes


def varying_axes(value: Any) -> frozenset[str]:
    """Return the shard_map axes over which, by its type, the value differs between devices."""
    return frozenset(jax.typeof(value).manual_axis_type.varying)


def tracks_varying(axis: str) -> bool:
    """Whether types track what varies over this axis, as in shard_map with ``check_vma``."""
    return axis in varying_axes(jax.lax.axis_index(axis))


def _is_bound(name: str) -> bool:
    try:
        jax.lax.axis_size(name)
    except NameError:
        return False
    return True


P = ParamSpec("P")
R = TypeVar("R")


def static_twin(method: Callable[Concatenate[Any, P], R]) -> staticmethod[P, R]:
    """Return a method that reads nothing of its object as a static method, without ``self``."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return method(None, *args, **kwargs)

    signature = inspect.signature(method)
    functools.update_wrapper(call, method)
    own = list(signature.parameters.values())[1:]
    vars(call)["__signature__"] = signature.replace(parameters=own)
    call.__name__ = f"{method.__name__}_static"
    call.__doc__ = f"``{method.__name__}`` as a static method."
    return staticmethod(call)


def also_called(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Accept further keywords: ``also_called(grads="gradients")`` takes both."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> R:
            for other, name in names.items():
                if other not in kwargs:
                    continue
                if name in kwargs:
                    raise UserError(
                        f"{function.__name__} got both {name}= and {other}=",
                        why="they are the same argument",
                        fix=f"write {name}= only",
                    )
                kwargs[name] = kwargs.pop(other)
            return function(*args, **kwargs)

        return cast(Callable[P, R], call)

    return decorate
