"""The parameters of a traced program: which variables they are, and how they are read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshwright.program.evaluate.gather import GatherSpecs, make_ready
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.jaxpr.equations import Atom, Value, Var, aval_of

HALF = (jnp.bfloat16, jnp.float16)


@dataclass(frozen=True)
class WeightUse:
    """A variable that is a parameter, or a cast of one.

    Attributes:
        leaf: the variable of the parameter itself.
        dtype: the compute dtype it is cast to; None if it is not cast.
        specs: how it is gathered; None if it is already whole.
        whole: its layout when gathered.
        trained: whether it has a gradient.
    """

    leaf: Var
    dtype: DTypeLike | None
    specs: GatherSpecs | None
    whole: PartitionSpec
    trained: bool


@dataclass(frozen=True)
class Weights:
    """How a program reads its parameters.

    A weight in half precision is stored as float32 numbers with half-precision values: whoever
    reads it reads half precision, and its gradient stays float32.

    Attributes:
        uses: by variable, the parameter it is.
        without_data: variables that hold weights, cast or rearranged, and no data.
        mesh: where they are gathered; None for a program without a mesh.
        gather_inside: whether weights are gathered inside of each block.
        rounds: whether weights are rounded to their compute dtype; not in float64.
    """

    uses: Mapping[Var, WeightUse]
    without_data: Collection[Var] = ()
    mesh: MeshView | None = None
    gather_inside: bool = False
    rounds: bool = True

    def make_ready(self, value: Value, use: WeightUse) -> Value:
        """Return a weight cast and gathered for use."""
        return self._ready(value, use, use.specs)

    def make_layer_ready(self, layer: Value, use: WeightUse) -> Value:
        """Return one layer of a stack ready for use, unless the whole stack already is."""
        if not self.gather_inside:
            return layer
        return self._ready(layer, use, use.specs.per_layer() if use.specs else None)

    def rounded(self, value: Value, dtype: DTypeLike) -> Value:
        """Return a ready weight in the dtype an equation was traced with."""
        return value.astype(dtype) if self.rounds else value

    def is_cast(self, variable: Var) -> bool:
        """Whether a variable is a parameter in its compute dtype."""
        return variable in self.uses and self.uses[variable].dtype is not None

    def is_half(self, atom: Atom) -> bool:
        """Whether an atom is rounded to half precision."""
        return self.rounds and aval_of(atom).dtype in HALF

    def _ready(self, value: Value, use: WeightUse, specs: GatherSpecs | None) -> Value:
        dtype = use.dtype if self.rounds else None
        if dtype is None and specs is None:
            return value
        return make_ready(value, self.mesh, dtype=dtype, specs=specs, trained=use.trained)


NO_WEIGHTS = Weights({})
