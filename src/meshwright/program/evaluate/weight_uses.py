"""The parameters of a traced program: which variables they are, and how they are read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshwright.program.evaluate.gather import GatherSpecs, prepare_weight
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
        shared: whether several products read it.
    """

    leaf: Var
    dtype: DTypeLike | None
    specs: GatherSpecs | None
    whole: PartitionSpec
    trained: bool
    shared: bool = False


@dataclass(frozen=True)
class Weights:
    """How a program reads its parameters.

    A weight in half precision is stored as float32 numbers with half-precision values: whoever
    reads it reads half precision, and its gradient stays float32.

    Attributes:
        uses: by variable, the parameter it is.
        weight_only: variables that hold weights, cast or rearranged, and no data.
        mesh: where they are gathered; None for a program without a mesh.
        gather_per_block: whether weights are gathered inside of each block.
        casts: whether weights are cast to their compute dtype; False in float64.
    """

    uses: Mapping[Var, WeightUse]
    weight_only: Collection[Var] = ()
    mesh: MeshView | None = None
    gather_per_block: bool = False
    casts: bool = True

    def prepare(self, value: Value, use: WeightUse) -> Value:
        """Return a weight cast and gathered for use."""
        return self._prepare(value, use, use.specs)

    def prepare_layer(self, layer: Value, use: WeightUse) -> Value:
        """Return one layer of a stack ready for use, unless the whole stack already is."""
        if not self.gather_per_block:
            return layer
        return self._prepare(layer, use, use.specs.per_layer() if use.specs else None)

    def cast(self, value: Value, dtype: DTypeLike) -> Value:
        """Cast a prepared weight to the dtype an equation was traced with."""
        return value.astype(dtype) if self.casts else value

    def is_cast(self, variable: Var) -> bool:
        """Whether a variable is a parameter in its compute dtype."""
        return variable in self.uses and self.uses[variable].dtype is not None

    def is_half(self, atom: Atom) -> bool:
        """Whether an atom is rounded to half precision."""
        return self.casts and aval_of(atom).dtype in HALF

    def _prepare(self, value: Value, use: WeightUse, specs: GatherSpecs | None) -> Value:
        dtype = use.dtype if self.casts else None
        if dtype is None and specs is None:
            return value
        return prepare_weight(value, self.mesh, dtype=dtype, specs=specs, trained=use.trained)


NO_WEIGHTS = Weights({})
