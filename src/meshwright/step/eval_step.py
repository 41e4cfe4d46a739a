"""The compiled evaluation and prediction: a training state with the model in eval mode."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.compiled.compile_program import compile_program, known_options
from meshwright.errors import UserError
from meshwright.pipeline.execute.exchanges import check_exchanges
from meshwright.pipeline.execute.forward_only import PipelinedForward
from meshwright.pipeline.place import stage_context
from meshwright.program.kernels.find_kernels import Kernels
from meshwright.program.on_mesh.mesh_forward import Forward
from meshwright.program.trace.layout import Layout
from meshwright.program.trace.model_leaves import ModelLeaves
from meshwright.program.trace.precision_policy import COMPUTE_DTYPES
from meshwright.program.trace.traced_loss import Loss, LossOutput, Model, trace_function
from meshwright.runtime.activity import activity
from meshwright.step.assemble import Assembled, set_eval_mode
from meshwright.step.compiler_options import evaluation_options, product_options
from meshwright.step.place_batch import split_strided
from meshwright.step.step_program import (
    StepProgram,
    decide_program,
    planned_forward,
    planned_remat,
    step_program,
    unstaged_program,
)
from meshwright.trees import Batch, divide_batch
from meshwright.weighted import Weighted

Evaluate = Callable[[Sequence[Any], Sequence[Any]], dict[str, Weighted]]
"""From (leaves of a state, leaves of a batch) to totals and weights of loss and metrics."""

Predict = Callable[[Sequence[Any], Sequence[Any]], Any]
"""From (leaves of a state, leaves of a batch) to what a function of the model returns."""


@activity("compiling the evaluation")
def compile_evaluation(
    assembled: Assembled, loss: Loss, batch: Sequence[Any], count: int, warn: Callable[[str], None]
) -> Evaluate:
    """Compile the evaluation for batches like this one, split into ``count`` microbatches.

    A batch whose samples cannot be sharded evenly comes unsharded, and the compiler shards it
    unevenly. Scalar means are weighted by their number of samples, so that batches of different
    sizes add up.

    On a mesh with pipeline stages it runs as a pipeline too, so no device holds another stage's
    blocks. If the model cannot be divided into stages in eval mode, it warns and gathers them.
    """
    if assembled.plan.size("pipe") > 1:
        try:
            program = _program(assembled, loss, batch, count)
            staged = _staged(assembled, program, count)
            lowered = _lower(
                assembled, staged, batch, evaluation_options(program.traced.closed.jaxpr)
            )
            compiled = compile_program(lowered, partitioned=False)
            check_exchanges(compiled.optimized, assembled.mesh)
        except UserError as error:
            warn(
                "evaluation does not run in pipeline stages, and every device gathers all blocks: "
                f"in eval mode {error.what}, since {error.why}"
            )
        else:
            return compiled.compiled
    return lower_evaluation(assembled, loss, batch).compile()


def lower_evaluation(assembled: Assembled, loss: Loss, batch: Sequence[Any]) -> Any:
    """Lower the evaluation of batches like this one, without pipeline stages."""
    program = _program(assembled, loss, batch, 1, staged=False)
    options = evaluation_options(program.traced.closed.jaxpr)
    return _lower(assembled, _unstaged(assembled, program), batch, options)


@activity("compiling the prediction")
def compile_prediction(
    assembled: Assembled, function: Callable[[Any, Any], Any], batch: Any
) -> Predict:
    """Compile ``function(model, batch)`` with the model in eval mode, as evaluation runs it.

    Every array the function returns must have the samples as its dim 0. On a mesh with pipeline
    stages, every device gathers all blocks.
    """
    trees: list[Any] = []
    leaves = jax.tree.leaves(batch)

    def results(model: Any, samples: Any) -> list[Any]:
        set_eval_mode(model)
        arrays, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, function(model, samples)))
        _check_rows(arrays, leaves[0].shape[0])
        trees[:] = [tree]
        return arrays

    plan = assembled.plan
    traced = trace_function(results, _leaves(assembled), batch, COMPUTE_DTYPES[plan.precision])
    forward, place, kernels = _on_mesh(assembled, unstaged_program(traced, plan))

    def run(leaves: Sequence[Any], samples: Sequence[Any]) -> Any:
        outputs = forward.outputs(*place(leaves, samples))
        return jax.tree.unflatten(trees[0], outputs[: forward.traced.num_results])

    options = product_options(forward.traced.closed.jaxpr, kernels)
    return _lower(assembled, run, leaves, options).compile()


def _check_rows(arrays: Sequence[Any], samples: int) -> None:
    for array in arrays:
        if not array.shape or array.shape[0] != samples:
            raise UserError(
                f"a prediction of shape {list(array.shape)} does not have one row per sample",
                why=f"the batch has {samples} samples",
                fix="return arrays with the samples as dim 0, and take means of the predictions "
                "afterwards",
            )


def _lower(
    assembled: Assembled, run: Callable[..., Any], batch: Sequence[Any], options: dict[str, Any]
) -> Any:
    replicated = NamedSharding(assembled.mesh, PartitionSpec())
    leaves = assembled.step.leaf_values(assembled.step.abstract_state)
    is_gpu = assembled.mesh.devices.flat[0].platform == "gpu"
    known = known_options(options) if is_gpu else {}
    jitted = jax.jit(run, out_shardings=replicated, compiler_options=known or None)
    return jitted.lower(leaves, list(batch))


def _program(
    assembled: Assembled, loss: Loss, batch: Sequence[Any], count: int, *, staged: bool = True
) -> StepProgram:
    micro = jax.tree.unflatten(assembled.batch_tree, divide_batch(list(batch), count))
    evaluated = _in_evaluation_mode(loss)
    return step_program(evaluated, _leaves(assembled), micro, assembled.plan, staged=staged)


def _leaves(assembled: Assembled) -> ModelLeaves:
    """Return the model's leaves, with adapters that drop nothing."""
    return replace(assembled.model_leaves, evaluated=True)


