"""What to save of a pass: the fewest bytes from which the rest can be recomputed cheaply."""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshwright.program.dims.op import nbytes_of
from meshwright.program.evaluate.dependencies import inlined, inputs_of, needed_equations, variables
from meshwright.program.evaluate.evaluator import Environment, enter_call
from meshwright.program.jaxpr.equations import (
    REMATS,
    Atom,
    ClosedJaxpr,
    Equation,
    Value,
    Var,
    aval_of,
)

BARRIER = "optimization_barrier"

# fmt: off
CHEAP = frozenset(
    {
        "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2",
        "atanh", "bitcast_convert_type", "broadcast_in_dim", "cbrt", "ceil", "clamp", "clz",
        "complex", "concatenate", "conj", "convert_element_type", "copy", "cos", "cosh",
        "div", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor",
        "ge", "gt", "imag", "integer_pow", "iota", "is_finite", "le", "le_to", "log",
        "log1p", "log2", "logistic", "lt", "lt_to", "max", "min", "mul", "mulhi", "name",
        "ne", "neg", "nextafter", "not", "one_minus_square", "or", "pad", "polynomial",
        "population_count", "pow", "real", "reduce_precision", "rem", "reshape", "rev",
        "round", "rsqrt", "select_n", "sharding_constraint", "shift_left",
        "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "slice",
        "split", "sqrt", "square", "squeeze", "stack", "stop_gradient", "sub", "tan",
        "tanh", "tile", "transpose", "unstack", "xor", "zeros_like",
    }
)
# fmt: on
"""Primitives that compilers fuse into whatever reads their result, so that recomputing
them costs hardly any memory or time. Products, reductions, lookups, random numbers and
whatever communicates are not among them. A sharding constraint does not: of two values with the
same bytes, the later one is saved, so its result is, not its operand."""

_NO_LIMIT = 1 << 62


def least_saved(
    eqns: Sequence[Equation], inputs: Collection[Var], wanted: Iterable[Var]
) -> list[Var]:
    """Return the variables to save so that the wanted ones can be recomputed.

    They are a smallest cut through the program, in bytes, between what cannot be recomputed
    (inputs, and results of equations that are not cheap) and what is wanted. Of several, the one
    that leaves the least to recompute is taken. Values that do not depend on the inputs need not be
    saved. ``inputs`` are not available later, whether from outside the program or inside it.
    """
    graph = _Flow()
    # Each variable is an edge from the first node to the second: to save it is to cut the edge.
    ends: dict[Var, tuple[int, int]] = {}

    def add(variable: Var) -> int:
        ends[variable] = (graph.node(), graph.node())
        graph.connect(*ends[variable], max(1, nbytes_of(aval_of(variable))))
        return ends[variable][0]

    for variable in inputs:
        graph.connect(graph.source, add(variable))
    for eqn in eqns:
        # Each result of a barrier is one of its operands.
        barrier, cheap = eqn.primitive.name == BARRIER, eqn.primitive.name in CHEAP
        for number, result in enumerate(eqn.outvars):
            atoms = eqn.invars[number : number + 1] if barrier else eqn.invars
            reads = [ends[v][1] for v in variables(atoms) if v in ends]
            if not reads or result in ends:
                continue
            enters = add(result)
            for leaves in reads if cheap or barrier else [graph.source]:
                graph.connect(leaves, enters)
    for variable in variables(wanted):
        if variable in ends:
            graph.connect(ends[variable][1], graph.sink)
    after = graph.after_last_cut()
    return [v for v, (enters, leaves) in ends.items() if leaves in after and enters not in after]


@dataclass(frozen=True)
class BackwardHalves:
    """A backward program, inlined: gradients of x, and of weights given the cut between them."""

    closed: ClosedJaxpr
    cotangents: tuple[Var, ...]
    first: list[Equation]
    second: list[Equation]
    cut: list[Var]


def split_backward(backward: ClosedJaxpr, num_residuals: int, num_weights: int) -> BackwardHalves:
    """Split a program (residuals, cotangents) → (weight gradients, x gradients).

    The first half propagates the gradient of the result back through the layers; the second
    multiplies these gradients with the inputs of the layers. Sums for which the second half would
    need values that its products do not, such as those for the weights of a norm, belong to the
    first half, which has these values.
    """
    closed = inlined(backward, [_without_remat])
    jaxpr = closed.jaxpr
    weight_atoms, x_atoms = jaxpr.outvars[:num_weights], jaxpr.outvars[num_weights:]
    cotangents = tuple(jaxpr.invars[num_residuals:])
    first = needed_equations(jaxpr.eqns, x_atoms)
    products, sums = _by_work(_without(jaxpr.eqns, first), weight_atoms)
    cut = _cut(jaxpr.eqns, first, cotangents, products)
    early = [a for a in sums if not _follows(a, jaxpr.eqns, first, cotangents, cut)]
    first = needed_equations(jaxpr.eqns, [*x_atoms, *early])
    cut = _cut(jaxpr.eqns, first, cotangents, weight_atoms)
    second = needed_equations(jaxpr.eqns, weight_atoms, given=cut)
    return BackwardHalves(closed, cotangents, first, second, cut)


