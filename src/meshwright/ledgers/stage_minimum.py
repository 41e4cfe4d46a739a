"""The theoretical minimum with pipeline stages: what each stage has to send per update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.compiled.collectives import ring_bytes
from meshwright.ledgers.minimum import Needed, activations, reduction
from meshwright.mesh.axes import PIPE
from meshwright.pipeline.divide.block_cut import OuterLeaf, Region
from meshwright.pipeline.execute.pipelined_loss import PipelinedLoss
from meshwright.pipeline.execute.tick_rows import OpCounts, TickOp
from meshwright.program.dims.op import is_inexact, nbytes_of
from meshwright.program.jaxpr.equations import aval_of
from meshwright.program.trace.layout import StepLeaf
from meshwright.program.trace.precision_policy import COMPUTE_DTYPES
from meshwright.program.weight_reads import weights_in_backward
from meshwright.step.assemble import Assembled


def needed_by_stage(
    assembled: Assembled, pipeline: PipelinedLoss, counts: OpCounts
) -> list[list[Needed]]:
    """Return the collectives that each stage needs per update.

    Args:
        assembled: the step.
        pipeline: its loss, divided into stages.
        counts: how often each stage runs which operation.
    """
    stages = (_Stage(assembled, pipeline, counts, n) for n in range(counts.num_stages))
    return [list(stage.needed()) for stage in stages]


@dataclass(frozen=True)
class _Stage:
    """One stage of a pipeline."""

    assembled: Assembled
    pipeline: PipelinedLoss
    counts: OpCounts
    number: int

    def needed(self) -> Iterator[Needed]:
        yield from self._messages()
        yield from self._block_weights()
        yield from self._outer_weights()
        yield from self._activations()

    def _runs(self, operation: TickOp) -> int:
        return self.counts.counts[operation][self.number]

    @property
    def _share(self) -> float:
        """The part of the blocks that the stage has."""
        return len(self.pipeline.division.blocks(self.number)) / self.pipeline.cut.num_blocks

    def _messages(self) -> Iterator[Needed]:
        """Yield what is handed on to the next stage and back, per microbatch and chunk."""
        avals = [aval_of(variable) for variable in self.pipeline.cut.scan.final]
        replicas = self.assembled.plan.batch.replicas
        ahead = sum(map(nbytes_of, avals)) / replicas
        back = sum(nbytes_of(aval) for aval in avals if is_inexact(aval)) / replicas
        for operation, size in ((TickOp.SEND, ahead), (TickOp.SEND_BACK, back)):
            yield Needed(PIPE, "collective-permute", self._runs(operation) * size, "")

    def _block_weights(self) -> Iterator[Needed]:
        """Yield gathers and reductions of the blocks' weights, those of this stage only."""
        plan = self.assembled.plan
        for stack in self.pipeline.cut.stacks:
            if not stack.step.leaf.is_weight:
                continue
            rows = stack.step.leaf.shape[0]
            one = self._bytes(stack.step, stack.number) / rows
            own = one * len(self.pipeline.division.blocks(self.number))
            module = stack.path.rpartition(".")[0]
            again = not plan.sharding.keep_gathered and stack.number in self._in_backward
            times = self._microbatches * (2 if again else 1)
            yield from self._gather(stack.number, own, module, times)
            if stack.kind == "weight":
                placed = self.assembled.decision.optimizer[stack.number]
                yield from reduction(placed, own, plan, module)

    @property
    def _microbatches(self) -> int:
        return self.assembled.plan.batch.gradient_accumulation_steps

    @property
    def _in_backward(self) -> frozenset[int]:
        return weights_in_backward(self.pipeline.cut.traced)

    def _gather(self, number: int, size: float, module: str, times: int) -> Iterator[Needed]:
        """Yield the gathers of one weight, if fsdp divides it."""
        if number in self.assembled.decision.gathers:
            half = COMPUTE_DTYPES[self.assembled.plan.precision] is not None
            used = size / 2 if half else size
            sent = ring_bytes("all-gather", used, self.assembled.plan.size("fsdp"))
            yield Needed("fsdp", "all-gather", times * sent, module)

    def _outer_weights(self) -> Iterator[Needed]:
        """Yield what becomes of the weights of embedding and head, which no stage owns."""
        cut, plan = self.pipeline.cut, self.assembled.plan
        every = plan.batch.sync_gradients_every
        for region, operation in ((cut.embedding, TickOp.EMBEDDING), (cut.head, TickOp.HEAD)):
            times = self._runs(operation) // every
            for leaf in region.weights:
                placed = self.assembled.decision.optimizer[leaf.number]
                module = leaf.step.leaf.path.rpartition(".")[0]
                whole = self._bytes(leaf.step, leaf.number)
                yield from self._gather(leaf.number, whole, module, self._runs(operation))
                # Sums of an update cross the stages first, where each keeps its part.
                parts = plan.size(PIPE) if every > 1 and PIPE in placed.axes() else 1
                needs = reduction(placed, whole / parts, plan, module, times)
                yield from (need for need in needs if need.kind != "all-gather")
        for leaf in cut.outer:
            if leaf.step.leaf.is_weight:
                yield from self._over_stages(leaf)

    def _over_stages(self, leaf: OuterLeaf) -> Iterator[Needed]:
        """Yield the sum of one gradient over the stages, and the gather of the updated weight."""
        plan, stages = self.assembled.plan, self.assembled.plan.size(PIPE)
        decision, trained = self.assembled.decision, leaf.kind == "weight"
        placed = (decision.optimizer if trained else decision.at_rest)[leaf.number]
        size = self._bytes(leaf.step, leaf.number)
        part = size / (plan.size("fsdp") if "fsdp" in placed.axes() else 1)
        divided = PIPE in placed.axes()
        if trained:
            kind = "reduce-scatter" if divided else "all-reduce"
            summed = part if plan.sharding.zero > 1 else size
            yield Needed(PIPE, kind, ring_bytes(kind, summed, stages), "")
            if "fsdp" in placed.axes() and plan.sharding.zero < 3:
                sent = ring_bytes("all-gather", size, plan.size("fsdp"))
                yield Needed("fsdp", "all-gather", sent, "")
        if divided:
            yield Needed(PIPE, "all-gather", ring_bytes("all-gather", part, stages), "")

    def _activations(self) -> Iterator[Needed]:
        """Yield the reductions over tensor, of the stage's own part of the program."""
        classes, cut = self.assembled.decision.classes, self.pipeline.cut
        number_of = {id(event): n for n, event in enumerate(classes.events)}
        inside = classes.root.noted.get(cut.position, range(0))
        embedding, head = (self._events(region) for region in (cut.embedding, cut.head))
        for event, need in activations(self.assembled):
            number = number_of[id(event)]
            if number in inside:
                times = self._microbatches * self._share
            elif number in embedding:
                times = self._runs(TickOp.EMBEDDING)
            else:
                times = self._runs(TickOp.HEAD) if number in head else 0
            if times:
                yield replace(need, sent_bytes=times * need.sent_bytes)

    def _events(self, region: Region) -> set[int]:
        root = self.assembled.decision.classes.root
        eqns = {id(eqn) for eqn in region.eqns}
        ranges: Sequence[range] = [
            events for n, events in root.noted.items() if id(root.jaxpr.eqns[n]) in eqns
        ]
        return {number for events in ranges for number in events}

    def _bytes(self, step: StepLeaf, number: int) -> float:
        divided = "tensor" in self.assembled.decision.optimizer[number].axes()
        return step.leaf.nbytes / (self.assembled.plan.size("tensor") if divided else 1)
