"""The parameters of a traced program: which variables they are, and how they are made ready."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from meshwright.mesh.axes import CONTEXT
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.jaxpr.equations import Atom, Value, Var, aval_of

GATHERED = "gathered"
"""The name by which remat policies recognize gathered weights."""


@dataclass(frozen=True)
class GatherSpecs:
    """The two layouts of a weight that is sharded over fsdp: whole for use, sharded in storage."""

    whole: PartitionSpec
    sharded: PartitionSpec


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

    def prepare_layer(self, layer: Value, use: WeightUse) -> Value:
        """Return one layer of a stack ready for use, unless the whole stack already is."""
        if not self.gather_per_block:
            return layer
        stack = use.specs
        specs = stack and GatherSpecs(
            PartitionSpec(*stack.whole[1:]), PartitionSpec(*stack.sharded[1:])
        )
        return self.prepare(layer, replace(use, specs=specs))

    def cast(self, value: Value, dtype: DTypeLike) -> Value:
        """Cast a prepared weight to the dtype an equation was traced with."""
        return value.astype(dtype) if self.casts else value

    def is_cast(self, variable: Var) -> bool:
        """Whether a variable is a parameter in its compute dtype."""
        return variable in self.uses and self.uses[variable].dtype is not None

    def is_half(self, atom: Atom) -> bool:
        """Whether an atom is rounded to half precision."""
        return self.casts and aval_of(atom).dtype in HALF

    def prepare(self, value: Value, use: WeightUse) -> Value:
        """Return a weight cast and gathered for use, in its original dtype.

        Its values are rounded to the compute dtype and sent in it. The gradient has the layout of
        the stored weight and is not rounded: it is reduced by a reduce-scatter in the weight's
        dtype. With a plain constraint and a plain cast, every device would get the whole gradient,
        rounded before the devices' partial sums are added.
        """
        dtype, specs, mesh = use.dtype if self.casts else None, use.specs, self.mesh
        if dtype is None and specs is None:
            return value
        whole = None if specs is None or mesh is None else mesh.sharding(specs.whole)
        sharded = None if specs is None or mesh is None else mesh.sharding(specs.sharded)

        def prepare(weight: Any) -> Any:
            used = weight if dtype is None else weight.astype(dtype)
            if whole is not None:
                # Constrained on both sides of the gather: otherwise the compiler may cast after it,
                # which sends twice the bytes.
                used = jax.lax.with_sharding_constraint(used, sharded)
                used = jax.lax.with_sharding_constraint(used, whole)
            return checkpoint_name(used, GATHERED).astype(weight.dtype)

        if not use.trained:
            # The result of a custom_vjp that nothing differentiates would be saved, gathered.
            return prepare(value)
        prepared = jax.custom_vjp(prepare)

        def backward(_: None, cotangent: Any) -> tuple[Any]:
            if mesh is not None and whole is not None:
                # Whole first: otherwise the partitioner may move activations to the devices that
                # hold the pieces of the gradient, instead of reducing partial sums.
                # Positions that are sharded as well would then be summed whole, before the scatter.
                if mesh.auto_axes.get(CONTEXT, 1) == 1:
                    cotangent = jax.lax.with_sharding_constraint(cotangent, whole)
                cotangent = jax.lax.with_sharding_constraint(cotangent, sharded)
            return (cotangent,)

        # Not `prepared` itself: inside a checkpoint, its result would be another value and saved.
        prepared.defvjp(lambda weight: (prepare(weight), None), backward)
        return checkpoint_name(prepared(value), GATHERED)


NO_WEIGHTS = Weights({})