_Place = Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]


def _on_mesh(assembled: Assembled, program: StepProgram) -> tuple[Forward, _Place, Kernels]:
    """Return a program on the mesh, how leaves and batches are laid out for it, and its kernels."""
    plan, traced = assembled.plan, program.traced
    decision = decide_program(program, plan, assembled.mesh)
    forward = planned_forward(traced, decision, plan, assembled.mesh)
    sharding = NamedSharding(assembled.mesh, decision.batch)

    def place(leaves: Sequence[Any], batch: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        # A batch that does not divide comes unsharded; a constraint may shard it unevenly.
        divided = [jax.lax.with_sharding_constraint(leaf, sharding) for leaf in batch]
        return _translated(assembled.traced.layout, traced.layout, leaves), divided

    return forward, place, decision.kernels


def _unstaged(assembled: Assembled, program: StepProgram) -> Evaluate:
    forward, place, _ = _on_mesh(assembled, program)

    def run(leaves: Sequence[Any], batch: Sequence[Any]) -> dict[str, Weighted]:
        value = forward(*place(leaves, batch))
        return {"loss": value.objective, **value.metrics}

    return run


def _staged(assembled: Assembled, program: StepProgram, count: int) -> Evaluate:
    plan, mesh, cut = assembled.plan, assembled.mesh, program.cut
    assert cut is not None
    decision = decide_program(program, plan, mesh)
    context = stage_context(decision, mesh, planned_remat(decision, plan), wide=False)
    forward = PipelinedForward(cut, context, plan.num_chunks)

    def run(leaves: Sequence[Any], batch: Sequence[Any]) -> dict[str, Weighted]:
        microbatches = split_strided(batch, count, mesh, decision.batch)
        own = _translated(assembled.traced.layout, cut.traced.layout, leaves)
        losses = forward(own, microbatches)
        return {"loss": losses.objective, **losses.metrics}

    return run


def _translated(before: Layout, after: Layout, leaves: Sequence[Any]) -> list[Any]:
    """Convert the leaves of one layout of a model into those of another."""
    same = {(step.sources, step.rows): n for n, step in enumerate(before.step_leaves)}
    canonical = before.to_canonical(leaves)
    return [
        leaves[same[step.sources, step.rows]]
        if (step.sources, step.rows) in same
        else step.join([canonical[source] for source in step.sources])
        for step in after.step_leaves
    ]


def _in_evaluation_mode(loss: Loss) -> Loss:
    def evaluate(model: Model, batch: Batch) -> LossOutput:
        set_eval_mode(model)
        out: Any = loss(model, batch)
        count = jax.tree.leaves(batch)[0].shape[0]
        if isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], Mapping):
            value, metrics = out
            return _of_samples(value, count), {k: _of_samples(v, count) for k, v in metrics.items()}
        return _of_samples(out, count)

    return evaluate


def _of_samples(value: Any, count: int) -> Any:
    """Return a scalar mean as a total over ``count`` samples; anything else unchanged."""
    if isinstance(value, Weighted) or jnp.shape(value) != ():
        return value
    return Weighted(jnp.asarray(value, jnp.float32) * count, jnp.full((), count, jnp.float32))
