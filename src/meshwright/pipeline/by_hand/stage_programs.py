"""The programs of a stage that runs on its own devices: forward, backward and its halves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.pipeline.aliases import Array
from meshwright.pipeline.by_hand.layer_forms import Part
from meshwright.pipeline.execute.messages import MessageSplit
from meshwright.pipeline.execute.stage_vjp import StageVJP
from meshwright.trees import PyTree
from meshwright.weighted import Weighted

Loss = Callable[[PyTree, PyTree], Array | Weighted]
"""From (output, target) to a scalar mean or `Weighted`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StageCall:
    """What a stage is called with for one microbatch, beside its parameters.

    Attributes:
        state: its state before.
        x: its input.
        target: on the last stage, what the loss compares with.
    """

    state: PyTree
    x: PyTree
    target: PyTree


class ForwardResult(NamedTuple):
    """What a stage's forward pass gives.

    Attributes:
        floats: leaves of the output that have a gradient; on the last stage the loss's total.
        others: the other leaves of the output; on the last stage the loss's weight.
        state: the stage's state afterwards.
        kept: what the backward needs of this pass.
    """

    floats: PyTree
    others: PyTree
    state: PyTree
    kept: list[Array]


class StagePrograms:
    """One stage's programs, compiled for its devices.

    Args:
        part: the stage's function.
        mesh: its devices, samples divided over ``data``.
        first: whether its input needs no gradient.
        loss: for the last stage, the loss of (output, target).
    """

    def __init__(self, part: Part, mesh: Mesh, *, first: bool, loss: Loss | None) -> None:
        self.part, self.mesh, self.first, self.loss = part, mesh, first, loss
        self._programs: dict[str, StageVJP] = {}
        self._forward = jax.jit(self._run_forward)
        self._backward = jax.jit(self._run_backward, donate_argnums=0)
        self._input = jax.jit(self._run_input)
        self._weight = jax.jit(self._run_weight, donate_argnums=0)

    @property
    def samples(self) -> NamedSharding:
        """How arrays with samples in dim 0 are divided over the stage's devices."""
        return NamedSharding(self.mesh, PartitionSpec("data"))

    @property
    def everywhere(self) -> NamedSharding:
        """How parameters are held: whole on each of the stage's devices."""
        return NamedSharding(self.mesh, PartitionSpec())

    def put(self, x: PyTree) -> PyTree:
        """Bring samples to the stage's devices; those that cannot be divided go to each."""
        count = self.mesh.size

        def place(array: Array) -> Array:
            divides = getattr(array, "ndim", 0) and array.shape[0] % count == 0
            return jax.device_put(array, self.samples if divides else self.everywhere)

        return jax.tree.map(place, x)

    def forward(self, params: PyTree, call: StageCall) -> ForwardResult:
        """Run the stage."""
        return self._forward(params, call)

    def backward(
        self, sums: PyTree, params: PyTree, call: StageCall, kept: list[Array], gradient: PyTree
    ) -> tuple[PyTree, list[Array]]:
        """Return (sums with the weights' gradients added, gradient of the input)."""
        return self._backward(sums, params, call, kept, gradient)

    def input_gradient(
        self, params: PyTree, call: StageCall, kept: list[Array], gradient: PyTree
    ) -> tuple[list[Array], list[Array]]:
        """Return (gradient of the input, what the weights' gradient needs)."""
        return self._input(params, call, kept, gradient)

    def weight_gradient(
        self, sums: PyTree, params: PyTree, call: StageCall, kept: list[Array], cut: list[Array]
    ) -> PyTree:
        """Return sums with the weights' gradients added."""
        return self._weight(sums, params, call, kept, cut)

    def _run_forward(self, params: PyTree, call: StageCall) -> ForwardResult:
        floats, others = self._split(call.x).split(call.x)
        program = self._program(params, call)
        result = program.forward(params, (), floats, StageCall(call.state, others, call.target))
        state, rest = result.further
        return ForwardResult(result.y, rest, state, result.kept)

    def _run_backward(
        self, sums: PyTree, params: PyTree, call: StageCall, kept: list[Array], gradient: PyTree
    ) -> tuple[PyTree, list[Array]]:
        more, back = self._program(params, call).backward(params, (), kept, gradient)
        return jax.tree.map(jnp.add, sums, more), back

    def _run_input(
        self, params: PyTree, call: StageCall, kept: list[Array], gradient: PyTree
    ) -> tuple[list[Array], list[Array]]:
        return self._program(params, call).input_gradient(params, (), kept, gradient)

    def _run_weight(
        self, sums: PyTree, params: PyTree, call: StageCall, kept: list[Array], cut: list[Array]
    ) -> PyTree:
        more = self._program(params, call).weight_gradient(params, (), kept, cut)
        return jax.tree.map(jnp.add, sums, more)

    def _program(self, params: PyTree, call: StageCall) -> StageVJP:
        """Return the stage's function ready for these shapes; state may change its dtype, too."""
        key = str(jax.tree.map(lambda a: (a.shape, a.dtype), (params, call)))
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
            self._programs[key] = StageVJP(function, shapes[0], (), *shapes[1:])
        return self._programs[key]

    def _function(self, params: PyTree, call: StageCall) -> tuple[PyTree, tuple[PyTree, PyTree]]:
        """Return (output or loss, (state, what of the output has no gradient))."""
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
