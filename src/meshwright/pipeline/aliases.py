"""Names for the types that functions of the pipeline take and return."""

from __future__ import annotations

from typing import Any

import jax

Array = jax.Array

PyTree = Any
"""Arrays, nested in any way that `jax.tree` knows."""

TreeDef = Any
"""How the leaves of a pytree are nested; JAX's own type cannot be used in annotations."""

Device = Any
"""A `jax.Device`; JAX's own type cannot be used in annotations."""

Shaped = jax.Array | jax.ShapeDtypeStruct
"""An array, or what is known of one before it exists."""

LeafValues = dict[int, Array]
"""Values of step leaves, by number of the step leaf."""

BlockRow = dict[int, Array]
"""What one block has a row of, by position among the scan's layered inputs."""

Message = list[Array]
"""What one stage hands to the next."""
