"""The pass that keeps documents of one row apart in a model that takes no ``segment_ids``.

Every value that depends on tokens is followed with its dims of rows and of positions. Where a
model sums over positions, as attention does, pairs of different documents are masked before; what
follows from positions alone, such as their embeddings, is looked up by the position within the
document. A model that mixes positions in any other way is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from meshwright.errors import Setting, UserError
from meshwright.program.dims.elementwise import ELEMENTWISE
from meshwright.program.dims.row_rules import hidden_after, row_rule
from meshwright.program.evaluate.evaluator import Environment, Evaluator, enter, run_scan, scan_body
from meshwright.program.jaxpr.equations import (
    CALLS,
    REMATS,
    Atom,
    ClosedJaxpr,
    Equation,
    Literal,
    Value,
    Var,
    aval_of,
    bind,
    called_jaxpr,
    scan_counts,
    structs_of,
)
from meshwright.program.jaxpr.walks import all_equations, program_key, quoted
from meshwright.program.trace.normalize import normalize

_MARKS = {f"meshwright.{name}": name for name in ("segments", "positions", "tokens", "logits")}
ROW, PLACE = "row", "place"


class NotApart(UserError):
    """A model that mixes the tokens of a row in a way that documents cannot be kept out of."""


def keep_apart(model: Callable[..., Any], tokens: Any, *, segment_ids: Any, positions: Any) -> Any:
    """Return the logits of tokens [B, T] as if each document of a row had a row of its own.

    In a program that is not traced by a trainer, this is ``model(tokens)``.
    """
    given = {"segments": segment_ids, "positions": positions, "tokens": tokens}
    marked = [checkpoint_name(value, f"meshwright.{name}") for name, value in given.items()]
    return checkpoint_name(model(marked[-1]), "meshwright.logits")


def apart(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a program in which documents are apart where `keep_apart` asks for it."""
    if not any(_mark(eqn) for eqn, _ in all_equations(closed.jaxpr)):
        return closed
    run = lambda *args: _Apart(closed).run(closed, args)  # noqa: E731
    return normalize(jax.make_jaxpr(run)(*structs_of(closed.jaxpr.invars)))


def asks_to_keep_apart(model: Callable[..., Any], batch: Mapping[str, Any]) -> bool:
    """Whether a batch has documents that its model cannot tell apart by itself."""
    packed = {"segment_ids", "positions", "mask"} <= batch.keys()
    return packed and not accepted_names(model, ["segment_ids"])


def accepted_names(model: Callable[..., Any], names: list[str]) -> list[str]:
    """Return the names that a model's call has parameters for."""
    parameters = inspect.signature(model).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return names
    return [name for name in names if name in parameters]


@dataclass(frozen=True)
class _Fact:
    """What is known of a value: the dims it ``varies`` along, and which are rows and positions.

    Values that depend on no token have no ``dims``. Of pairs of different documents it may be
    ``hidden`` (low or zero), and some operation may have ``mixed`` them.
    """

    varies: frozenset[int] = frozenset()
    dims: tuple[str, ...] = ()
    hidden: str = ""
    mixed: str = ""
    random: bool = False
    value: Callable[[], Any] | None = None

    @property
    def places(self) -> list[int]:
        return [dim for dim, kind in enumerate(self.dims) if kind == PLACE]

    def shifted(self, by: int) -> _Fact:
        """Return the fact of a slice along the first dim (-1), or of a stack (1)."""
        varies = {d + by for d in self.varies if d + by >= 0} | ({0} if by > 0 else set())
        dims = self.dims and (("", *self.dims) if by > 0 else self.dims[1:])
        return replace(self, varies=frozenset(varies), dims=dims, hidden="", value=None)


def _any(atom: Any) -> _Fact:
    return _Fact(frozenset(d for d, size in enumerate(aval_of(atom).shape) if size > 1))


