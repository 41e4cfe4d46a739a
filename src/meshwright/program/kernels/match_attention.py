"""Recognizes attention: a product of queries and keys, a softmax, and a product with values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from meshwright.program.jaxpr.equations import Atom, Equation, Literal, Var, aval_of
from meshwright.program.kernels.masks import HIDDEN, Allowed, merge, read_mask
from meshwright.program.kernels.regions import Graph, NotReplaced
from meshwright.program.kernels.surroundings import Scope


@dataclass(frozen=True)
class AttentionOperands:
    """The operands of attention, and how their dims are ordered.

    ``query`` has dims (batch…, heads, group…, length, channels) in the order given by
    ``query_dims``, ``key`` and ``value`` have (batch…, heads, length, channels), and the output of
    the second product has the same dims as the query in the order given by ``output_dims``.

    Attributes:
        query: queries.
        key: keys.
        value: values.
        query_dims: the permutation of the query's dims to (batch…, length, group…, channels).
        key_dims: the permutation of the key's dims to (batch…, length, channels).
        value_dims: the same for the value.
        output_dims: the permutation of (batch…, length, group…, channels) to the output's dims.
        num_batch: how many batch dims there are, heads included.
        scale: the factor on the scores.
        allowed: what queries may attend to.
        mask: the mask as an array, if it depends on documents.
        mask_dims: for each dim of the mask its position in (batch…, length, group…, keys).
    """

    query: Var
    key: Var
    value: Var
    query_dims: tuple[int, ...]
    key_dims: tuple[int, ...]
    value_dims: tuple[int, ...]
    output_dims: tuple[int, ...]
    num_batch: int
    scale: float
    allowed: Allowed
    mask: Var | None = None
    mask_dims: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class AttentionMatch:
    """The equations of an attention, and its operands."""

    eqns: tuple[Equation, ...]
    output: Var
    operands: AttentionOperands


def softmaxes(graph: Graph) -> Iterator[Equation]:
    """Yield the divisions that end a softmax over one dim."""
    for eqn in graph.jaxpr.eqns:
        if eqn.primitive.name == "div" and _denominator(graph, eqn) is not None:
            yield eqn


def match_attention(graph: Graph, scope: Scope, division: Equation) -> AttentionMatch | None:
    """Return the attention whose softmax ends in a division; None if it is no attention.

    Raises:
        NotReplaced: if it is attention that cannot be replaced.
    """
    match = _Match(graph, scope)
    scores = match.softmax(division)
    product = match.scores(scores)
    if product is None:
        return None
    return match.finish(product, division)


def _denominator(graph: Graph, division: Equation) -> Equation | None:
    """Return the sum that a division divides the exponential by."""
    exponential = graph.made_by(division.invars[0], "exp")
    total = graph.made_by(_through(graph, division.invars[1]), "reduce_sum")
    if exponential is None or total is None or total.invars[0] is not exponential.outvars[0]:
        return None
    return total if len(total.params["axes"]) == 1 else None


def _through(graph: Graph, atom: Atom) -> Atom:
    """Return what an atom is before it is broadcast or reshaped."""
    while (eqn := graph.made_by(atom, "broadcast_in_dim", "reshape")) is not None:
        atom = eqn.invars[0]
    return atom


# What a dim of the scores is: ("batch", n), ("left", dim of that operand), ("right", dim).
_Role = tuple[str, int]


@dataclass
class _Match:
    graph: Graph
    scope: Scope
    eqns: list[Equation] = field(default_factory=list[Equation])
    scale: float = 1.0
    masks: list[tuple[Atom, bool, tuple[_Role | None, ...]]] = field(default_factory=list)
    after: list[Equation] = field(default_factory=list[Equation])
    axis: int = 0

    def softmax(self, division: Equation) -> Var:
        """Collect the equations of a softmax; return the scores."""
        graph = self.graph
        total = _denominator(graph, division)
        assert total is not None
        self.axis = int(total.params["axes"][0])
        exponential = graph.made_by(division.invars[0], "exp")
        assert exponential is not None
        difference = graph.made_by(exponential.invars[0], "sub")
        self.eqns += [division, total, exponential]
        self._collect(division.invars[1], total)
        if difference is None:
            # Without a subtracted maximum, large scores overflow and small ones do not.
            scores = exponential.invars[0]
        else:
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
        names = ("stop_gradient", "broadcast_in_dim", "reshape", "max", "reduce_max", "select_n")
        while (eqn := self.graph.made_by(atom, *names)) is not None:
            self.eqns.append(eqn)
            if eqn.primitive.name == "reduce_max":
                if eqn.invars[0] is not scores or list(eqn.params["axes"]) != [self.axis]:
                    break
                return
            atom = next((a for a in eqn.invars[::-1] if not isinstance(a, Literal)), eqn.invars[0])
        raise NotReplaced("its softmax subtracts something else than the maximum")

    def scores(self, atom: Atom) -> Equation | None:
        """Collect what is between the first product and the softmax; return the product."""
        pending: list[Equation] = []
        while True:
            eqn = self.graph.made_by(atom)
            if eqn is None:
                return None
            name = eqn.primitive.name
            if name == "dot_general":
                break
            if name in ("convert_element_type", "transpose"):
                following = eqn.invars[0]
            elif name in ("mul", "div"):
                following = self._factor(eqn)
            elif name in ("select_n", "add"):
                following = self._masked(eqn)
            elif name == "reshape" and _same_dims(eqn):
                following = eqn.invars[0]
            else:
                return None
            if following is None:
                return None
            pending.append(eqn)
            atom = following
        self.eqns += [*pending, eqn]
        roles = _product_roles(eqn)
        for step in reversed(pending):
            roles = self._follow(step, roles)
        self.roles = roles
        return eqn

    def _factor(self, eqn: Equation) -> Atom | None:
        left, right = eqn.invars
        for value, factor in ((left, right), (right, left)):
            number = self._number(factor)
            if number is not None and (eqn.primitive.name == "mul" or factor is right):
                self.scale *= number if eqn.primitive.name == "mul" else 1 / number
                return value
        return None

    def _number(self, atom: Atom) -> float | None:
        """Return the value of a constant scalar."""
        atom = _through(self.graph, atom)
        if isinstance(atom, Literal):
            return float(atom.val) if np.ndim(atom.val) == 0 else None
        return None

    def _masked(self, eqn: Equation) -> Atom | None:
        """Return the scores before an equation hides some of them."""
        if eqn.primitive.name == "add":
            for value, mask in (eqn.invars, eqn.invars[::-1]):
                if not isinstance(mask, Literal) and self.scope.constant(mask) is not None:
                    self.after.append(eqn)
                    return value
            return None
        if len(eqn.invars) != 3:
            return None
        fill = self._number(eqn.invars[1])
        if fill is None or fill > HIDDEN:
            return None
        return eqn.invars[2]

    def _follow(self, eqn: Equation, roles: tuple[_Role | None, ...]) -> tuple[_Role | None, ...]:
        """Return what the dims are after an equation."""
        name = eqn.primitive.name
        if name == "transpose":
            return tuple(roles[d] for d in eqn.params["permutation"])
        if name == "reshape":
            sizes = aval_of(eqn.invars[0]).shape
            left = iter([r for r, s in zip(roles, sizes, strict=True) if s > 1])
            return tuple(next(left) if s > 1 else None for s in aval_of(eqn.outvars[0]).shape)
        if name == "select_n":
            self.masks.append((eqn.invars[0], False, roles))
        elif name == "add":
            constant = [
                a
                for a in eqn.invars
                if not isinstance(a, Literal) and self.scope.constant(a) is not None
            ]
            self.masks.append((constant[0], True, roles))
        return roles

    def finish(self, product: Equation, division: Equation) -> AttentionMatch:
        """Match the product with the values, and describe the whole."""
        graph, axis = self.graph, self.axis
        if any(role is None for role in self.roles):
            raise NotReplaced("its scores have a dim of size 1")
        side, key_dim = self.roles[axis]  # pyright: ignore[reportGeneralTypeIssues]
        if side == "batch":
            return _no("its softmax is over a batch dim")
        weights, roles = division.outvars[0], list(self.roles)
        while True:
            eqn = graph.only_reader(weights)
            self.eqns.append(eqn)
            if eqn.primitive.name == "dot_general":
                break
            if eqn.primitive.name == "transpose":
                roles = [roles[d] for d in eqn.params["permutation"]]
            elif eqn.primitive.name == "reshape" and _same_dims(eqn):
                pass
            elif eqn.primitive.name != "convert_element_type":
                _no(f"its weights are changed by {eqn.primitive.name}, as dropout does")
            weights = eqn.outvars[0]
        eqns = graph.in_order(self.eqns)
        operands = self._operands(product, eqn, weights, side, key_dim, roles)
        return AttentionMatch(eqns, eqn.outvars[0], operands)

    def _operands(
        self,
        first: Equation,
        second: Equation,
        weights: Var,
        side: str,
        key_dim: int,
        roles: Sequence[_Role | None],
    ) -> AttentionOperands:
        k_side = 1 if side == "right" else 0
        contracting, batch = first.params["dimension_numbers"]
        query, key = first.invars[1 - k_side], first.invars[k_side]
        num_batch = len(batch[0])
        q_batch, k_batch = batch[1 - k_side], batch[k_side]
        q_free = [
            d
            for d in range(len(aval_of(query).shape))
            if d not in q_batch and d not in contracting[1 - k_side]
        ]
        k_free = [
            d
            for d in range(len(aval_of(key).shape))
            if d not in k_batch and d not in contracting[k_side]
        ]
        if k_free != [key_dim] or len(contracting[0]) != 1 or not q_free:
            _no("its keys have several dims of positions or channels")
        w_side = 0 if second.invars[0] is weights else 1
        value = second.invars[1 - w_side]
        contracting2, batch2 = second.params["dimension_numbers"]
        if any(isinstance(a, Literal) for a in (query, key, value)):
            _no("one of its operands is a constant")
        q_name = "left" if side == "right" else "right"
        w_batch = [roles[d] for d in batch2[w_side]]
        wanted = [("batch", n) for n in range(num_batch)]
        if sorted(w_batch) != wanted or [roles[d] for d in contracting2[w_side]] != [
            (side, key_dim)
        ]:
            _no("its second product sums over something else than the keys")
        v_batch = [batch2[1 - w_side][w_batch.index(role)] for role in wanted]
        v_key = contracting2[1 - w_side][0]
        v_free = [d for d in range(len(aval_of(value).shape)) if d not in v_batch and d != v_key]
        if len(v_free) != 1:
            _no("its values have several dims of channels")
        # Order the batch dims as the query has them, so that heads come last.
        order = sorted(range(num_batch), key=lambda n: q_batch[n])
        length = self._length(q_free, q_name, query)
        groups = [d for d in q_free if d != length]
        q_dims = [*(q_batch[n] for n in order), length, *groups, contracting[1 - k_side][0]]
        names: list[_Role] = [
            *(("batch", n) for n in order),
            (q_name, length),
            *((q_name, g) for g in groups),
        ]
        w_free = [
            r for d, r in enumerate(roles) if d not in (*batch2[w_side], *contracting2[w_side])
        ]
        channels: list[_Role] = [("channels", 0)]
        free = [*w_free, *channels] if w_side == 0 else [*channels, *w_free]
        out = [*w_batch, *free]
        positions = {role: n for n, role in enumerate([*names, *channels])}
        allowed, mask, mask_dims = self._allowed(names, (q_name, length), (side, key_dim))
        assert isinstance(query, Var)
        assert isinstance(key, Var)
        assert isinstance(value, Var)
        return AttentionOperands(
            query=query,
            key=key,
            value=value,
            query_dims=tuple(q_dims),
            key_dims=(*(k_batch[n] for n in order), key_dim, contracting[k_side][0]),
            value_dims=(*(v_batch[n] for n in order), v_key, v_free[0]),
            output_dims=tuple(positions[role] for role in out if role is not None),
            num_batch=num_batch,
            scale=self.scale,
            allowed=allowed,
            mask=mask,
            mask_dims=mask_dims,
        )

    def _length(self, free: Sequence[int], name: str, query: Atom) -> int:
        """Return which of the query's free dims is the sequence: the one that masks vary along."""
        if len(free) == 1:
            return free[0]
        sizes = aval_of(query).shape
        for mask, _, roles in self.masks:
            varying = self._varying_dims(mask)
            along = [d for d in free if (name, d) in {roles[n] for n in varying}]
            if len(along) == 1:
                return along[0]
        return max(free, key=lambda d: sizes[d])

    def _varying_dims(self, mask: Atom) -> list[int]:
        """Return the dims along which a mask is not just repeated."""
        dims = list(range(len(aval_of(mask).shape)))
        scope, atom = self.scope.origin(mask)
        eqn = scope.maker(atom)
        while eqn is not None and eqn.primitive.name == "broadcast_in_dim":
            sizes = aval_of(eqn.invars[0]).shape
            dims = [
                dims[to]
                for to, size in zip(eqn.params["broadcast_dimensions"], sizes, strict=True)
                if size > 1
            ]
            if len(dims) < len(sizes):
                break
            scope, atom = scope.origin(eqn.invars[0])
            eqn = scope.maker(atom)
        return dims

    def _allowed(
        self, names: Sequence[_Role], query: _Role, key: _Role
    ) -> tuple[Allowed, Var | None, tuple[int | None, ...]]:
        positions = {role: n for n, role in enumerate(names)}
        positions[key] = len(names)
        conditions: list[Allowed] = []
        document_masks: list[tuple[Var, tuple[int | None, ...]]] = []
        for mask, added, roles in self.masks:
            dims = [None if role is None else positions[role] for role in roles]
            found = read_mask(self.scope, mask, dims, positions[query], positions[key], added=added)
            conditions += found
            if any(c.documents for c in found):
                document_masks.append(self._small_mask(mask, dims))
        allowed = merge(conditions)
        if not document_masks:
            return allowed, None, ()
        if len(document_masks) > 1 or not allowed.causal:
            _no("several masks depend on data")
        return (allowed, *document_masks[0])

    def _small_mask(
        self, mask: Atom, dims: Sequence[int | None]
    ) -> tuple[Var, tuple[int | None, ...]]:
        """Return a mask before it is broadcast, as far as this program has it."""
        mapped = list(dims)
        while (eqn := self.graph.made_by(mask, "broadcast_in_dim")) is not None:
            sizes = aval_of(eqn.invars[0]).shape
            mapped = [
                mapped[to] if size > 1 else None
                for to, size in zip(eqn.params["broadcast_dimensions"], sizes, strict=True)
            ]
            mask = eqn.invars[0]
        assert isinstance(mask, Var)
        return mask, tuple(mapped)


def _same_dims(eqn: Equation) -> bool:
    """Whether a reshape only adds or removes dims of size 1."""
    before, after = aval_of(eqn.invars[0]).shape, aval_of(eqn.outvars[0]).shape
    return [s for s in before if s > 1] == [s for s in after if s > 1]


def _product_roles(eqn: Equation) -> tuple[_Role | None, ...]:
    contracting, batch = eqn.params["dimension_numbers"]
    roles: list[_Role | None] = [("batch", n) for n in range(len(batch[0]))]
    for side, name in enumerate(("left", "right")):
        used = {*contracting[side], *batch[side]}
        roles += [(name, d) for d in range(len(aval_of(eqn.invars[side]).shape)) if d not in used]
    return tuple(roles)


def _no(reason: str):
    raise NotReplaced(reason)
