"""What is said of a loss: that microbatches change it, or that it broadcasts arrays by mistake."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from meshwright.errors import MeshwrightError, Setting, UserError, first_line
from meshwright.plan import Plan
from meshwright.program.dims.classes import DimClasses
from meshwright.program.dims.elementwise import ELEMENTWISE
from meshwright.program.dims.sample_mean import find_mixing, has_weight, mean_problem
from meshwright.program.dims.sample_values import MixedSamplesError
from meshwright.program.evaluate.dependencies import dependent_variables
from meshwright.program.jaxpr.equations import Equation, Literal, aval_of, equation_module
from meshwright.program.trace.model_leaves import ModelLeaves
from meshwright.program.trace.precision_policy import COMPUTE_DTYPES
from meshwright.program.trace.traced_loss import Loss, TracedLoss, trace_loss
from meshwright.sharding.decide import dim_classes
from meshwright.text.units import counted
from meshwright.trees import Batch, resize_batch

_SAME_ELEMENTS = frozenset({"convert_element_type", "copy", "neg", "stop_gradient"})


def changes_with_microbatches(
    loss: Loss, model_leaves: ModelLeaves, micro: Batch, plan: Plan, classes: DimClasses
) -> list[str]:
    """Warn if a step has several microbatches, and the loss is no mean over samples.

    Batch statistics, which models with BatchNorm have, are a matter of their own.
    """
    if plan.batch.gradient_accumulation_steps == 1:
        return []
    error = find_mixing(classes) or _undivided(loss, model_leaves, micro, plan, classes)
    statistics = any(leaf.variable == "BatchStat" for leaf in model_leaves.leaves)
    if error is None or not error.combines or (error.module and statistics):
        return []
    return [no_mean_text(error, plan)]


def no_mean_text(error: MixedSamplesError, plan: Plan) -> str:
    """Say what the microbatches of a plan change for a loss that is no mean over samples."""
    count, staged = plan.batch.gradient_accumulation_steps, plan.size("pipe") > 1
    key = "pipeline.num_microbatches" if staged else "training.gradient_accumulation_steps"
    where = f"in `{error.module}`, {error}" if error.module else str(error)
    return (
        f"the loss is not known to be a mean over samples ({where}), and a step has {count} "
        f"microbatches ({Setting(key, count)}): it is computed for each of them and averaged, "
        "which is another number. Return a mean over samples, or mw.Weighted(total, weight) of "
        f"sums over them; or write {Setting(key, 1)}"
    )


def _undivided(
    loss: Loss, model_leaves: ModelLeaves, micro: Batch, plan: Plan, classes: DimClasses
) -> MixedSamplesError | None:
    """Return an error if a scalar loss is a sum over samples, for which it is traced once more."""
    if has_weight(classes):
        return None
    size = jax.tree.leaves(micro)[0].shape[0]
    compute = COMPUTE_DTYPES[plan.precision]
    as_traced = plan.sharding.blocks != "scan" and plan.size("pipe") == 1
    try:
        first = (
            classes if as_traced else dim_classes(trace_loss(loss, model_leaves, micro, compute))
        )
        twice = trace_loss(loss, model_leaves, resize_batch(micro, 2 * size), compute)
        return mean_problem(first, dim_classes(twice))
    except Exception:  # A model may refuse this number of samples in its own way.
        return None


def broadcast_by_mistake(traced: TracedLoss) -> list[str]:
    """Warn if the loss combines ``(n,)`` with ``(n, 1)``: every sample with every other.

    Only what is computed outside of modules counts, and only arrays that depend on the batch and
    have this shape without having been given a dim of one on purpose.
    """
    jaxpr, count = traced.closed.jaxpr, len(traced.batch)
    samples = traced.batch[0].shape[0]
    dependent = dependent_variables(jaxpr.eqns, set(jaxpr.invars[-count:]))
    made_by = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in ELEMENTWISE or len(eqn.invars) != 2 or samples == 1:
            continue
        own = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        if aval_of(eqn.outvars[0]).shape != (samples, samples) or not dependent.issuperset(own):
            continue
        kinds = {_kind(atom, made_by, samples) for atom in own}
        if kinds == {"row", "column"} and not equation_module(eqn):
            return [
                "the loss combines an array of shape (n,) with one of shape (n, 1) in its "
                f"{eqn.primitive.name}, which gives (n, n) for n samples: every sample with every "
                "other. Give both the same shape, as with "
                "pred.squeeze(-1), or write a[:, None] and b[None, :] if that is meant"
            ]
    return []


def _kind(atom: Any, made_by: dict[Any, Equation], samples: int) -> str:
    """Return whether an operand was ``(n,)`` or ``(n, 1)`` before it was broadcast."""
    eqn = made_by.get(atom)
    while eqn is not None and eqn.primitive.name in _SAME_ELEMENTS:
        atom = eqn.invars[0]
        eqn = made_by.get(atom)
    shape = aval_of(atom).shape
    if eqn is None or eqn.primitive.name not in ("broadcast_in_dim", "reshape"):
        return "column" if shape == (samples, 1) else ""
    before = aval_of(eqn.invars[0]).shape
    if shape in ((1, samples), (samples, samples)) and before == (samples,):
        dims: Sequence[int] = eqn.params.get("broadcast_dimensions", (1,))
        return "row" if tuple(dims) == (1,) else ""
    is_spread = shape == (samples, samples) and before == (samples, 1)
    return _kind(eqn.invars[0], made_by, samples) if is_spread else ""


@contextmanager
def explaining_whole_batches(
    loss: Loss, leaves: ModelLeaves, batch: Batch, plan: Plan
) -> Generator[None]:
    """Explain the error of a loss that can be traced for a batch, but not for a microbatch."""
    count, size = plan.batch.gradient_accumulation_steps, plan.batch.global_batch_size
    rows = [x.path for x in leaves.leaves if x.role == "state" and x.struct.shape[:1] == (size,)]
    try:
        yield
        if count == size > 1 and rows:
            # A single sample would be repeated for all rows, without an error.
            trace_loss(loss, leaves, resize_batch(batch, 2))
    except Exception as error:
        if count == 1 or isinstance(error, MeshwrightError):
            raise
        try:
            trace_loss(loss, leaves, batch)
        except Exception:
            raise error from None
        staged = plan.size("pipe") > 1
        one = Setting("training.gradient_accumulation_steps", 1)
        raise UserError(
            f"the loss cannot be computed for a microbatch of {counted(size // count, 'sample')}: "
            f"{first_line(error)}",
            why=f"the {count} microbatches{' of the pipeline' if staged else ''} divide the {size} "
            "samples of a batch"
            + (f", and `{rows[0]}` has a row for each of them" if rows else ""),
            fix=f"write {'a mesh without pipe' if staged else one}, or a model that takes any "
            "number of samples",
        ) from error