class _Apart(Evaluator):
    """Evaluates a program with its documents kept apart."""

    def __init__(self, closed: ClosedJaxpr) -> None:
        super().__init__((self._follow,))
        self._given: dict[str, Any] = {}
        self._changes = 0
        consts = zip(closed.jaxpr.constvars, closed.consts, strict=True)
        self._facts = {v: replace(_any(v), value=partial(jnp.asarray, c)) for v, c in consts}

    def _fact(self, atom: Atom) -> _Fact:
        if isinstance(atom, Literal):
            return replace(_any(atom), value=lambda: jnp.asarray(atom.val))
        return self._facts.get(atom) or _any(atom)

    def _follow(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Evaluate one equation, and find out about its results."""
        operands = env.operands(eqn)
        if mark := _mark(eqn):
            return self._marked(eqn, mark, operands)
        facts, name = [self._fact(a) for a in eqn.invars], eqn.primitive.name
        mixed = next((fact.mixed for fact in facts if fact.mixed), "")
        if not mixed and (name in REMATS or name in CALLS):
            return self._enter(eqn, facts, lambda: enter(eqn, env))
        if not mixed and any(fact.dims for fact in facts):
            if name == "scan":
                return self._scan(eqn, env, facts)
            if name.startswith("custom_"):
                return self._custom(eqn, env, facts)
            return self._plain(eqn, env, facts)
        for number, variable in enumerate(eqn.outvars):
            known = None if mixed else _independent(eqn, number, facts)
            self._facts[variable] = known or _Fact(mixed=mixed)
        return bind(eqn, operands)

    def _marked(self, eqn: Equation, mark: str, operands: list[Value]) -> list[Value]:
        fact = self._fact(eqn.invars[0])
        self._facts[eqn.outvars[0]] = _any(eqn.outvars[0])
        if mark in ("segments", "positions"):
            self._given[mark] = operands[0]
        elif mark == "tokens":
            self._facts[eqn.outvars[0]] = replace(_any(eqn.outvars[0]), dims=(ROW, PLACE))
        elif fact.dims[:2] != (ROW, PLACE):
            by = fact.mixed or "an unknown operation"
            raise NotApart(
                "conversations cannot share rows with this model",
                why=f"the model mixes the tokens of a row by {by}",
                fix=f"write {Setting('data.packing', 'none')}, or give its call the parameters "
                "`segment_ids` and `positions`",
            )
        return operands

    def _plain(self, eqn: Equation, env: Environment, facts: list[_Fact]) -> list[Value]:
        """Evaluate an equation that depends on tokens."""
        operands = env.operands(eqn)
        summed, hides = _sums(eqn, facts)
        for number, state in hides.items():
            fact, atom = facts[number], eqn.invars[number]
            if fact.hidden != state:
                operands[number] = self._hide(operands[number], fact, state)
                facts[number] = replace(fact, hidden=state)
                if state == "low" and isinstance(atom, Var):
                    # What a maximum is subtracted from later has to be hidden, too.
                    env.values[atom], self._facts[atom] = operands[number], facts[number]
        for result, variable in enumerate(eqn.outvars):
            found = _dependent(eqn, result, facts, summed)
            for number, fact in enumerate(facts):
                if not (fact.dims or fact.random or found.mixed):
                    found, places = _meet(eqn, number, fact, found)
                    if places and not found.mixed:
                        operands[number] = self._restarted(operands[number], fact, found, places)
            self._facts[variable] = found
        return bind(eqn, operands)

    def _hide(self, value: Value, fact: _Fact, state: str) -> Value:
        """Return a value with two dims of positions, hidden for pairs of different documents."""
        self._changes += 1
        row, shape = fact.dims.index(ROW), [1] * value.ndim
        for dim in (row, *fact.places):
            shape[dim] = value.shape[dim]
        one, other = (
            jnp.broadcast_to(_spread(self._given["segments"], value.ndim, row, place), shape)
            for place in fact.places
        )
        fill = 0 if state == "zero" else jnp.finfo(value.dtype).min
        return jnp.where(one == other, value, jnp.asarray(fill, value.dtype))

    def _restarted(self, value: Value, fact: _Fact, found: _Fact, places: Sequence[int]) -> Value:
        """Return a value that follows from positions, by the positions within documents."""
        self._changes += 1
        row, shape = found.dims.index(ROW), value.shape
        kept = tuple(slice(None) if d in fact.varies else slice(1) for d in range(value.ndim))
        value = value[kept]
        for place in places:
            at = _spread(self._given["positions"], value.ndim, row, place)
            value = jnp.take_along_axis(value, at, axis=place, mode="clip")
        return jnp.broadcast_to(value, jnp.broadcast_shapes(value.shape, shape))

    def _enter(self, eqn: Equation, facts: Sequence[_Fact], run: Callable[[], Any]) -> list[Value]:
        """Evaluate a nested program, whose inputs these facts are of."""
        inner = called_jaxpr(eqn).jaxpr
        self._facts.update(zip(inner.invars, facts, strict=True))
        results = run()
        self._facts.update(zip(eqn.outvars, map(self._fact, inner.outvars), strict=True))
        return results

    def _custom(self, eqn: Equation, env: Environment, facts: list[_Fact]) -> list[Value]:
        """Evaluate a function with a derivative of its own, in which nothing can be changed."""
        operands, before, closed = env.operands(eqn), self._changes, called_jaxpr(eqn)
        trace = lambda: jax.eval_shape(lambda *args: env.run(closed, args), *operands)  # noqa: E731
        self._enter(eqn, facts, trace)
        if self._changes > before:
            self._facts.update(dict.fromkeys(eqn.outvars, _Fact(mixed=quoted(eqn))))
        return bind(eqn, operands)

    def _scan(self, eqn: Equation, env: Environment, facts: list[_Fact]) -> list[Value]:
        """Evaluate a loop over anything but positions, such as blocks."""
        consts, carries = scan_counts(eqn)
        start, operands = consts + carries, env.operands(eqn)
        begin = [replace(_any(a), dims=f.dims) for a, f in zip(eqn.invars, facts, strict=True)]
        rows = [fact.shifted(-1) for fact in facts[start:]]
        inner = called_jaxpr(eqn).jaxpr
        entering = [*facts[:consts], *begin[consts:start], *rows]
        self._facts.update(zip(inner.invars, entering, strict=True))
        results = run_scan(eqn, operands, scan_body(eqn, operands[:consts], env))
        known = [self._fact(atom) for atom in inner.outvars]
        same = all(a.dims == b.dims for a, b in zip(known, entering[consts:start], strict=False))
        if not same or any(fact.dims and fact.dims[0] for fact in facts[start:]):
            self._facts.update(dict.fromkeys(eqn.outvars, _Fact(mixed=quoted(eqn))))
            return bind(eqn, operands)
        known = [*known[:carries], *(fact.shifted(1) for fact in known[carries:])]
        self._facts.update(zip(eqn.outvars, known, strict=True))
        return results


def _mark(eqn: Equation) -> str:
    return _MARKS.get(eqn.params["name"], "") if eqn.primitive.name == "name" else ""


def _spread(value: Any, rank: int, row: int, place: int) -> Any:
    """Return a value [B, T] with its dims at these places among others of size 1."""
    value = value if row < place else value.T
    return jnp.expand_dims(value, [d for d in range(rank) if d not in (row, place)])


_Dims = frozenset[tuple[int, int]]
"""Pairs of an operand and its dim."""


def _sums(eqn: Equation, facts: Sequence[_Fact]) -> tuple[_Dims, dict[int, str]]:
    """Return the dims of positions that an equation sums over, and what it needs to be hidden."""
    name, first = eqn.primitive.name, facts[0]
    if name in _HIDES and len(first.places) == 2:
        over = [(0, d) for d in eqn.params.get("axes", ()) if d in first.places]
        inexact = jnp.issubdtype(aval_of(eqn.invars[0]).dtype, jnp.inexact)
        if inexact and len(over) == (name != "exp"):
            return frozenset(over), {0: _HIDES[name]}
    dims, hides = set[tuple[int, int]](), dict[int, str]()
    pairs = eqn.params["dimension_numbers"][0] if name == "dot_general" else ((), ())
    for each in zip(*pairs, strict=True):
        over = [(n, d) for n, d in enumerate(each) if d in facts[n].places]
        both = [n for n, _ in over if len(facts[n].places) == 2]
        if both and (len(over) == 2 or each[1 - both[0]] not in facts[1 - both[0]].varies):
            dims.update(over)
            hides[both[0]] = "zero"
    return frozenset(dims), hides


def _sources(eqn: Equation, result: int, dim: int) -> list[tuple[int, int]] | None:
    """Return of which operands, and which of their dims, a result has the same rows."""
    rule = row_rule(eqn, result, dim)
    if rule is None or rule.whole:
        return None
    return [(number, inner) for number, inner in enumerate(rule.dims) if inner is not None]


def _independent(eqn: Equation, result: int, facts: Sequence[_Fact]) -> _Fact:
    """Return what is known of a value that depends on no tokens."""
    drawn = eqn.primitive.name.startswith(("random_", "threefry", "philox", "rng_"))
    values = [fact.value for fact in facts if fact.value is not None]
    known = not drawn and len(values) == len(facts)
    random = drawn or any(fact.random for fact in facts)

    def value() -> Any:
        return bind(eqn, [operand() for operand in values])[result]

    return _Fact(_varies(eqn, result, facts), random=random, value=value if known else None)


def _varies(eqn: Equation, result: int, facts: Sequence[_Fact]) -> frozenset[int]:
    if eqn.primitive.name == "iota":
        return frozenset({eqn.params["dimension"]})
    shape = aval_of(eqn.outvars[result]).shape
    every = [(dim, _sources(eqn, result, dim)) for dim in range(len(shape))]
    return frozenset(
        dim
        for dim, places in every
        if (shape[dim] > 1 if places is None else any(i in facts[n].varies for n, i in places))
    )


def _dependent(eqn: Equation, result: int, facts: Sequence[_Fact], summed: _Dims) -> _Fact:
    """Return what is known of a value that depends on tokens."""
    dims, fits = list[str](), True
    lost = {(n, dim) for n, fact in enumerate(facts) for dim, kind in enumerate(fact.dims) if kind}
    for dim in range(len(aval_of(eqn.outvars[result]).shape)):
        places = _sources(eqn, result, dim)
        own = [(facts[n], i) for n, i in places or () if facts[n].dims]
        kinds = {fact.dims[i] for fact, i in own if i in fact.varies or fact.dims[i]}
        fits &= len(kinds) < 2
        dims.append(max(kinds, default=""))
        lost -= set(places or ())
    fits &= dims.count(ROW) == 1 and 1 <= dims.count(PLACE) <= 2 and lost <= summed
    if not fits:
        return _Fact(mixed=quoted(eqn))
    name, hidden = eqn.primitive.name, ""
    # The pairs of a product are other ones than those of its operands.
    if dims.count(PLACE) == 2 and name != "dot_general":
        hidden = hidden_after(name, [fact.hidden for fact in facts])
    return _Fact(_varies(eqn, result, facts), tuple(dims), hidden)


_HIDES = {"exp": "low", "reduce_max": "low", "reduce_sum": "zero"}


def _meet(eqn: Equation, number: int, fact: _Fact, found: _Fact) -> tuple[_Fact, list[int]]:
    """Return what is known once a value without tokens has joined, and its dims of positions."""
    varied = {
        dim: inner
        for dim in range(len(found.dims))
        for n, inner in _sources(eqn, 0, dim) or ()
        if n == number and inner in fact.varies
    }
    places = [dim for dim in varied if found.dims[dim] == PLACE]
    if not places:
        return found, []
    if eqn.primitive.name not in ELEMENTWISE and eqn.primitive.name != "concatenate":
        return _Fact(mixed=quoted(eqn)), []
    shape = aval_of(eqn.invars[number]).shape
    others = [d for d in varied if not found.dims[d] and shape[d] == shape[places[0]]]
    # A mask of queries and keys joins one of padding, which has no dim of queries.
    joins = len(others) == 1 and aval_of(eqn.invars[number]).dtype == bool
    pair = [*places, *(others if joins else ())]
    if len(pair) != 2 or fact.value is None or not _banded(fact.value, pair):
        return found, places
    dims = [PLACE if d in pair else kind for d, kind in enumerate(found.dims)]
    return replace(found, dims=tuple(dims)), []


_known: dict[Any, bool] = {}


def _banded(value: Callable[[], Any], dims: Sequence[int]) -> bool:
    """Whether a constant depends on the difference of two positions alone."""
    program = jax.make_jaxpr(value)()
    key = program_key(program), *dims

    def check() -> Any:
        (found,) = Evaluator().run(program, [])
        found = jnp.moveaxis(found, tuple(dims), (-2, -1))
        return (found[..., 1:, 1:] == found[..., :-1, :-1]).all()

    if key not in _known:
        with jax.ensure_compile_time_eval():
            _known[key] = bool(jax.jit(check)())
    return _known[key]
