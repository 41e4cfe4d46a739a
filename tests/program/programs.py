"""Reading traced programs in tests."""

import jax
from flax import nnx

from meshwright.program.jaxprs import name_stack
from meshwright.program.names import module_of
from meshwright.program.parts import split_model
from meshwright.program.rolled import roll_program
from meshwright.program.trace import trace_loss


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
    """Trace a loss; return the model's parts and the traced loss (rolled if asked for)."""
    parts = split_model(nnx.eval_shape(build), trainable)
    traced = trace_loss(loss, parts, batch, compute_dtype)
    return parts, roll_program(traced).traced if rolled else traced


def evaluate(traced, leaves, batch):
    """Run a traced loss as it stands, on the model's own leaf values."""
    inputs = [*traced.layout.from_canonical(leaves), *jax.tree.leaves(batch)]
    return traced.read_outputs(jax.jit(jax.extend.core.jaxpr_as_fun(traced.closed))(*inputs))
