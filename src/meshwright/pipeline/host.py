"""Stages as programs of their own, each on its own devices, run by the host in schedule order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshwright.pipeline.arrays import is_float
from meshwright.pipeline.operations import Kind, Op, Shape
from meshwright.pipeline.parts import Part
from meshwright.pipeline.schedules import Schedule
from meshwright.pipeline.stage_vjp import StageVJP
from meshwright.pipeline.timeline import simulate
from meshwright.program.policy import zeros_for_sums
from meshwright.weighted import Weighted

Loss = Callable[[Any, Any], Any]
"""From (output, target) to a scalar mean or `Weighted`."""


@dataclass(frozen=True)
class BatchSums:
    """What a batch gives.

    Attributes:
        gradients: for each stage, the sum of its gradients, each microbatch with its weight.
        total: weighted sum of the losses.
        weight: sum of the weights.
        states: the stages' state afterwards.
    """

    gradients: list[Any]
    total: Any
    weight: Any
    states: list[Any]


class Stage:
    """One stage's programs, compiled for its devices.

    Args:
        part: the stage's function.
        mesh: its devices, samples divided over ``data``.
        first: whether its input needs no gradient.
        loss: for the last stage, the loss of (output, target).
    """

    def __init__(self, part: Part, mesh: Mesh, *, first: bool, loss: Loss | None) -> None:
        self.part, self.mesh, self.first, self.loss = part, mesh, first, loss
        self._programs: dict[Any, StageVJP] = {}
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
        """How parameters are kept: whole on each of the stage's devices."""
        return NamedSharding(self.mesh, PartitionSpec())

    def put(self, x: Any) -> Any:
        """Bring samples to the stage's devices; those that cannot be divided go to each."""
        count = self.mesh.size

        def place(array: Any) -> Any:
            divides = getattr(array, "ndim", 0) and array.shape[0] % count == 0
            return jax.device_put(array, self.samples if divides else self.everywhere)

        return jax.tree.map(place, x)

    def forward(self, params: Any, state: Any, x: Any, target: Any) -> Any:
        """Return (message or loss, state, kept)."""
        return self._forward(params, state, x, target)

    def backward(self, sums: Any, params: Any, call: Any, kept: Any, gradient: Any) -> Any:
        """Return (sums with the weights' gradients added, gradient of the input)."""
        return self._backward(sums, params, call, kept, gradient)

    def input_gradient(self, params: Any, call: Any, kept: Any, gradient: Any) -> Any:
        """Return (gradient of the input, what the weights' gradient needs)."""
        return self._input(params, call, kept, gradient)

    def weight_gradient(self, sums: Any, params: Any, call: Any, kept: Any, cut: Any) -> Any:
        """Return sums with the weights' gradients added."""
        return self._weight(sums, params, call, kept, cut)

    def _run_forward(self, params: Any, state: Any, x: Any, target: Any) -> Any:
        floats, whole = self._divide(x)
        program = self._program(params, state, x, target)
        taken = program.forward(params, (), floats, (whole, state, target))
        return taken.y, taken.further, taken.kept

    def _run_backward(self, sums: Any, params: Any, call: Any, kept: Any, gradient: Any) -> Any:
        more, back = self._program(params, *call).backward(params, (), kept, gradient)
        return jax.tree.map(jnp.add, sums, more), back

    def _run_input(self, params: Any, call: Any, kept: Any, gradient: Any) -> Any:
        return self._program(params, *call).input_gradient(params, (), kept, gradient)

    def _run_weight(self, sums: Any, params: Any, call: Any, kept: Any, cut: Any) -> Any:
        more = self._program(params, *call).weight_gradient(params, (), kept, cut)
        return jax.tree.map(jnp.add, sums, more)

    def _program(self, params: Any, state: Any, x: Any, target: Any) -> StageVJP:
        """Return the stage's function ready for these shapes; state may change its dtype, too."""
        key = str(jax.tree.map(lambda a: (a.shape, a.dtype), (params, state, x, target)))
        if key not in self._programs:
            floats, whole = self._divide(x)
            shapes = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype),
                (params, floats, (whole, state, target)),
            )
            params, floats, others = shapes
            tree = jax.tree.structure(x)
            kinds = [is_float(a) and not self.first for a in jax.tree.leaves(x)]

            def function(params: Any, fixed: Any, floats: Any, others: Any) -> Any:
                whole, state, target = others
                first, second = iter(floats), iter(whole)
                x = jax.tree.unflatten(tree, [next(first if k else second) for k in kinds])
                return self._function(params, state, x, target)

            self._programs[key] = StageVJP(function, params, (), floats, others)
        return self._programs[key]

    def _function(self, params: Any, state: Any, x: Any, target: Any) -> Any:
        y, state = self.part.apply(params, state, x)
        if self.loss is None:
            leaves = jax.tree.leaves(y)
            whole = [a for a in leaves if not is_float(a)]
            return [a for a in leaves if is_float(a)], (state, whole)
        value = self.loss(y, target)
        if not isinstance(value, Weighted):
            value = jnp.asarray(value)
            count = jax.tree.leaves(target)[0].shape[0]
            value = Weighted(value * count, jnp.asarray(count, value.dtype))
        return value.total, (state, value.weight)

    def _divide(self, x: Any) -> tuple[list[Any], list[Any]]:
        leaves = jax.tree.leaves(x)
        floats = [a for a in leaves if is_float(a) and not self.first]
        return floats, [a for a in leaves if not (is_float(a) and not self.first)]


