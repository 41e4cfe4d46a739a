"""Recognizes the last projection of a model with the loss that is computed from it.

Everything that is computed from the logits is followed, as long as each row (token) is computed
on its own, until the dim of classes is gone: to one number per row, or to a sum over all rows. What
the formula is does not matter: cross entropy with or without weights, z-loss, label smoothing,
distillation, accuracy.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from meshwright.program.dims.elementwise import ELEMENTWISE
from meshwright.program.dims.walk import ProgramDims
from meshwright.program.evaluate.dependencies import needed_equations, variables_read
from meshwright.program.jaxpr.equations import Atom, Equation, Literal, Var, aval_of
from meshwright.program.kernels.regions import Graph, NotReplaced

FEWEST_CLASSES = 256
"""Smaller logits are not worth a region of their own."""

_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin")


@dataclass(frozen=True)
class LossMatch:
    """The equations from the logits to numbers per row and totals.

    Attributes:
        product: the last projection.
        eqns: all equations, the product first.
        rows: how many dims of the logits count rows; the last dim counts classes.
        whole: inputs that are the same for all rows.
        by_row: inputs with one entry per row.
        outputs: the results: one number per row, or scalars that are sums over rows.
    """

    product: Equation
    eqns: tuple[Equation, ...]
    rows: int
    whole: tuple[Var, ...]
    by_row: tuple[Var, ...]
    outputs: tuple[Var, ...]

    @property
    def others(self) -> tuple[Var, ...]:
        """The inputs besides those of the product."""
        return (*self.whole, *self.by_row)

    @property
    def hidden(self) -> Var:
        """The operand of the product that is no weight."""
        atom = self.product.invars[0]
        assert isinstance(atom, Var)
        return atom

    @property
    def kernel(self) -> Var:
        """The weight."""
        atom = self.product.invars[1]
        assert isinstance(atom, Var)
        return atom


def projections(graph: Graph, program: ProgramDims) -> list[Equation]:
    """Return the products of activations with a weight whose results are exponentiated.

    Those that gradients flow through come first: of a teacher and a student, the student.
    """
    found = [
        eqn
        for eqn in graph.live
        if _is_projection(eqn, program) and _reaches_sum_of_exponentials(graph, eqn.outvars[0])
    ]
    if len(found) < 2:
        return found
    eqns = [eqn for eqn in graph.jaxpr.eqns if eqn.primitive.name != "stop_gradient"]
    trained = {v for e in needed_equations(eqns, graph.jaxpr.outvars) for v in e.outvars}
    return sorted(found, key=lambda eqn: eqn.outvars[0] not in trained)


def match_loss(graph: Graph, product: Equation) -> LossMatch:
    """Return what is computed from a last projection.

    Raises:
        NotReplaced: if the logits are read by something that mixes rows, or that returns them.
    """
    shape = aval_of(product.outvars[0]).shape
    rows = len(shape) - 1
    if shape[-1] < FEWEST_CLASSES:
        raise NotReplaced(f"it has {shape[-1]} classes, fewer than {FEWEST_CLASSES}")
    found = _Follow(graph, shape)
    found.add(product)
    eqns = graph.in_order(found.eqns)
    outputs = tuple(v for eqn in eqns for v in eqn.outvars if v in found.results)
    if not outputs:
        raise NotReplaced("nothing is computed from it")
    made = {v for eqn in eqns for v in eqn.outvars}
    inputs = [variable for variable in variables_read(eqns[1:]) if variable not in made]
    by_row = tuple(v for v in inputs if found.has_rows(v))
    whole = tuple(v for v in inputs if v not in by_row)
    return LossMatch(product, eqns, rows, whole, by_row, outputs)


def _is_projection(eqn: Equation, program: ProgramDims) -> bool:
    """Whether an equation multiplies rows of activations with a weight, a matrix.

    The activations are the left operand, so that rows come first in the result.
    """
    if eqn.primitive.name != "dot_general":
        return False
    (contracting, _), (batch, _) = eqn.params["dimension_numbers"]
    left, right = eqn.invars
    if isinstance(left, Literal) or isinstance(right, Literal) or batch:
        return False
    value, rank = program.values[right], len(aval_of(left).shape)
    is_weight = bool(value.params) and not value.has_data and len(aval_of(right).shape) == 2
    by_rows = tuple(contracting) == (rank - 1,) and rank > 1 and program.values[left].has_data
    return is_weight and by_rows


def _reaches_sum_of_exponentials(graph: Graph, variable: Var) -> bool:
    """Whether the last dim of a value is summed after an exponential."""
    shape = aval_of(variable).shape

    def keeps_shape(eqn: Equation) -> bool:
        return eqn.primitive.name in ELEMENTWISE and aval_of(eqn.outvars[0]).shape == shape

    return any(
        eqn.primitive.name == "exp" and _is_summed(graph, eqn.outvars[0], len(shape) - 1)
        for eqn in graph.downstream(variable, keeps_shape)
    )


def _is_summed(graph: Graph, variable: Var, dim: int) -> bool:
    """Whether a value is summed over a dim; half-precision ones are widened before."""
    return any(
        (eqn.primitive.name == "reduce_sum" and tuple(eqn.params["axes"]) == (dim,))
        or (eqn.primitive.name == "convert_element_type" and _is_summed(graph, eqn.outvars[0], dim))
        for eqn in graph.read_by(variable)
    )


class _Follow:
    """Follows the readers of the logits."""

    def __init__(self, graph: Graph, shape: tuple[int, ...]) -> None:
        self.graph, self.rows, self.classes = graph, shape[:-1], shape[-1]
        self.eqns: list[Equation] = []
        self.results: set[Var] = set()
        self._numbers: set[int] = set()

    def has_rows(self, variable: Var) -> bool:
        """Whether a value that is read has an entry for every row."""
        count = len(self.rows)
        repeated = [
            eqn
            for eqn in self.eqns
            if eqn.primitive.name == "broadcast_in_dim" and eqn.invars[0] is variable
        ]
        # A vector of classes may be as long as there are rows.
        leading = [tuple(eqn.params["broadcast_dimensions"])[:count] for eqn in repeated]
        same = all(dims == tuple(range(count)) for dims in leading)
        return same and tuple(aval_of(variable).shape[:count]) == self.rows

    def add(self, product: Equation) -> None:
        """Add a product and all that is computed from it."""
        self._add(product)
        pending: list[Var] = [product.outvars[0]]
        while pending:
            variable = pending.pop()
            readers = self.graph.read_by(variable)
            allowed = [self._allowed(eqn, variable) for eqn in readers]
            wide = self._is_wide(variable)
            if wide and self.graph.is_returned(variable):
                raise NotReplaced("the logits are returned")
            if wide and not all(allowed):
                name = next(e for e, ok in zip(readers, allowed, strict=True) if not ok).primitive
                raise NotReplaced(f"the logits are read by {name.name}")
            if not wide and (not all(allowed) or self.graph.is_returned(variable)):
                self.results.add(variable)
                continue
            for eqn in readers:
                if self._add(eqn):
                    self._pull(eqn)
                    pending += [v for v in eqn.outvars if not self._is_total(v)]
                    self.results.update(v for v in eqn.outvars if self._is_total(v))
        self._combine_totals()

    def _combine_totals(self) -> None:
        """Add sums and multiples of totals, which are totals too."""
        changed = True
        while changed:
            changed = False
            for total in [v for v in self.results if self._is_total(v)]:
                readers = self.graph.read_by(total)
                if self.graph.is_returned(total) or not all(map(self._is_linear, readers)):
                    continue
                for eqn in readers:
                    self._add(eqn)
                    self.results.update(eqn.outvars)
                self.results.discard(total)
                changed = True

    def _is_linear(self, eqn: Equation) -> bool:
        """Whether an equation adds or scales totals of these rows."""
        if self.graph.segments[self.graph.number(eqn)] != self._segment():
            return False
        known = [isinstance(a, Literal) for a in eqn.invars]
        totals = [
            not isinstance(a, Literal) and self.graph.maker.get(a) in self._numbers
            for a in eqn.invars
        ]
        name = eqn.primitive.name
        if not jnp.issubdtype(aval_of(eqn.outvars[0]).dtype, jnp.floating):
            return False
        if name in ("add", "sub", "neg", "convert_element_type", "add_any"):
            return all(totals)
        return (name == "mul" and sorted(totals) == [False, True] and any(known)) or (
            name == "div" and totals == [True, False] and known[1]
        )

    def _add(self, eqn: Equation) -> bool:
        number = self.graph.number(eqn)
        if number in self._numbers:
            return False
        self._numbers.add(number)
        self.eqns.append(eqn)
        return True

    def _pull(self, reader: Equation) -> None:
        """Add the equations that only make values as large as the logits for a reader."""
        first = self.graph.number(self.eqns[0])
        for atom in reader.invars:
            eqn = self.graph.made_by(atom)
            if eqn is None or isinstance(atom, Literal) or self.graph.number(eqn) < first:
                continue
            wide = self._is_wide(atom)
            inside = all(n in self._numbers for n in self.graph.readers[atom])
            if wide and inside and self._keeps_rows(eqn) and self._add(eqn):
                self._pull(eqn)

    def _is_wide(self, atom: Atom) -> bool:
        return tuple(aval_of(atom).shape) == (*self.rows, self.classes)

    def _is_total(self, variable: Var) -> bool:
        return aval_of(variable).shape == () and self.rows != ()

    def _allowed(self, eqn: Equation, variable: Var) -> bool:
        """Whether an equation computes each row on its own, or adds rows up."""
        if eqn.effects or self.graph.segments[self.graph.number(eqn)] != self._segment():
            return False
        count = len(self.rows)
        if eqn.primitive.name == "reduce_sum" and not self._is_wide(variable):
            rank = len(aval_of(variable).shape)
            return tuple(sorted(int(a) for a in eqn.params["axes"])) == tuple(range(rank))
        if eqn.primitive.name in _REDUCTIONS:
            return [int(a) for a in eqn.params["axes"]] == [count]
        return self._keeps_rows(eqn)

    def _segment(self) -> int:
        return self.graph.segments[self.graph.number(self.eqns[0])]

    def _keeps_rows(self, eqn: Equation) -> bool:
        """Whether results have the rows of the operands, in the same order, each on its own."""
        count, name = len(self.rows), eqn.primitive.name
        outs = [aval_of(v).shape for v in eqn.outvars]
        if not all(tuple(s[:count]) == self.rows and len(s) <= count + 1 for s in outs):
            return False
        if name in ("broadcast_in_dim", "reshape"):
            return self._only_adds_dims(eqn)
        if name == "gather":
            return _picks_by_row(eqn, count) or _picks_only_entry(eqn, count)
        if name == "squeeze":
            return all(int(d) >= count for d in eqn.params["dimensions"])
        return name in ELEMENTWISE and all(
            not aval_of(a).shape
            or tuple(aval_of(a).shape[:count]) == self.rows
            or all(s == 1 for s in aval_of(a).shape[:-1])
            for a in eqn.invars
        )

    def _only_adds_dims(self, eqn: Equation) -> bool:
        (source, *others) = eqn.invars
        before, after = aval_of(source).shape, aval_of(eqn.outvars[0]).shape
        if others:
            return False
        count = len(self.rows)
        if eqn.primitive.name == "reshape":
            return [s for s in before if s > 1] == [s for s in after if s > 1] and tuple(
                before[:count]
            ) == self.rows
        to = [int(d) for d in eqn.params["broadcast_dimensions"]]
        if not before or all(s == 1 for s in before):
            return True
        has_rows = tuple(before[:count]) == self.rows and to[:count] == list(range(count))
        # A vector of classes, repeated for all rows.
        return has_rows or (to[-1] == count and all(s == 1 for s in before[:-1]))


def _picks_by_row(eqn: Equation, rows: int) -> bool:
    """Whether a gather picks one entry of each row."""
    numbers = eqn.params["dimension_numbers"]
    batch = tuple(range(rows))
    return (
        tuple(numbers.operand_batching_dims) == batch
        and tuple(numbers.start_indices_batching_dims) == batch
        and tuple(numbers.collapsed_slice_dims) == (rows,)
        and tuple(numbers.offset_dims) == ()
    )


def _picks_only_entry(eqn: Equation, rows: int) -> bool:
    """Whether a gather drops the last dim, of size 1: ``x[..., 0]``."""
    numbers, shape = eqn.params["dimension_numbers"], aval_of(eqn.invars[0]).shape
    return (
        shape[rows:] == (1,)
        and tuple(numbers.offset_dims) == tuple(range(rows))
        and tuple(numbers.collapsed_slice_dims) == (rows,)
        and tuple(numbers.start_index_map) == (rows,)
        and aval_of(eqn.invars[1]).shape == (1,)
    )


def is_differentiable(program: ProgramDims, variable: Var) -> bool:
    """Whether gradients reach the parameters through a value."""
    value = program.values[variable]
    return value.has_grad and jnp.issubdtype(aval_of(variable).dtype, jnp.inexact)
