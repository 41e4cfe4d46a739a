"""Arrays by canonical path, as `nnx.update` reads them."""

from __future__ import annotations

import inspect
from collections.abc import ItemsView
from typing import Any

import jax

from meshwright.program.jaxpr.names import nest

_READS_NESTED = "flax.nnx"


class ArraysByPath(dict[str, Any]):
    """Arrays by path, such as ``blocks.0.mlp.up.kernel``; otherwise a dict like any other.

    NNX has a level of its dicts for every part of a path. To a flat dict, ``nnx.update`` would not
    object: it would give the model a new attribute ``"blocks.0.mlp.up.kernel"`` and leave its
    parameters as they are. NNX therefore gets the items of the nested dicts.
    """

    def items(self) -> ItemsView[Any, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the items: by path, and nested if NNX asks."""
        frame = inspect.currentframe()
        before = None if frame is None else frame.f_back
        caller = "" if before is None else str(before.f_globals.get("__name__"))
        asked_by_nnx = caller == _READS_NESTED or caller.startswith(f"{_READS_NESTED}.")
        return nest(self).items() if asked_by_nnx else super().items()


# JAX takes a subclass of dict for a leaf unless told otherwise.
jax.tree_util.register_pytree_with_keys(
    ArraysByPath,
    lambda own: (
        [(jax.tree_util.DictKey(path), own[path]) for path in sorted(own)],
        tuple(sorted(own)),
    ),
    lambda paths, arrays: ArraysByPath(zip(paths, arrays, strict=True)),
)
