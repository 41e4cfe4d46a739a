"""Reading traced programs in tests."""

import jax
import jax.extend
import numpy as np
from flax import nnx

from meshwright.program.blocks.to_scan import roll_program
from meshwright.program.jaxpr.equations import name_stack
from meshwright.program.jaxpr.names import module_of
from meshwright.program.trace.model_leaves import split_model
from meshwright.program.trace.traced_loss import trace_loss


def equations(jaxpr, outer=""):
    """Yield every equation with its scopes, those of inner programs included."""
    for eqn in jaxpr.eqns:
        scopes = "/".join(filter(None, (outer, name_stack(eqn))))
        yield eqn, scopes
        for param in eqn.params.values():
            for inner in param if isinstance(param, list | tuple) else [param]:
                if hasattr(inner, "eqns"):
                    yield from equations(getattr(inner, "jaxpr", inner), scopes)


def modules_by_primitive(closed):
    """Return, for each primitive, the modules it runs in, in order."""
    found = {}
    for eqn, scopes in equations(closed.jaxpr):
        found.setdefault(eqn.primitive.name, []).append(module_of(scopes))
    return found


def dots(closed):
    """Return the matrix products and convolutions of a program."""
    names = ("dot_general", "conv_general_dilated")
    return [e for e, _ in equations(closed.jaxpr) if e.primitive.name in names]


def trace(build, loss, batch, compute_dtype=None, *, trainable=nnx.Param, rolled=False):
    """Trace a loss; return the model's leaves and the traced loss (rolled if asked for)."""
    model_leaves = split_model(nnx.eval_shape(build), trainable)
    traced = trace_loss(loss, model_leaves, batch, compute_dtype)
    return model_leaves, roll_program(traced).traced if rolled else traced


QUICK = {"xla_backend_optimization_level": 0}
"""Compiler options for programs that run once: they compile more than twice as fast."""


def quick(function):
    """Compile a function without caring how fast it runs."""
    return jax.jit(function, compiler_options=QUICK)


def evaluate(traced, leaves, batch):
    """Run a traced loss as it stands, on the model's own leaf values."""
    inputs = [*traced.layout.from_canonical(leaves), *jax.tree.leaves(batch)]
    return traced.read_outputs(quick(jax.extend.core.jaxpr_as_fun(traced.closed))(*inputs))


def differentiate(run, traced, leaves, batch):
    """Return loss, value and, by canonical path, gradients and state after a traced loss.

    Args:
        run: what evaluates the traced program on flat inputs.
        traced: the traced loss.
        leaves: the model's own leaf values.
        batch: the batch.
    """
    layout = traced.layout
    by_role = {
        role: [n for n, step in enumerate(layout.step_leaves) if step.leaf.role == role]
        for role in ("param", "state")
    }

    def compute(leaves, batch):
        def mean(params):
            merged = [*leaves]
            for number, value in zip(by_role["param"], params, strict=True):
                merged[number] = value
            value = traced.read_outputs(run([*merged, *batch]))
            return value.objective.total / value.objective.weight, value

        params = [leaves[n] for n in by_role["param"]]
        (loss, value), grads = jax.value_and_grad(mean, has_aux=True)(params)
        return loss, value, grads

    loss, value, grads = quick(compute)(layout.from_canonical(leaves), jax.tree.leaves(batch))
    found = dict(zip(by_role["param"], grads, strict=True))
    found |= dict(zip(by_role["state"], value.state, strict=True))
    canonical = layout.to_canonical([found[n] for n in range(len(found))])
    paths = [leaf.path for leaf in layout.leaves]
    return loss, value, dict(zip(paths, canonical, strict=True))


def assert_close(found, expected, tolerance, zero=1e-12):
    """Compare leaves by path: each against its own largest value.

    Leaves that are truly zero (below ``zero`` of the largest of all) are compared with that one.
    """
    floats = {p: np.asarray(v, np.float64) for p, v in expected.items() if _is_float(v)}
    overall = max(np.abs(value).max() for value in floats.values())
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        if path not in floats:
            assert (found[path] == value).all(), path
            continue
        error = np.abs(np.asarray(found[path], np.float64) - floats[path]).max()
        largest = np.abs(floats[path]).max()
        scale = largest if largest > zero * overall else overall
        assert error <= tolerance * scale, (path, error / scale)


def _is_float(value):
    return jax.numpy.issubdtype(value.dtype, jax.numpy.floating)
