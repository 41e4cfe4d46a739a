"""The parameters of a traced program: which variables stand for them, and how they are read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshwright.program.evaluate.gather import GatherSpecs, ready
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.jaxpr.equations import Atom, Value, Var, aval_of

HALF = (jnp.bfloat16, jnp.float16)


@dataclass(frozen=True)
class WeightUse:
    """How a variable stands for a parameter.

    Attributes:
        leaf: the parameter's own variable.
        dtype: the compute format it is cast to; None for its own.
        specs: how it is gathered; None if it is whole already.
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

    A weight in half precision is ready as float32 numbers that hold half-precision values: what
    reads them reads half precision, and their gradients stay float32 on the way back.

    Attributes:
        uses: by variable, the parameter it stands for.
        without_data: variables that hold weights, cast or rearranged, and no data.
        mesh: where they are gathered; None for a program that is on no mesh.
        gather_inside: whether each block gathers its weights for itself.
        rounds: whether weights are rounded to their compute format; not in float64.
    """

    uses: Mapping[Var, WeightUse]
    without_data: Collection[Var] = ()
    mesh: MeshView | None = None
    gather_inside: bool = False
    rounds: bool = True

    def make_ready(self, value: Value, use: WeightUse) -> Value:
        """Return a weight cast and gathered for use."""
        return self._ready(value, use, use.specs)

    def make_layer_ready(self, piece: Value, use: WeightUse) -> Value:
        """Return one layer of a stack ready for use, unless the whole stack is already."""
        if not self.gather_inside:
            return piece
        return self._ready(piece, use, use.specs.per_layer() if use.specs else None)

    def rounded(self, value: Value, dtype: DTypeLike) -> Value:
        """Return a weight that is ready in the format an equation was traced for."""
        return value.astype(dtype) if self.rounds else value

    def is_cast(self, variable: Var) -> bool:
        """Whether a variable is a parameter in its compute format."""
        return variable in self.uses and self.uses[variable].dtype is not None

    def is_half(self, atom: Atom) -> bool:
        """Whether an atom has a half-precision format that it is rounded to."""
        return self.rounds and aval_of(atom).dtype in HALF

    def _ready(self, value: Value, use: WeightUse, specs: GatherSpecs | None) -> Value:
        dtype = use.dtype if self.rounds else None
        if dtype is None and specs is None:
            return value
        return ready(value, self.mesh, dtype=dtype, specs=specs, trained=use.trained)


NO_WEIGHTS = Weights({})
