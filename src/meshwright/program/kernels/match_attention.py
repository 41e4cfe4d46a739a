"""Recognizes attention: a product of queries and keys, a softmax, and a product with values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np

from meshwright.program.dims.elementwise import ELEMENTWISE
from meshwright.program.evaluate.widen import wide_evaluator
from meshwright.program.jaxpr.equations import Atom, Equation, Literal, Var, aval_of
from meshwright.program.kernels.attention_operands import (
    AttentionOperands,
    Role,
    ScoreProduct,
    ValueProduct,
    free_dims,
)
from meshwright.program.kernels.masks import (
    HIDDEN,
    Allowed,
    MaskKind,
    before_broadcast,
    merge,
    read_mask,
)
from meshwright.program.kernels.regions import Graph, NotReplaced
from meshwright.program.kernels.surroundings import Scope

_REPEATS = ("broadcast_in_dim", "reshape", "convert_element_type")
"""Operations after which a number per row, or a single one, is still the same number."""


@dataclass(frozen=True)
class AttentionMatch:
    """The equations of an attention, and its operands."""

    eqns: tuple[Equation, ...]
    output: Var
    operands: AttentionOperands


def softmaxes(graph: Graph) -> Iterator[Equation]:
    """Yield the divisions that end a softmax over one dim."""
    for eqn in graph.live:
        if eqn.primitive.name == "div" and _denominator(graph, eqn) is not None:
            yield eqn


def match_attention(scope: Scope, division: Equation) -> AttentionMatch | None:
    """Return the attention whose softmax ends in a division; None if it is no attention.

    Raises:
        NotReplaced: if it is attention that cannot be replaced.
    """
    if not _is_followed_by_product(scope.graph, division.outvars[0]):
        return None
    match = _Match(scope)
    scores = match.softmax(division)
    product = match.scores(scores)
    if product is None:
        return None
    return match.finish(product, division)


def _denominator(graph: Graph, division: Equation) -> Equation | None:
    """Return the sum that a division divides the exponential by."""
    exponential = _exponential(graph, division.invars[0])
    total = graph.made_by(graph.before(division.invars[1], *_REPEATS), "reduce_sum")
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


class _Mask(NamedTuple):
    """A mask, and what the dims of the scores are that it is applied to."""

    atom: Atom
    kind: MaskKind
    roles: tuple[Role | None, ...]


@dataclass
class _Match:
    scope: Scope
    eqns: list[Equation] = field(default_factory=list[Equation])
    scale: float = 1.0
    masks: list[_Mask] = field(default_factory=list[_Mask])
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
        if aval_of(atom).shape[dim] == 1:
            return False
        eqn = self.graph.made_by(atom, "broadcast_in_dim", "stop_gradient", "convert_element_type")
        if eqn is None:
            return True
        if eqn.primitive.name != "broadcast_in_dim":
            return self._varies_along(eqn.invars[0], dim)
        to = [int(d) for d in eqn.params["broadcast_dimensions"]]
        return dim in to and aval_of(eqn.invars[0]).shape[to.index(dim)] > 1

    def scores(self, atom: Atom) -> Equation | None:
        """Collect what is between the first product and the softmax; return the product."""
        pending: list[tuple[Equation, _Step]] = []
        while (eqn := self.graph.made_by(atom)) is not None:
            if eqn.primitive.name == "dot_general":
                break
            step = self._step_before(eqn)
            if step is None:
                if self._comes_from_product(atom):
                    raise NotReplaced(f"its scores are changed by {eqn.primitive.name}")
                return None
            pending.append((eqn, step))
            atom = step.scores
        if eqn is None:
            return None
        self.eqns += [*(e for e, _ in pending), eqn]
        roles = _product_roles(eqn)
        for later, step in reversed(pending):
            roles = self._follow(later, step, roles)
        self.roles = roles
        return eqn

    def _step_before(self, eqn: Equation) -> _Step | None:
        """Return the scores before an equation, and the mask that it applies."""
        name = eqn.primitive.name
        if name in ("convert_element_type", "transpose"):
            return _Step(eqn.invars[0])
        if name == "reshape" and _same_dims(eqn):
            return _Step(eqn.invars[0])
        if name in ("mul", "div"):
            return self._factor(eqn)
        if name == "add":
            return self._added(eqn)
        if name == "select_n" and len(eqn.invars) == 3:
            return self._selected(eqn)
        return None

    def _factor(self, eqn: Equation) -> _Step | None:
        left, right = eqn.invars
        for value, factor in ((left, right), (right, left)):
            number = self._number(factor)
            if number is not None and (eqn.primitive.name == "mul" or factor is right):
                self.scale *= number if eqn.primitive.name == "mul" else 1 / number
                return _Step(value)
        return None

    def _number(self, atom: Atom) -> float | None:
        """Return the value of a constant scalar."""
        scope, atom = self.scope.origin(self.graph.before(atom, *_REPEATS))
        if isinstance(atom, Literal):
            return float(atom.val) if np.ndim(atom.val) == 0 else None
        program = scope.constant(atom) if aval_of(atom).shape == () else None
        if program is None:
            return None
        with jax.enable_x64(True):
            return float(wide_evaluator().run(program, [])[0])

    def _added(self, eqn: Equation) -> _Step | None:
        for value, mask in (eqn.invars, eqn.invars[::-1]):
            if not isinstance(mask, Literal) and self.scope.constant(mask) is not None:
                return _Step(value, mask, "added")
        return None

    def _selected(self, eqn: Equation) -> _Step | None:
        which, if_false, if_true = eqn.invars
        kinds: tuple[tuple[Atom, Atom, MaskKind], ...] = (
            (if_true, if_false, "allowed"),
            (if_false, if_true, "hidden"),
        )
        for value, other, kind in kinds:
            fill = self._number(other)
            # A factor applied later makes what is filled in smaller too.
            if fill is not None and fill * self.scale <= HIDDEN:
                return _Step(value, which, kind)
        return None

    def _comes_from_product(self, atom: Atom) -> bool:
        """Whether a value is an elementwise function of a product of two activations."""
        size, pending, seen = aval_of(atom).size, [atom], {atom}
        while pending:
            eqn = self.graph.made_by(pending.pop())
            if eqn is None:
                continue
            if eqn.primitive.name == "dot_general":
                values = [
                    self.scope.program.values.get(a) for a in eqn.invars if isinstance(a, Var)
                ]
                return len(values) == 2 and all(v is not None and v.has_data for v in values)
            if eqn.primitive.name in (*ELEMENTWISE, "transpose", "reshape"):
                before = [a for a in eqn.invars if isinstance(a, Var) and a not in seen]
                pending += [a for a in before if aval_of(a).size == size]
                seen.update(before)
        return False

    def _follow(
        self, eqn: Equation, step: _Step, roles: tuple[Role | None, ...]
    ) -> tuple[Role | None, ...]:
        """Return what the dims are after an equation."""
        if eqn.primitive.name == "transpose":
            return tuple(roles[d] for d in eqn.params["permutation"])
        if eqn.primitive.name == "reshape":
            sizes = aval_of(eqn.invars[0]).shape
            left = iter([r for r, s in zip(roles, sizes, strict=True) if s > 1])
            return tuple(next(left) if s > 1 else None for s in aval_of(eqn.outvars[0]).shape)
        if step.mask is not None:
            self.masks.append(_Mask(step.mask, step.kind, roles))
        return roles

    def finish(self, product: Equation, division: Equation) -> AttentionMatch:
        """Match the product with the values, and describe the whole."""
        roles = [role for role in self.roles if role is not None]
        if len(roles) < len(self.roles):
            raise NotReplaced("its scores have a dim of size 1")
        side, _ = roles[self.axis]
        if side == "batch":
            raise NotReplaced("its softmax is over a batch dim")
        scores = ScoreProduct(product, 1 if side == "right" else 0)
        named = {side: "key", "batch": "batch"}
        rename = lambda role: (named.get(role[0], "query"), role[1])  # noqa: E731
        self.masks = [
            m._replace(roles=tuple(r if r is None else rename(r) for r in m.roles))
            for m in self.masks
        ]
        values = self._value_product(division, [rename(role) for role in roles])
        values.check(scores)
        length = self._length(scores)
        allowed, mask, mask_dims = self._mask(scores, length)
        operands = AttentionOperands(
            query=scores.query,
            key=scores.key,
            value=values.value,
            query_dims=scores.query_dims(length),
            key_dims=scores.key_dims(),
            value_dims=values.value_dims(scores.order),
            output_dims=values.output_dims(scores.roles(length)),
            num_batch=len(scores.order),
            scale=self.scale,
            allowed=allowed,
            mask=mask,
            mask_dims=mask_dims,
        )
        return AttentionMatch(self.graph.in_order(self.eqns), values.eqn.outvars[0], operands)

    def _value_product(self, division: Equation, roles: list[Role]) -> ValueProduct:
        """Collect what is between the softmax and the second product; return the product."""
        weights = division.outvars[0]
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

    def _length(self, scores: ScoreProduct) -> int:
        """Return which of the query's free dims is the sequence: the one that masks vary along."""
        free = scores.query_free
        for mask in self.masks:
            _, _, dims = before_broadcast(self.scope, mask.atom, mask.roles)
            along = [d for d in free if ("query", d) in dims]
            if len(along) == 1:
                return along[0]
        sizes = aval_of(scores.query).shape
        return max(free, key=lambda d: sizes[d])

    def _mask(
        self, scores: ScoreProduct, length: int
    ) -> tuple[Allowed, Var | None, tuple[int | None, ...]]:
        """Return what all masks allow together; if that depends on data, the mask and its dims."""
        names = scores.roles(length)
        positions: dict[Role | None, int] = {role: n for n, role in enumerate(names)}
        key = positions[("key", scores.key_positions)] = len(names)
        query = positions[("query", length)]
        conditions: list[Allowed] = []
        of_documents: list[tuple[Var, tuple[int | None, ...]]] = []
        for mask in self.masks:
            dims = [positions.get(role) for role in mask.roles]
            found = read_mask(self.scope, mask.atom, dims, query, key, mask.kind)
            conditions += found
            if any(c.documents for c in found):
                if mask.kind != "allowed":
                    raise NotReplaced("its mask depends on data")
                _, small, own = before_broadcast(self.scope, mask.atom, dims, outside=False)
                assert isinstance(small, Var)
                of_documents.append((small, tuple(own)))
        if len(of_documents) > 1:
            raise NotReplaced("several masks depend on data")
        allowed = merge(conditions)
        return (allowed, *of_documents[0]) if of_documents else (allowed, None, ())


class _Step(NamedTuple):
    """The scores before an equation, and the mask that it applies to them."""

    scores: Atom
    mask: Atom | None = None
    kind: MaskKind = "allowed"


def _same_dims(eqn: Equation) -> bool:
    """Whether a reshape only adds or removes dims of size 1."""
    before, after = aval_of(eqn.invars[0]).shape, aval_of(eqn.outvars[0]).shape
    return [s for s in before if s > 1] == [s for s in after if s > 1]


def _product_roles(eqn: Equation) -> tuple[Role | None, ...]:
    _, batch = eqn.params["dimension_numbers"]
    roles: list[Role | None] = [("batch", n) for n in range(len(batch[0]))]
    for side, name in enumerate(("left", "right")):
        roles += [(name, d) for d in free_dims(eqn, side)]
    return tuple(roles)
