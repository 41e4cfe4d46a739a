"""Recognizes attention: a product of queries and keys, a softmax, and a product with values."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from meshwright.program.dims.elementwise import ELEMENTWISE
from meshwright.program.dims.op import free_dims
from meshwright.program.jaxpr.equations import Atom, Equation, Literal, Var, aval_of
from meshwright.program.kernels.attention_operands import (
    AttentionOperands,
    Role,
    ScoreProduct,
    ValueProduct,
)
from meshwright.program.kernels.masks import before_broadcast, moved_dims
from meshwright.program.kernels.regions import Graph, NotReplaced
from meshwright.program.kernels.score_functions import ScoreReader
from meshwright.program.kernels.surroundings import REPEATS, Scope


@dataclass(frozen=True)
class AttentionMatch:
    """The equations of an attention, and its operands."""

    eqns: tuple[Equation, ...]
    output: Var
    operands: AttentionOperands


def makes_weights(graph: Graph) -> Iterator[Equation]:
    """Yield the equations that may make weights: divisions that end a softmax, and sigmoids."""
    for eqn in graph.live:
        name = eqn.primitive.name
        if name == "logistic" or (name == "div" and _denominator(graph, eqn) is not None):
            yield eqn


def match_attention(scope: Scope, end: Equation) -> AttentionMatch | None:
    """Return the attention that an equation makes weights for; None if it is no attention.

    Raises:
        NotReplaced: if it is attention that cannot be replaced.
    """
    match, normalized = _Match(scope), end.primitive.name == "div"
    if not _is_followed_by_product(scope.graph, end.outvars[0]):
        return None
    if not normalized and match.product_before(end.invars[0]) is None:
        return None
    weights = end.outvars[0] if normalized else match.weights(end)
    scores = match.softmax(end) if normalized else weights
    product = match.product_before(scores)
    if product is None:
        return None
    of_data = match.is_of_data(product)
    try:
        found = match.finish(ScoreReader(scope, product, scores, normalized), weights)
        return found if of_data or found.operands.function is None else None
    except NotReplaced:
        if of_data:
            raise
        return None


def _denominator(graph: Graph, division: Equation) -> Equation | None:
    """Return the sum that a division divides the exponential by."""
    exponential = _exponential(graph, division.invars[0])
    total = graph.made_by(graph.before(division.invars[1], *REPEATS), "reduce_sum")
    if exponential is None or total is None or len(total.params["axes"]) != 1:
        return None
    return total if _exponential(graph, total.invars[0]) is exponential else None


def _exponential(graph: Graph, atom: Atom) -> Equation | None:
    """Return the exponential that an atom is; half-precision ones are widened before a sum."""
    return graph.made_by(graph.before(atom, "convert_element_type"), "exp")


def _is_followed_by_product(graph: Graph, weights: Var) -> bool:
    """Whether functions of weights are multiplied with another matrix."""
    names = {*ELEMENTWISE, "transpose", "reshape", "broadcast_in_dim", "reduce_sum"}
    readers = graph.downstream(weights, lambda eqn: eqn.primitive.name in names)
    return any(eqn.primitive.name == "dot_general" for eqn in readers)


@dataclass
class _Match:
    scope: Scope
    eqns: list[Equation] = field(default_factory=list[Equation])
    axis: int = 0

    @property
    def graph(self) -> Graph:
        return self.scope.graph

    def softmax(self, division: Equation) -> Var:
        """Collect the equations of a softmax; return the scores."""
        graph = self.graph
        total = _denominator(graph, division)
        assert total is not None
        self.axis = int(total.params["axes"][0])
        exponential = _exponential(graph, division.invars[0])
        assert exponential is not None
        before = graph.before(exponential.invars[0], "convert_element_type")
        difference = graph.made_by(before, "sub")
        self.eqns += [division, total, exponential]
        self._collect(division.invars[1], total)
        for converted in (division.invars[0], total.invars[0]):
            self._collect(converted, exponential)
        if difference is None:
            # Without a subtracted maximum, large scores overflow and small ones do not.
            scores = exponential.invars[0]
        else:
            self._collect(exponential.invars[0], difference)
            self.eqns.append(difference)
            scores = difference.invars[0]
            self._maximum(difference.invars[1], scores)
        if isinstance(scores, Literal):
            raise NotReplaced("its scores are constant")
        return scores

    def _collect(self, atom: Atom, stop: Equation) -> None:
        while (eqn := self.graph.made_by(atom)) is not None and eqn is not stop:
            self.eqns.append(eqn)
            atom = eqn.invars[0]

    def _maximum(self, atom: Atom, scores: Atom) -> None:
        """Collect the equations of what is subtracted from the scores, the maximum."""
        names = ("stop_gradient", "broadcast_in_dim", "reshape", "transpose", "max", "select_n")
        names += ("convert_element_type",)
        varies = self._varies_along(atom, self.axis)
        while (eqn := self.graph.made_by(atom, *names, "reduce_max")) is not None:
            self.eqns.append(eqn)
            if eqn.primitive.name == "reduce_max":
                moves = ("transpose", "convert_element_type")
                same = self.graph.before(eqn.invars[0], *moves) is self.graph.before(scores, *moves)
                if varies or not same or len(eqn.params["axes"]) != 1:
                    break
                return
            atom = next((a for a in eqn.invars[::-1] if not isinstance(a, Literal)), eqn.invars[0])
        raise NotReplaced("its softmax subtracts something other than the maximum")

    def _varies_along(self, atom: Atom, dim: int) -> bool:
        """Whether a value is not just repeated along a dim."""
        dims: list[int | None] = list(range(len(aval_of(atom).shape)))
        while (eqn := self.graph.made_by(atom)) is not None:
            same = eqn.primitive.name in ("stop_gradient", "convert_element_type")
            if (moved := dims if same else moved_dims(eqn, dims)) is None:
                break
            atom, dims = eqn.invars[0], moved
        return dim in dims and aval_of(atom).shape[dims.index(dim)] > 1

    def weights(self, sigmoid: Equation) -> Var:
        """Return the weights that a sigmoid makes; find out which of their dims counts keys."""
        weights, names = sigmoid.outvars[0], {*ELEMENTWISE, "transpose"}
        while (eqn := self.graph.only_reader(weights)).primitive.name in names:
            weights = eqn.outvars[0]
        dims = [("", n) for n in range(len(aval_of(weights).shape))]
        summed = self._value_product(weights, dims).summed
        if len(summed) != 1:
            raise NotReplaced("its values have several dims of positions")
        self.axis = summed[0][1]
        return weights

    def product_before(self, atom: Atom) -> Equation | None:
        """Return the product that a value is an elementwise function of."""
        size, pending, seen = aval_of(atom).size, [atom], {atom}
        while pending:
            eqn = self.graph.made_by(pending.pop())
            if eqn is not None and eqn.primitive.name == "dot_general":
                return eqn
            if eqn is not None and eqn.primitive.name in (*ELEMENTWISE, "transpose", "reshape"):
                before = [a for a in eqn.invars if isinstance(a, Var) and a not in seen]
                pending += [a for a in before if aval_of(a).size == size]
                seen.update(before)
        return None

    def is_of_data(self, product: Equation) -> bool:
        """Whether neither operand of a product is a weight."""
        values = [self.scope.program.values.get(a) for a in product.invars if isinstance(a, Var)]
        return len(values) == 2 and all(v is None or v.has_data for v in values)

    def finish(self, reader: ScoreReader, weights: Var) -> AttentionMatch:
        """Read what is computed from scores, match the product with the values, describe all."""
        by_dim = dict(zip(reader.product_dims(), _product_roles(reader.product), strict=True))
        self.eqns += [*reader.eqns, reader.product]
        roles = [by_dim[n] for n in range(len(aval_of(reader.out).shape)) if n in by_dim]
        if len(roles) < len(aval_of(reader.out).shape):
            raise NotReplaced("its scores have a dim of size 1")
        side, _ = roles[self.axis]
        if side == "batch":
            raise NotReplaced("its softmax is over a batch dim")
        scores = ScoreProduct(reader.product, 1 if side == "right" else 0)
        named = {side: "key", "batch": "batch"}
        roles = [(named.get(side, "query"), dim) for side, dim in roles]
        values = self._value_product(weights, roles)
        values.check(scores)
        length, key = self._length(scores, reader, roles), ("key", scores.key_positions)
        formula, allowed = reader.read(roles.index(("query", length)), roles.index(key))
        order = [*scores.roles(length), key]
        at = [order.index(role) for role in roles]
        leaves, masks = (
            tuple((v, tuple(d if d is None else at[d] for d in own)) for v, own in read)
            for read in (reader.leaves, reader.masks)
        )
        operands = AttentionOperands(
            query=scores.query,
            key=scores.key,
            value=values.value,
            query_dims=scores.query_dims(length),
            key_dims=scores.key_dims(),
            value_dims=values.value_dims(scores.order),
            output_dims=values.output_dims(scores.roles(length)),
            num_batch=len(scores.order),
            scale=reader.scale,
            allowed=allowed,
            function=formula if formula.why else None,
            leaves=leaves if formula.why else masks,
            formula=formula,
            formula_leaves=leaves,
        )
        return AttentionMatch(self.graph.in_order(self.eqns), values.eqn.outvars[0], operands)

    def _value_product(self, weights: Var, roles: list[Role]) -> ValueProduct:
        """Collect what is between the weights and the second product; return the product."""
        while True:
            eqn = self.graph.only_reader(weights)
            self.eqns.append(eqn)
            name = eqn.primitive.name
            if name == "dot_general":
                return ValueProduct(eqn, weights, roles)
            if name == "transpose":
                roles = [roles[d] for d in eqn.params["permutation"]]
            elif name != "convert_element_type":
                raise NotReplaced(f"its weights are changed by {name}, as dropout does")
            weights = eqn.outvars[0]

    def _length(self, scores: ScoreProduct, reader: ScoreReader, roles: list[Role]) -> int:
        """Return which of the query's free dims is the sequence: the one that masks vary along."""
        free = scores.query_free
        for atom, own in reader.sides:
            _, _, dims = before_broadcast(self.scope, atom, own)
            varies = [roles[d] for d in dims if d is not None]
            along = [d for d in free if ("query", d) in varies]
            if len(along) == 1:
                return along[0]
        sizes = aval_of(scores.query).shape
        return max(free, key=lambda d: sizes[d])


def _product_roles(eqn: Equation) -> list[Role]:
    _, batch = eqn.params["dimension_numbers"]
    free = [(name, d) for n, name in enumerate(("left", "right")) for d in free_dims(eqn, n)]
    return [*(("batch", n) for n in range(len(batch[0]))), *free]
