"""Batch norms whose gradient needs two sums over rows instead of three.

As written, the gradient of the mean that is subtracted is a sum over rows of its own. It is that of
the bias, times the scale.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax import lax

from meshwright.program.evaluate.dependencies import variables_read
from meshwright.program.evaluate.evaluator import Environment
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.evaluate.weight_uses import HALF
from meshwright.program.jaxpr.equations import Atom, Equation, Value, aval_of, bind
from meshwright.program.kernels.regions import Graph, Region

_FROM_SUM = ("broadcast_in_dim", "convert_element_type", "div", "mul", "reshape", "squeeze")


@dataclass(frozen=True)
class BatchNormKernel:
    """Subtracts a constant mean, and adds a vector of zeros that has the mean's gradient.

    Attributes:
        eqns: the subtraction, multiplications and divisions, and perhaps an addition.
    """

    eqns: tuple[Equation, ...]
    name: str = "sums shared"

    def __call__(self, region: Region, env: Environment, mesh: MeshView) -> list[Value]:
        """Return the result."""
        rows, mean = map(env.read, self.eqns[0].invars)
        shape, fixed = rows.shape, lax.stop_gradient(mean)
        rows, zeros = rows - fixed, fixed - mean
        for eqn in self.eqns[1:]:
            vectors = [env.read(a) if _is_vector(a, shape) else None for a in eqn.invars]
            zeros = _apply(eqn, zeros, vectors)
            if eqn.primitive.name != "add":
                rows = _apply(eqn, rows, vectors)
        return [rows + zeros]


def batch_norms(graph: Graph) -> Iterator[Equation]:
    """Yield the subtractions of the mean of all rows."""
    for eqn in graph.live:
        shape = aval_of(eqn.outvars[0]).shape if eqn.outvars else ()
        if eqn.primitive.name == "sub" and shape and _is_vector(eqn.invars[1], shape):
            total = graph.made_by(graph.before(eqn.invars[1], *_FROM_SUM), "reduce_sum")
            if total is not None and aval_of(total.invars[0]).shape == shape:
                yield eqn


def match_batch_norm(graph: Graph, subtraction: Equation) -> Region | None:
    """Return what is multiplied with vectors after a subtraction, and the vector added then."""
    eqns, out = [subtraction], subtraction.outvars[0]
    shape = aval_of(out).shape
    while eqns[-1].primitive.name != "add" and len(readers := graph.read_by(out)) == 1:
        (eqn,) = readers
        wide = [n for n, atom in enumerate(eqn.invars) if not _is_vector(atom, shape)]
        known = ("add", "mul", "div") if wide == [0] else ("add", "mul")
        if graph.is_returned(out) or eqn.primitive.name not in known or len(wide) != 1:
            break
        eqns.append(eqn)
        out = eqn.outvars[0]
    if aval_of(out).dtype in HALF or all(e.primitive.name not in ("mul", "div") for e in eqns):
        return None
    made = {e.outvars[0] for e in eqns}
    inputs = tuple(v for v in variables_read(eqns) if v not in made)
    return graph.region(tuple(eqns), inputs, (out,), BatchNormKernel(tuple(eqns)))


def _apply(eqn: Equation, part: Value, vectors: Sequence[Value | None]) -> Value:
    return bind(eqn, [part if vector is None else vector for vector in vectors])[0]


def _is_vector(atom: Atom, shape: tuple[int, ...]) -> bool:
    """Whether a value is the same for all samples of values of a shape."""
    own = aval_of(atom).shape
    if len(own) != len(shape):
        return not own
    return own[0] == 1 < shape[0] and all(n in (1, m) for n, m in zip(own, shape, strict=True))
