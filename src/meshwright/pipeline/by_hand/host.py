"""Running a batch from the host, which starts each stage's own programs in schedule order."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from meshwright.pipeline.by_hand.stage_programs import StageCall, StagePrograms
from meshwright.pipeline.execute.slots import MessageSplit
from meshwright.pipeline.schedule.operations import Kind, Op
from meshwright.pipeline.schedule.schedules import Schedule
from meshwright.pipeline.schedule.timeline import simulate
from meshwright.program.trace.precision_policy import zeros_for_sums
from meshwright.trees import PyTree

Place = tuple[int, int]
"""A microbatch and a virtual stage."""


_ForwardRecord = tuple[StageCall, list[Array]]
"""The inputs of a forward pass and the values it saved for the backward pass."""


class BatchRun:
    """A batch that passes through the stages, forward and backward.

    Every program is dispatched after those it depends on; devices work asynchronously. Stages,
    outputs, parameters, states and sums are by virtual stage; inputs, targets, totals and weights
    by microbatch. ``outputs`` says which leaves of a stage's output have a gradient; sums of
    gradients and of losses are weighted.
    """

    def __init__(
        self,
        stages: Sequence[StagePrograms],
        outputs: Sequence[MessageSplit],
        params: Sequence[PyTree],
        states: Sequence[PyTree],
        inputs: Sequence[PyTree],
        targets: Sequence[PyTree],
    ) -> None:
        self.stages, self.outputs, self.params = stages, outputs, params
        self.states, self.targets = list(states), targets
        self.last = len(stages) - 1
        self.arrived: dict[Place, PyTree] = {(m, 0): x for m, x in enumerate(inputs)}
        self.gradients: dict[Place, PyTree] = {}
        self.calls: dict[Place, _ForwardRecord] = {}
        self.cuts: dict[Place, list[Array]] = {}
        self.sums = [zeros_for_sums(p) for p in params]
        self.totals: list[Array] = []
        self.weights: list[Array] = []
        self.most_kept = [0] * len(stages)

    def run(self, schedule: Schedule) -> None:
        """Start all operations in the order of a schedule."""
        count, microbatches = len(self.stages) // schedule.num_chunks, len(self.targets)
        shape = schedule.shape(microbatches, count)
        timeline = simulate(schedule.operations(microbatches, count), shape)
        for span in sorted(timeline.spans, key=lambda span: (span.start, span.stage)):
            at = shape.virtual(span.op, span.stage)
            if span.op.kind is Kind.FORWARD:
                self.forward(span.op.microbatch, at)
            elif span.op.kind is Kind.WEIGHT_GRAD:
                self.weight_gradient(span.op, at)
            else:
                self.backward(span.op, at)

    def forward(self, microbatch: int, at: int) -> None:
        """Start a forward pass and pass its result to the next stage."""
        stage = self.stages[at]
        target = stage.put(self.targets[microbatch]) if at == self.last else ()
        x = stage.put(self.arrived.pop((microbatch, at)))
        call = StageCall(self.states[at], x, target)
        result = stage.forward(self.params[at], call)
        self.states[at], others = result.further
        # Later only the shapes of the call are needed, but unread arrays cost nothing.
        self.calls[microbatch, at] = call, result.saved
        here = sum(place[1] == at for place in self.calls)
        self.most_kept[at] = max(self.most_kept[at], here)
        if at == self.last:
            self.totals.append(result.y)
            self.weights.append(others)
            self.gradients[microbatch, at] = jnp.ones((), result.y.dtype)
        else:
            self.arrived[microbatch, at + 1] = self.outputs[at].join(result.y, others)

    def backward(self, op: Op, at: int) -> None:
        """Start a backward pass, or its input gradient alone, and pass the gradient back."""
        stage, params, record = self.stages[at], self.params[at], self.forward_record(op, at)
        gradient = self.gradients.pop((op.microbatch, at))
        if op.kind is Kind.INPUT_GRAD:
            back, cut = stage.input_gradient(params, *record, gradient)
            self.cuts[op.microbatch, at] = cut
        else:
            self.sums[at], back = stage.backward(self.sums[at], params, *record, gradient)
        if at > 0:
            self.gradients[op.microbatch, at - 1] = self.stages[at - 1].put(back)

    def weight_gradient(self, op: Op, at: int) -> None:
        """Start the weight gradient of an earlier input gradient."""
        record, cut = self.forward_record(op, at), self.cuts.pop((op.microbatch, at))
        sums, params = self.sums[at], self.params[at]
        self.sums[at] = self.stages[at].weight_gradient(sums, params, *record, cut)

    def forward_record(self, op: Op, at: int) -> _ForwardRecord:
        """Return the record of a forward pass, and drop it after its last use."""
        place = (op.microbatch, at)
        return self.calls.pop(place) if op.releases else self.calls[place]
