"""Type aliases of the pipeline."""

from __future__ import annotations

from typing import Any

import jax

Array = jax.Array

TreeDef = Any
"""The structure of a pytree; JAX's own type cannot be used in annotations."""

Shaped = jax.Array | jax.ShapeDtypeStruct
"""An array, or its shape and dtype."""

LeafValues = dict[int, Array]
"""Values of step leaves by the number of the step leaf."""

BlockRow = dict[int, Array]
"""The leaves of one block, by position among the layered inputs of the scan."""

Message = list[Array]
"""The arrays that one stage sends to the next."""
