"""The host-driven executor: the host starts each stage's own programs in schedule order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from meshwright.mesh.build import Device
from meshwright.pipeline.aliases import Array
from meshwright.pipeline.by_hand.stage_programs import StageCall, StagePrograms
from meshwright.pipeline.execute.messages import MessageSplit
from meshwright.pipeline.schedule.operations import Kind, Op, Shape
from meshwright.pipeline.schedule.schedules import Schedule
from meshwright.pipeline.schedule.timeline import simulate
from meshwright.program.trace.precision_policy import zeros_for_sums
from meshwright.trees import PyTree

Place = tuple[int, int]
"""A microbatch and a virtual stage."""


@dataclass(frozen=True)
class BatchSums:
    """What a batch gives.

    Attributes:
        gradients: for each stage, the sum of its gradients, each microbatch with its weight.
        total: weighted sum of the losses.
        weight: sum of the weights.
        states: the stages' state afterwards.
    """

    gradients: list[PyTree]
    total: Array
    weight: Array
    states: list[PyTree]


class HostExecutor:
    """Runs a batch through stages in the order of a schedule.

    Every program is started as soon as those it depends on have been; devices work on their own.

    Args:
        stages: the stages' programs, chunk by chunk.
        schedule: when each stage does what.
        outputs: for each stage, which leaves of its output have a gradient.
    """

    def __init__(
        self, stages: Sequence[StagePrograms], schedule: Schedule, outputs: Sequence[MessageSplit]
    ) -> None:
        self.stages, self.schedule, self.outputs = stages, schedule, outputs
        self.most_kept = [0] * len(stages)

    def run(
        self,
        params: Sequence[PyTree],
        states: Sequence[PyTree],
        inputs: Sequence[PyTree],
        targets: Sequence[PyTree],
    ) -> BatchSums:
        """Run microbatches forward and backward and add up their gradients."""
        count = len(self.stages) // self.schedule.num_chunks
        shape = self.schedule.shape(len(inputs), count)
        timeline = simulate(self.schedule.operations(len(inputs), count), shape)
        run = _BatchRun(self, list(params), list(states), inputs, targets, shape)
        for span in sorted(timeline.spans, key=lambda span: (span.start, span.stage)):
            run.execute(span.op, shape.virtual(span.op, span.stage))
        total = sum(run.totals[1:], start=run.totals[0])
        weight = sum(run.weights[1:], start=run.weights[0])
        return BatchSums(run.sums, total, weight, run.states)


class _KeptCall(NamedTuple):
    """What a forward pass leaves for its backward: what it was called with, and kept values."""

    call: StageCall
    kept: list[Array]


class _BatchRun:
    """One batch on its way through the stages."""

    def __init__(
        self,
        host: HostExecutor,
        params: list[PyTree],
        states: list[PyTree],
        inputs: Sequence[PyTree],
        targets: Sequence[PyTree],
        shape: Shape,
    ) -> None:
        self.host, self.params, self.states, self.targets = host, params, states, targets
        self.last = shape.num_virtual - 1
        self.arrived: dict[Place, PyTree] = {(m, 0): x for m, x in enumerate(inputs)}
        self.gradients: dict[Place, PyTree] = {}
        self.calls: dict[Place, _KeptCall] = {}
        self.cuts: dict[Place, list[Array]] = {}
        self.sums = [zeros_for_sums(p) for p in params]
        self.totals: list[Array] = []
        self.weights: list[Array] = []

    def execute(self, op: Op, at: int) -> None:
        """Start one operation on one virtual stage."""
        if op.kind is Kind.FORWARD:
            self.forward(op.microbatch, at)
        elif op.kind is Kind.WEIGHT_GRAD:
            self.weight_gradient(op, at)
        else:
            self.backward(op, at)

    def forward(self, microbatch: int, at: int) -> None:
        """Start a forward pass and hand its result on."""
        stage = self.host.stages[at]
        target = stage.put(self.targets[microbatch]) if at == self.last else ()
        x = stage.put(self.arrived.pop((microbatch, at)))
        call = StageCall(self.states[at], x, target)
        result = stage.forward(self.params[at], call)
        self.states[at] = result.state
        # Of the call only shapes are needed again, but arrays that are not read cost nothing.
        self.calls[microbatch, at] = _KeptCall(call, result.kept)
        here = sum(place[1] == at for place in self.calls)
        self.host.most_kept[at] = max(self.host.most_kept[at], here)
        if at == self.last:
            self.totals.append(result.floats)
            self.weights.append(result.others)
            self.gradients[microbatch, at] = jnp.ones((), result.floats.dtype)
        else:
            output = self.host.outputs[at].join(result.floats, result.others)
            self.arrived[microbatch, at + 1] = output

    def backward(self, op: Op, at: int) -> None:
        """Start a backward pass, or its input gradient alone, and hand the gradient back."""
        stage, params, kept = self.host.stages[at], self.params[at], self.kept_call(op, at)
        gradient = self.gradients.pop((op.microbatch, at))
        if op.kind is Kind.INPUT_GRAD:
            back, cut = stage.input_gradient(params, kept.call, kept.kept, gradient)
            self.cuts[op.microbatch, at] = cut
        else:
            self.sums[at], back = stage.backward(
                self.sums[at], params, kept.call, kept.kept, gradient
            )
        if at > 0:
            self.gradients[op.microbatch, at - 1] = self.host.stages[at - 1].put(back)

    def weight_gradient(self, op: Op, at: int) -> None:
        """Start the weight gradient that an input gradient has left."""
        kept, cut = self.kept_call(op, at), self.cuts.pop((op.microbatch, at))
        self.sums[at] = self.host.stages[at].weight_gradient(
            self.sums[at], self.params[at], kept.call, kept.kept, cut
        )

    def kept_call(self, op: Op, at: int) -> _KeptCall:
        """Return what the forward pass has left, and forget it if nothing else will read it."""
        place = (op.microbatch, at)
        return self.calls.pop(place) if op.releases else self.calls[place]


def divide_devices(devices: Sequence[Device], num_stages: int) -> list[Mesh]:
    """Return the devices of each stage, as many for each; what is left over stays idle."""
    each = len(devices) // num_stages
    groups = [devices[n * each : (n + 1) * each] for n in range(num_stages)]
    return [Mesh(np.array(group), ("data",), axis_types=(AxisType.Auto,)) for group in groups]
