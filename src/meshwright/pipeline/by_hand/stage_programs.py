"""The compiled programs of a stage on its own devices: forward, backward, its halves, updates."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from meshwright.errors import UserError, typed_line
from meshwright.pipeline.by_hand.layer_forms import Part
from meshwright.pipeline.execute.slots import MessageSplit
from meshwright.pipeline.execute.stage_vjp import ForwardValues, HeldValues, StageVJP
from meshwright.trees import PyTree
from meshwright.weighted import Weighted

Loss = Callable[[PyTree, PyTree], Array | Weighted]
"""From (output, target) to a scalar mean or `Weighted`."""


def form_of_arrays(tree: PyTree) -> Hashable:
    """Return structure, shapes and dtypes of a pytree, for which programs are compiled once."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StageCall:
    """The inputs of a stage for one microbatch, besides its parameters; the last has a target."""

    state: PyTree
    x: PyTree
    target: PyTree


class StagePrograms:
    """One stage's programs, compiled for its devices, over which samples are sharded.

    The input of the first stage needs no gradient; the last stage has the loss of (output, target).
    """

    def __init__(self, part: Part, mesh: Mesh, *, first: bool, loss: Loss | None) -> None:
        self.part, self.mesh, self.first, self.loss = part, mesh, first, loss
        self._programs: dict[Hashable, StageVJP] = {}
        self.forward = jax.jit(self._forward)
        self.backward = jax.jit(self._backward, donate_argnums=0)
        self.input_gradient = jax.jit(self._input_gradient)
        self.weight_gradient = jax.jit(self._weight_gradient, donate_argnums=0)

    @property
    def samples(self) -> NamedSharding:
        """The sharding of arrays with samples in dim 0."""
        return NamedSharding(self.mesh, PartitionSpec("data"))

    @property
    def everywhere(self) -> NamedSharding:
        """The sharding of parameters: replicated on the stage's devices."""
        return NamedSharding(self.mesh, PartitionSpec())

    def put(self, x: PyTree) -> PyTree:
        """Place samples on the stage's devices, replicated if they cannot be sharded."""
        count = self.mesh.size

        def place(array: Array) -> Array:
            divides = getattr(array, "ndim", 0) and array.shape[0] % count == 0
            return jax.device_put(array, self.samples if divides else self.everywhere)

        return jax.tree.map(place, x)

    def _forward(self, params: PyTree, call: StageCall) -> ForwardValues:
        """Run the stage; see `_function` for what it returns."""
        floats, others = self._split(call.x).split(call.x)
        others = StageCall(call.state, others, call.target)
        return self._program(params, call).forward(HeldValues(params), floats, others)

    def _backward(
        self, sums: PyTree, params: PyTree, call: StageCall, saved: list[Array], gradient: PyTree
    ) -> tuple[PyTree, list[Array]]:
        """Return (sums with the weights' gradients added, gradient of the input)."""
        more, back = self._program(params, call).backward(HeldValues(params), saved, gradient)
        return jax.tree.map(jnp.add, sums, more), back

    def _input_gradient(
        self, params: PyTree, call: StageCall, saved: list[Array], gradient: PyTree
    ) -> tuple[list[Array], list[Array]]:
        """Return (gradient of the input, values that the weight gradient needs)."""
        return self._program(params, call).input_gradient(HeldValues(params), saved, gradient)

    def _weight_gradient(
        self, sums: PyTree, params: PyTree, call: StageCall, saved: list[Array], cut: list[Array]
    ) -> PyTree:
        """Return sums with the weights' gradients added."""
        more = self._program(params, call).weight_gradient(HeldValues(params), saved, cut)
        return jax.tree.map(jnp.add, sums, more)

    def _program(self, params: PyTree, call: StageCall) -> StageVJP:
        """Return the stage's programs for these shapes and dtypes."""
        key = form_of_arrays((params, call))
        if key not in self._programs:
            split = self._split(call.x)

            def function(
                params: PyTree, fixed: PyTree, floats: list[Array], inputs: StageCall
            ) -> tuple[PyTree, tuple[PyTree, PyTree]]:
                x = split.join(floats, inputs.x)
                return self._function(params, StageCall(inputs.state, x, inputs.target))

            floats, others = split.split(call.x)
            shapes = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype),
                (params, floats, StageCall(call.state, others, call.target)),
            )
            self._programs[key] = StageVJP(function, HeldValues(shapes[0]), *shapes[1:])
        return self._programs[key]

    def _function(self, params: PyTree, call: StageCall) -> tuple[PyTree, tuple[PyTree, PyTree]]:
        """Return the output's leaves with a gradient, and (state, other leaves).

        On the last stage, these are the loss's total and (state, the loss's weight).
        """
        y, state = self.part.apply(params, call.state, call.x)
        if self.loss is None:
            floats, others = MessageSplit.of(y).split(y)
            return floats, (state, others)
        value = self.loss(y, call.target)
        if not isinstance(value, Weighted):
            value = jnp.asarray(value)
            count = jax.tree.leaves(call.target)[0].shape[0]
            value = Weighted(value * count, jnp.asarray(count, value.dtype))
        return value.total, (state, value.weight)

    def _split(self, x: PyTree) -> MessageSplit:
        return MessageSplit.of(x, differentiable=not self.first)


Scalar = np.generic | NDArray[np.generic]
"""One number on the host."""


def update_stages(
    optimizer: optax.GradientTransformation,
    stages: Sequence[StagePrograms],
    gradients: Sequence[PyTree],
    states: Sequence[PyTree],
    params: Sequence[PyTree],
    clip_norm: float | None,
) -> tuple[list[PyTree], list[PyTree]]:
    """Return (parameters, states) after an update, the gradients of all stages clipped together."""
    factor = _clip_factor(gradients, clip_norm)
    updated: list[tuple[PyTree, PyTree]] = []
    for stage, own, state, before in zip(stages, gradients, states, params, strict=True):
        state = jax.device_put(state, stage.everywhere)
        try:
            updated.append(_update(optimizer, own, state, before, factor))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                "the optimizer cannot update the parameters",
                why=typed_line(error),
                fix="pass the states that pipeline.init(optimizer) or the last update returned",
            ) from error
    return [after for after, _ in updated], [state for _, state in updated]


def _clip_factor(gradients: Sequence[PyTree], clip_norm: float | None) -> Scalar:
    if clip_norm is None:
        return np.float32(1)
    squares = [_sum_of_squares(own) for own in gradients]
    norm = np.sqrt(sum(np.asarray(each) for each in squares))
    return np.minimum(1, clip_norm / np.maximum(norm, np.finfo(np.float32).tiny))


# Gradients and states are donated; the user may still read the parameters.
@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def _update(
    optimizer: optax.GradientTransformation,
    gradients: PyTree,
    state: PyTree,
    params: PyTree,
    factor: Array,
) -> tuple[PyTree, PyTree]:
    scaled = jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)
    updates, state = optimizer.update(scaled, state, params)
    return optax.apply_updates(params, updates), copied(state)


def copied(state: PyTree) -> PyTree:
    """Copy an optimizer state: some contain parameters, and donated states need their own."""
    return jax.tree.map(jnp.copy, state)


@jax.jit
def _sum_of_squares(gradients: PyTree) -> Array:
    # At least 32 bits: a sum of squares soon overflows 16 bits.
    squares = [
        jnp.sum(jnp.square(jnp.abs(g).astype(jnp.promote_types(jnp.abs(g).dtype, jnp.float32))))
        for g in jax.tree.leaves(gradients)
    ]
    return sum(squares, start=jnp.zeros((), jnp.float32))