class Host:
    """Runs a batch through stages in the order of a schedule.

    Every program is started as soon as those it depends on have been; devices work on their own.

    Args:
        stages: the stages' programs, chunk by chunk.
        schedule: when each stage does what.
        trees: for each stage but the last, how its output is nested.
    """

    def __init__(self, stages: Sequence[Stage], schedule: Schedule, trees: Sequence[Any]) -> None:
        self.stages, self.schedule, self.trees = stages, schedule, trees
        self.most_kept = [0] * len(stages)

    def run(
        self, params: Sequence[Any], states: Sequence[Any], inputs: Sequence[Any], targets: Any
    ) -> BatchSums:
        """Run microbatches forward and backward and add up their gradients."""
        count = len(self.stages) // self.schedule.num_chunks
        shape = self.schedule.shape(len(inputs), count)
        timeline = simulate(self.schedule.operations(len(inputs), count), shape)
        run = _Run(self, list(params), list(states), inputs, targets, shape)
        for span in sorted(timeline.spans, key=lambda span: (span.start, span.stage)):
            run.execute(span.op, shape.virtual(span.op, span.stage))
        total = sum(run.totals[1:], start=run.totals[0])
        weight = sum(run.weights[1:], start=run.weights[0])
        return BatchSums(run.sums, total, weight, run.states)


class _Run:
    """One batch on its way through the stages."""

    def __init__(
        self,
        host: Host,
        params: list[Any],
        states: list[Any],
        inputs: Sequence[Any],
        targets: Any,
        shape: Shape,
    ) -> None:
        self.host, self.params, self.states, self.targets = host, params, states, targets
        self.last = shape.num_virtual - 1
        self.arrived = {(m, 0): x for m, x in enumerate(inputs)}
        self.gradients: dict[tuple[int, int], Any] = {}
        self.calls: dict[tuple[int, int], Any] = {}
        self.cuts: dict[tuple[int, int], Any] = {}
        self.sums = [zeros_for_sums(p) for p in params]
        self.totals: list[Any] = []
        self.weights: list[Any] = []

    def execute(self, op: Op, at: int) -> None:
        """Start one operation on one virtual stage."""
        stage, place = self.host.stages[at], (op.microbatch, at)
        if op.kind is Kind.FORWARD:
            return self.forward(stage, op.microbatch, at)
        call, kept = self.calls[place]
        if op.releases:
            del self.calls[place]
        if op.kind is Kind.WEIGHT_GRAD:
            cut = self.cuts.pop(place)
            self.sums[at] = stage.weight_gradient(self.sums[at], self.params[at], call, kept, cut)
            return None
        gradient = self.gradients.pop(place)
        if op.kind is Kind.INPUT_GRAD:
            back, self.cuts[place] = stage.input_gradient(self.params[at], call, kept, gradient)
        else:
            self.sums[at], back = stage.backward(
                self.sums[at], self.params[at], call, kept, gradient
            )
        if at > 0:
            self.gradients[op.microbatch, at - 1] = self.host.stages[at - 1].put(back)
        return None

    def forward(self, stage: Stage, microbatch: int, at: int) -> None:
        """Start a forward pass and hand its result on."""
        target = stage.put(self.targets[microbatch]) if at == self.last else ()
        x = stage.put(self.arrived.pop((microbatch, at)))
        before = self.states[at]
        y, (self.states[at], rest), kept = stage.forward(self.params[at], before, x, target)
        # Of the call only shapes are needed again, but arrays that are not read cost nothing.
        self.calls[microbatch, at] = ((before, x, target), kept)
        here = sum(place[1] == at for place in self.calls)
        self.host.most_kept[at] = max(self.host.most_kept[at], here)
        if at == self.last:
            self.totals.append(y)
            self.weights.append(rest)
            self.gradients[microbatch, at] = jnp.ones((), y.dtype)
        else:
            self.arrived[microbatch, at + 1] = _together(self.host.trees[at], y, rest)


def _together(tree: Any, floats: Sequence[Any], whole: Sequence[Any]) -> Any:
    kinds, treedef = tree
    first, second = iter(floats), iter(whole)
    return jax.tree.unflatten(treedef, [next(first if kind else second) for kind in kinds])


def output_tree(shapes: Any) -> Any:
    """Return which of an output's leaves have gradients, and how they are nested."""
    leaves, treedef = jax.tree.flatten(shapes)
    return [is_float(a) for a in leaves], treedef


def divide_devices(devices: Sequence[Any], num_stages: int) -> list[Mesh]:
    """Return the devices of each stage, as many for each; what is left over stays idle."""
    each = len(devices) // num_stages
    groups = [devices[n * each : (n + 1) * each] for n in range(num_stages)]
    return [Mesh(np.array(group), ("data",), axis_types=(AxisType.Auto,)) for group in groups]
