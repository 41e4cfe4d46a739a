"""Losses and gradients with and without kernels, and what kernels replaced."""

import functools
from dataclasses import dataclass

import jax
import numpy as np
import optax
from flax import nnx
from program.programs import assert_close, quick
from small_models import fill

import meshwright as mw
from meshwright.program.evaluate.widen import widen

GRADIENTS = optax.trace(decay=0.0)
"""An optimizer whose state after a step is the gradients."""


@dataclass
class Run:
    """Loss, metrics and gradients by path of one batch, and the substitutions."""

    loss: float
    metrics: dict
    gradients: dict
    uses: tuple


def uses_in(module, uses, kind):
    """Return the substitutions of a kind in a module."""
    found = [use for use in uses if f"{use.module}.".startswith(f"{module}.")]
    return [use for use in found if use.kind == kind]


def assembled(build, loss, batch, kernels, *, wide=True, mesh="data=1", **options):
    """Assemble the step that computes gradients."""
    count = int(np.prod([int(part.split("=")[1]) for part in mesh.split(",")]))
    trainer = mw.Trainer(
        model=build,
        loss=loss,
        optimizer=GRADIENTS,
        mesh=mesh,
        kernels=kernels,
        devices=jax.devices()[:count],
        **options,
    )
    with jax.enable_x64(False):
        return trainer.assemble(batch).with_optimizer(GRADIENTS, wide=wide)


def differentiate(build, loss, batch, kernels, *, wide=True, **options):
    """Return what one batch gives, in float64 if ``wide``."""
    put_together = assembled(build, loss, batch, kernels, wide=wide, **options)
    with jax.enable_x64(False):
        values = put_together.model_leaves.values(fill(build))
    with jax.enable_x64(wide):
        state = put_together.start([jax.device_get(widen(v) if wide else v) for v in values])
        step = quick(lambda state, batch: put_together.step(state, batch))
        state, metrics = step(state, put_together.put_batch(batch))
        metrics = {name: np.asarray(value, np.float64) for name, value in metrics.items()}
        owners = [leaf.param for leaf in put_together.step.optimizer.leaves]
        by_owner = dict(zip(owners, state.optimizer, strict=True))
        gradients = put_together.canonical_params([by_owner[n] for n in range(len(by_owner))])
    gradients = {path: np.asarray(value, np.float64) for path, value in gradients.items()}
    uses = put_together.decision.kernels.uses
    return Run(float(metrics["loss"]), metrics, gradients, uses)


def both(build, loss, batch, **options):
    """Return what one batch gives with kernels and without."""
    return tuple(
        differentiate(build, loss, batch, kernels, **options) for kernels in ("xla", "none")
    )


def assert_equal(found, expected, tolerance=1e-12, under=""):
    """Compare loss, metrics and each gradient with its own largest value."""
    for name, value in expected.metrics.items():
        np.testing.assert_allclose(found.metrics[name], value, rtol=tolerance, err_msg=name)
    paths = [path for path in expected.gradients if path.startswith(under)]
    chosen = [{path: run.gradients[path] for path in paths} for run in (found, expected)]
    assert_close(*chosen, tolerance)


class Forms(nnx.Module):
    """Modules side by side, by name."""

    def __init__(self, kinds, *, rngs):
        self.names = tuple(kinds)
        for name, kind in kinds.items():
            setattr(self, name, kind(rngs))


def side_by_side(module, forms, names):
    """Return a function that builds a module for each of some forms, which are named."""
    kinds = {name: functools.partial(module, forms[name][0]) for name in names}
    return lambda: Forms(kinds, rngs=nnx.Rngs(0))
