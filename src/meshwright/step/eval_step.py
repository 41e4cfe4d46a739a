"""The compiled evaluation: loss and metrics of a training state with the model in eval mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.errors import UserError
from meshwright.pipeline.execute.exchange_check import check_exchanges
from meshwright.pipeline.place import decide_stages, pipelined_forward
from meshwright.program.trace.layout import Layout
from meshwright.program.trace.traced_loss import Loss, LossOutput, Model
from meshwright.sharding.decide import decide
from meshwright.step.assemble import Assembled
from meshwright.step.microbatch import split_strided
from meshwright.step.planned_forward import planned_forward, planned_remat
from meshwright.step.step_program import StepProgram, step_program
from meshwright.trees import Batch, divide_batch
from meshwright.weighted import Weighted

Evaluate = Callable[[Sequence[Any], Sequence[Any]], dict[str, Weighted]]
"""From (leaves of a state, leaves of a batch) to totals and weights of loss and metrics."""


def compile_evaluation(
    assembled: Assembled,
    loss: Loss,
    batch: Sequence[Any],
    count: int,
    warn: Callable[[str], None],
) -> Evaluate:
    """Compile the evaluation for batches like this one, split into ``count`` microbatches.

    On a mesh with pipeline stages it runs as a pipeline too, so no device holds another stage's
    blocks. If the model cannot be divided into stages in eval mode, it warns and gathers them.
    """
    if assembled.plan.size("pipe") > 1:
        try:
            staged = _staged(assembled, _program(assembled, loss, batch, count), count)
            compiled = _compile(assembled, staged, batch)
            check_exchanges(compiled.as_text(), assembled.mesh)
        except UserError as error:
            warn(
                "evaluation does not run in pipeline stages, and every device gathers all blocks: "
                f"in eval mode {error.what}, since {error.why}"
            )
        else:
            return compiled
    program = _program(assembled, loss, batch, 1, staged=False)
    return _compile(assembled, _unstaged(assembled, program), batch)


def _compile(assembled: Assembled, run: Evaluate, batch: Sequence[Any]) -> Any:
    replicated = NamedSharding(assembled.mesh, PartitionSpec())
    leaves = assembled.step.leaf_values(assembled.step.abstract_state())
    return jax.jit(run, out_shardings=replicated).lower(leaves, list(batch)).compile()


def _program(
    assembled: Assembled, loss: Loss, batch: Sequence[Any], count: int, *, staged: bool = True
) -> StepProgram:
    micro = jax.tree.unflatten(assembled.batch_tree, divide_batch(list(batch), count))
    evaluated = _in_evaluation_mode(loss)
    return step_program(evaluated, assembled.model_leaves, micro, assembled.plan, staged=staged)


def _unstaged(assembled: Assembled, program: StepProgram) -> Evaluate:
    plan, traced = assembled.plan, program.traced
    decision = decide(traced, plan.mesh, plan.sharding)
    forward = planned_forward(traced, decision, plan, assembled.mesh)
    translate = _Translation(assembled.traced.layout, traced.layout)

    def run(leaves: Sequence[Any], batch: Sequence[Any]) -> dict[str, Weighted]:
        value = forward(translate(leaves), batch)
        return {"loss": value.objective, **value.metrics}

    return run


def _staged(assembled: Assembled, program: StepProgram, count: int) -> Evaluate:
    plan, mesh, cut = assembled.plan, assembled.mesh, program.cut
    assert cut is not None
    decision = decide_stages(cut, plan.mesh, plan.sharding, plan.num_chunks)
    forward = pipelined_forward(
        cut, decision, mesh, plan.num_chunks, remat=planned_remat(decision, plan)
    )
    translate = _Translation(assembled.traced.layout, cut.traced.layout)

    def run(leaves: Sequence[Any], batch: Sequence[Any]) -> dict[str, Weighted]:
        microbatches = split_strided(batch, count, mesh, decision.batch)
        losses = forward(translate(leaves), microbatches)
        return {"loss": losses.objective, **losses.metrics}

    return run


class _Translation:
    """Converts the leaves of one layout of a model into those of another."""

    def __init__(self, before: Layout, after: Layout) -> None:
        self._before, self._after = before, after
        self._same = {(step.sources, step.rows): n for n, step in enumerate(before.step_leaves)}

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        canonical = self._before.to_canonical(leaves)
        return [
            leaves[self._same[step.sources, step.rows]]
            if (step.sources, step.rows) in self._same
            else step.join([canonical[source] for source in step.sources])
            for step in self._after.step_leaves
        ]


def _in_evaluation_mode(loss: Loss) -> Loss:
    def evaluate(model: Model, batch: Batch) -> LossOutput:
        for part in model.values() if isinstance(model, dict) else (model,):
            part.eval()
        return loss(model, batch)

    return evaluate