def _by_work(
    eqns: Sequence[Equation], weight_atoms: Sequence[Atom]
) -> tuple[list[Atom], list[Atom]]:
    """Return the gradients computed by products or the like, and those computed by sums alone."""
    products, sums = [], []
    for atom in weight_atoms:
        names = {eqn.primitive.name for eqn in needed_equations(eqns, [atom])}
        (sums if names <= CHEAP | {"reduce_sum", BARRIER} else products).append(atom)
    return products, sums


def _cut(
    eqns: Sequence[Equation],
    first: Sequence[Equation],
    cotangents: Sequence[Var],
    wanted: Sequence[Atom],
) -> list[Var]:
    """Return what the first half has to save for the second to compute these gradients."""
    rest = needed_equations(_without(eqns, first), wanted)
    reads = variables([*_reads_in_order(rest), *wanted])
    kept = [v for eqn in first if eqn.primitive.name not in CHEAP for v in eqn.outvars]
    return least_saved(first, [*cotangents, *kept], reads)


def _follows(
    atom: Atom,
    eqns: Sequence[Equation],
    first: Sequence[Equation],
    cotangents: Sequence[Var],
    cut: Sequence[Var],
) -> bool:
    """Whether a gradient can be computed from a cut without repeating work of the first half."""
    steps = needed_equations(eqns, [atom], given=cut)
    again = {id(eqn) for eqn in first}
    missing = set(cotangents) - set(cut)
    return missing.isdisjoint(variables([atom, *_reads_in_order(steps)])) and all(
        eqn.primitive.name in CHEAP for eqn in steps if id(eqn) in again
    )


def _without(eqns: Sequence[Equation], others: Sequence[Equation]) -> list[Equation]:
    """Return the equations that are not among others."""
    left_out = {id(eqn) for eqn in others}
    return [eqn for eqn in eqns if id(eqn) not in left_out]


def _reads_in_order(eqns: Sequence[Equation]) -> list[Var]:
    """Return the outside variables that equations read, in order of first use."""
    outside = inputs_of(eqns)
    return [v for v in variables(a for eqn in eqns for a in eqn.invars) if v in outside]


def _without_remat(eqn: Equation, env: Environment) -> list[Value] | None:
    """Replace remat by its body.

    Forward and backward run in different ticks, where remat has no effect. A barrier between
    several values would tie both halves together; that of a single one, such as between the two
    steps of a sum, stays.
    """
    if eqn.primitive.name in REMATS:
        return enter_call(eqn, env)
    ties = eqn.primitive.name == BARRIER and len(eqn.invars) > 1
    return env.operands(eqn) if ties else None


class _Flow:
    """A network from a source to a sink, and its largest flow, found path by path."""

    def __init__(self) -> None:
        self._free: list[Counter[int]] = []
        self.source, self.sink = self.node(), self.node()

    def node(self) -> int:
        self._free.append(Counter())
        return len(self._free) - 1

    def connect(self, start: int, end: int, capacity: int = _NO_LIMIT) -> None:
        self._free[start][end] += capacity
        self._free[end][start] += 0

    def after_last_cut(self) -> set[int]:
        """Return the nodes between the smallest cut and the sink, for the cut nearest to it."""
        while self.source in (after := self._before_sink()):
            path = [self.source]
            while path[-1] != self.sink:
                path.append(after[path[-1]])
            least = min(self._free[start][end] for start, end in pairwise(path))
            for start, end in pairwise(path):
                self._free[start][end] -= least
                self._free[end][start] += least
        return set(after)

    def _before_sink(self) -> dict[int, int]:
        """Return the next node of each one from which the sink can be reached, by few edges."""
        after, queue = {self.sink: self.sink}, deque([self.sink])
        while queue and self.source not in after:
            end = queue.popleft()
            for start in self._free[end]:
                if start not in after and self._free[start][end]:
                    after[start] = end
                    queue.append(start)
        return after
