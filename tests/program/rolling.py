"""Comparing rolled programs with unrolled ones."""

import jax
from flax import nnx
from program.programs import assert_close, differentiate, trace
from small_models import fill

from meshwright.program.blocks.to_scan import roll_program
from meshwright.program.evaluate.widen import wide_evaluator, widen


def results(traced, values, batch):
    """Return the loss, its metrics, and gradients and state by path, in float64."""
    run = lambda inputs: wide_evaluator().run(traced.closed, inputs)  # noqa: E731
    loss, value, leaves = differentiate(run, traced, [widen(v) for v in values], batch)
    metrics = {name: metric.total / metric.weight for name, metric in value.metrics.items()}
    return {"the loss": loss, **metrics, **leaves}


def check(build, loss, batch, *, stacked=True, compute=None, trainable=nnx.Param, remarks=()):
    """Compare rolled with unrolled on the same values; return the rolled program."""
    with jax.enable_x64(False):
        model_leaves, unrolled = trace(build, loss, batch, compute, trainable=trainable)
        result = roll_program(unrolled)
        values = model_leaves.values(fill(build))
    assert len(result.remarks) == len(remarks)
    # How the blocks that are left out differ follows after a colon.
    for found, expected in zip(result.remarks, remarks, strict=True):
        assert found == expected or found.startswith(f"{expected}: ")
    assert any(s.stacked for s in result.traced.layout.step_leaves) is stacked
    expected = results(unrolled, values, batch)
    assert_close(results(result.traced, values, batch), expected, 1e-12)
    return result.traced


def scans(traced):
    """Return how many blocks each scan of a program runs."""
    return [e.params["length"] for e in traced.closed.jaxpr.eqns if e.primitive.name == "scan"]
