"""A decoder derived from a model's program: it computes new rows, and keeps what they need."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.generation.positions import NotIncremental, Positions
from meshwright.generation.rings import find_rings, positions_in
from meshwright.generation.row_plan import WHOLE, Need, plan_rows, stored_order
from meshwright.generation.token_decoder import Cache, Source, Weights, with_source
from meshwright.generation.traced_decoder import PromptAttention, TracedDecoder
from meshwright.program.dims.op import nbytes_of
from meshwright.program.dims.row_rules import Rows
from meshwright.program.evaluate.dependencies import needed_equations
from meshwright.program.evaluate.evaluator import Evaluator
from meshwright.program.jaxpr.equations import (
    Atom,
    ClosedJaxpr,
    Equation,
    Literal,
    Value,
    Var,
    aval_of,
    bind,
    scan_counts,
    scan_parts,
)
from meshwright.program.kernels.fused_attention import padded

MASKED = 8192
"""The most positions of which masks are evaluated; windows must be shorter."""


class IncrementalDecoder:
    """Computes the logits of new tokens from a cache of earlier ones, up to ``length`` tokens."""

    reason = sees = ""

    def __init__(self, traced: TracedDecoder, length: int) -> None:
        self.length, self.traced = length, traced
        try:
            of_weights = traced.of_weights(length)
        except NotIncremental:
            # What the plan has to say comes first.
            plan_rows(Positions(traced.short, traced.chunk), (), traced.num_sources)
            raise
        longer = traced.of_length(min(length, MASKED) if traced.chunk == 1 else length)
        positions = Positions(traced.short, traced.chunk, longer)
        self.plan = plan_rows(positions, of_weights, traced.num_sources)
        self.rings = find_rings(self.plan) if traced.chunk == 1 else {}
        try:
            self.of_ring = {n: traced.like(n) for n in {size for _, size in self.rings.values()}}
        except NotIncremental:
            self.rings = {}
        inputs = traced.short.jaxpr.invars
        self.sources = inputs[-1 - traced.num_sources : -1]
        self._made = [v for v in self.plan.prepared if v not in set(inputs)]
        self._make = jax.jit(self._evaluate)
        self.orders = {v: stored_order(self.plan, v, dim) for v, dim in self.plan.kept.items()}
        """By kept variable, the order of its dims in the cache."""
        self.lengths = {
            v: self.rings[v][1] if v in self.rings else length // positions.unit(v, dim)
            for v, dim in self.plan.kept.items()
        }
        """By kept variable, how many positions, or chunks of them, the cache has."""

    @property
    def extra_bytes(self) -> tuple[int, int]:
        """What is made of weights, and the cache of a row; see `TokenDecoder`."""
        kept = self.plan.kept.items()
        each = [nbytes_of(aval_of(v)) // aval_of(v).shape[dim] * self.lengths[v] for v, dim in kept]
        return sum(nbytes_of(aval_of(v)) for v in self._made), sum(each)

    def prepare(self, weights: Weights) -> Weights:
        """Compute what all tokens share; see `TokenDecoder`."""
        given = dict(zip(self.traced.short.jaxpr.invars, weights, strict=False))
        given.update(zip(self._made, self._make(weights) if self._made else [], strict=True))
        return [given[variable] for variable in self.plan.prepared]

    def _evaluate(self, weights: Weights) -> list[Value]:
        closed = self.traced.short
        values: dict[Var, Value] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        values.update(zip(closed.jaxpr.invars, weights, strict=False))
        Evaluator().extend(values, needed_equations(closed.jaxpr.eqns, self._made))
        return [values[variable] for variable in self._made]

    def start(
        self, weights: Weights, tokens: Array, lengths: Array, source: Source = ()
    ) -> tuple[Array, Cache]:
        """Read the prompts; see `TokenDecoder`."""
        tokens = padded(tokens, (1,), -tokens.shape[1] % self.traced.chunk)
        program = self._program_for_prompts(tokens.shape[1])
        whole = aval_of(program.jaxpr.invars[-1]).shape[1] == tokens.shape[1]
        attention = self.traced.attention(tokens.shape[1]) if whole else {}

        def one(row: Array, length: Array, source: Source) -> tuple[Array, Cache]:
            rows, given = Rows(0, row.shape[0]), with_source(weights, source)
            return _Rows(self, program, given, row, rows, length - 1, None, attention).run()

        logits, cache = jax.vmap(one)(tokens, lengths, source)
        places = [self.orders[v].index(dim) + 1 for v, dim in self.plan.kept.items()]
        # There is room for what is to come.
        each = zip(cache["rows"], places, self.lengths.values(), strict=True)
        rows = [padded(x, (dim,), length - x.shape[dim]) for x, dim, length in each]
        return logits, {**cache, "rows": rows}

    def step(
        self, weights: Weights, cache: Cache, tokens: Array, positions: Array
    ) -> tuple[Array, Cache]:
        """Read one more token of each row; see `TokenDecoder`."""
        program, chunk = self.traced.of_length(self.length), self.traced.chunk

        def one(cache: Cache, token: Array, position: Array) -> tuple[Array, Cache]:
            rows, tokens = Rows(position // chunk * chunk, chunk), token[None]
            if chunk > 1:
                given = list(self.plan.kept).index(self.traced.short.jaxpr.invars[-1])
                before = rows.of(cache["rows"][given][0], 0)
                tokens = before.at[position - rows.start].set(token)
            return _Rows(self, program, weights, tokens, rows, position, cache).run()

        return jax.vmap(one)(cache, tokens, positions)

    def _program_for_prompts(self, length: int) -> ClosedJaxpr:
        """Return the program for prompts alone; that for whole rows if it is another one."""
        try:
            return self.traced.of_length(length)
        except NotIncremental:
            return self.traced.of_length(self.length)


def _with_row(cache: Array, row: Array, position: Array, dim: int, *, divided: bool) -> Array:
    """Return a cache with one more row.

    Rows of a batch have positions of their own, so this is a scatter. For GPUs, XLA transposes an
    operand whose scattered dims are not its first ones, as with blocks of heads at a position; one
    of vectors is done in place. But it does not see that those of divided heads stay where they
    are.
    """
    lead = () if divided else cache.shape[:dim]
    at = [jax.lax.broadcasted_iota(position.dtype, lead, d) for d in range(len(lead))]
    where = (*at, jnp.broadcast_to(position, lead))

    def put(cache: Array, row: Array) -> Array:
        return cache.at[where].set(
            row, unique_indices=True, mode="promise_in_bounds", wrap_negative_indices=False
        )

    for _ in range(dim - len(lead)):
        put = jax.vmap(put)
    return put(cache, row.squeeze(dim))


def _plain_product(
    eqn: Equation, side: int, given: Value, stored: Value, order: Sequence[int]
) -> Value | None:
    """Return a product with keys or values as the cache has them, if that is of a plain form.

    In that form, dims of a batch come first, and each operand has one dim that is summed and one
    that is not. XLA would bring any other product into it, with a transposed copy of the cache.
    What is stored comes last, so that the positions of scores do: reductions over them are fast.
    """
    sums, batch = eqn.params["dimension_numbers"]
    places = [order.index(d) for d in (*batch[side], *sums[side])]
    count, own = len(places) - 1, (*batch[1 - side], *sums[1 - side])
    if places[:-1] != [*range(count)] or len(order) != count + 2 or len(sums[side]) != 1:
        return None
    free = [d for d in range(given.ndim) if d not in own]
    moved = jnp.transpose(given, (*own[:count], *free, own[-1]))
    leading, both = moved.shape[:-1], tuple(range(count))
    moved = moved.reshape(*leading[:count], -1, moved.shape[-1])
    numbers = ((count + 1,), (places[-1],)), (both, both)
    params = {**eqn.params, "dimension_numbers": numbers}
    (product,) = bind(eqn.replace(params=params), [moved, stored])
    product = product.reshape(*leading, product.shape[-1])
    return product if side else jnp.moveaxis(product, -1, count)


@dataclass(eq=False)
class _Rows:
    """One evaluation of new rows; variables are those of the short program."""

    decoder: IncrementalDecoder
    program: ClosedJaxpr
    weights: Weights
    tokens: Array
    rows: Rows
    last: Any
    cache: Cache | None
    attention: Mapping[Var, PromptAttention] = field(default_factory=dict[Var, PromptAttention])
    _values: dict[tuple[Var, Need], Value] = field(default_factory=dict[tuple[Var, Need], Value])
    _new: dict[Var, Value] = field(default_factory=dict[Var, Value])
    _states: list[list[Value]] = field(default_factory=list[list[Value]])

    def __post_init__(self) -> None:
        short, self._plan = self.decoder.traced.short.jaxpr, self.decoder.plan
        self._longs = dict(zip(map(id, short.eqns), self.program.jaxpr.eqns, strict=True))
        self._give(short.constvars, self.program.consts)
        given = [*self._plan.prepared, *self.decoder.sources]
        self._give(given[: len(self.weights)], self.weights)
        if self.cache is not None:
            self._give(self._plan.fixed, self.cache["source"])
        own = short.invars[-1]
        self._values[own, (1, True)] = self.tokens[None]
        if own in self._plan.kept:
            self._keep(own, self.tokens[None], self.program.jaxpr.invars[-1])

    def run(self) -> tuple[Array, Cache]:
        """Return the logits of the last row, and the new cache."""
        short = self.decoder.traced.short.jaxpr
        for eqn, long in zip(short.eqns, self.program.jaxpr.eqns, strict=True):
            if eqn in self._plan.carried:
                self._run_loop(eqn, long)
                continue
            for number, variable in enumerate(eqn.outvars):
                if (variable, WHOLE) in self._values:
                    continue
                for need in self._to_compute(variable):
                    if need[1] and (known := self.attention.get(variable)):
                        # What its operations compute is not read then.
                        found = known.run(*map(self._all_rows, known.operands))
                    else:
                        found = self._compute(eqn, long, number, need)
                    self._values[variable, need] = found
                if variable in self._plan.kept:
                    row = self._values[variable, (self._plan.kept[variable], True)]
                    self._keep(variable, row, long.outvars[number])
        logits = self._read(short.outvars[0], (1, False))
        # In the order of the plan: equations come in the other one.
        rows = [self._last_of(v) if self.cache is None else self._new[v] for v in self._plan.kept]
        source = [self._values[variable, WHOLE] for variable in self._plan.fixed]
        return logits[0, 0], {"rows": rows, "states": self._states, "source": source}

    def _last_of(self, variable: Var) -> Value:
        """Return what the cache has of a value that was computed for a whole prompt."""
        value, size = self._new[variable], self.decoder.lengths[variable]
        place = self.decoder.orders[variable].index(self._plan.kept[variable])
        if value.shape[place] <= size:
            return value
        return jnp.take(value, positions_in(size, self.last), place, mode="clip")

    def _give(self, variables: Sequence[Var], values: Sequence[Value]) -> None:
        for variable, value in zip(variables, values, strict=True):
            self._values[variable, WHOLE] = value

    def _to_compute(self, variable: Var) -> list[Need]:
        needs = self._plan.needs.get(variable, set())
        # The last row is taken from all new ones where those are needed as well.
        rows = [n for n in needs - {WHOLE} if n[1] or (n[0], True) not in needs]
        if WHOLE not in needs or variable in self._plan.kept:
            return rows
        rows = [need for need in rows if not self._from_whole(variable, need)]
        once = variable in self._plan.of_source and self.cache is not None
        return rows if once else [WHOLE, *rows]

    def _from_whole(self, variable: Var, need: Need) -> bool:
        """Whether rows are taken from all of them, which are computed anyway."""
        eqn, number = self._plan.positions.made[variable]
        rule = self._plan.positions.rule(eqn, number, need[0])
        return rule is None or rule.whole

    def _keep(self, variable: Var, row: Value, long: Var) -> None:
        """Add new rows to what is kept."""
        order = self.decoder.orders[variable]
        dim = order.index(self._plan.kept[variable])
        row = jnp.transpose(row, order)
        if self.cache is None:
            before = jnp.zeros([aval_of(long).shape[d] for d in order], row.dtype)
        else:
            before = self.cache["rows"][list(self._plan.kept).index(variable)]
        start = self.rows.chunks(self._unit(variable, self._plan.kept[variable])).start
        if self.cache is not None and variable in self.decoder.rings:
            start = start % self.decoder.lengths[variable]
        if self.cache is not None and self.rows.count == 1:
            new = _with_row(before, row, start, dim, divided=self.decoder.traced.divided)
        else:
            new = jax.lax.dynamic_update_slice_in_dim(before, row, start, dim)
        self._new[variable] = new
        self._values[variable, WHOLE] = jnp.transpose(
            new, [order.index(d) for d in range(new.ndim)]
        )

    def _read(self, atom: Atom, need: Need) -> Value:
        if isinstance(atom, Literal):
            return atom.val
        if (atom, need) in self._values:
            return self._values[atom, need]
        (dim, every), unit = need, self._unit(atom, need[0])
        if not every and (atom, (dim, True)) in self._values:
            if self.rows.count == 1:
                return self._values[atom, (dim, True)]
            inside = Rows(self.last - self.rows.start, 1).chunks(unit)
            return inside.of(self._values[atom, (dim, True)], dim)
        return self._chosen(every, unit).of(self._values[atom, WHOLE], dim)

    def _chosen(self, every: bool, unit: int) -> Rows:
        return (self.rows if every else Rows(self.last, 1)).chunks(unit)

    def _unit(self, atom: Atom, dim: int) -> int:
        return self._plan.positions.unit(atom, dim)

    def _compute(self, eqn: Equation, long: Equation, number: int, need: Need) -> Value:
        ring = None if self.cache is None else self.decoder.rings.get(eqn.outvars[number])
        if ring is not None:
            # A program as long as the ring says what shapes there are.
            long = self.decoder.of_ring[ring[1]][id(eqn)]
        if need == WHOLE:
            return bind(long, [self._read(a, WHOLE) for a in eqn.invars])[number]
        dim, every = need
        # Dims are those of the short program: in the long one, sizes may agree by chance.
        rule = self._plan.positions.rule(eqn, number, dim)
        assert rule is not None
        operands = [
            self._read(atom, WHOLE if inner is None else (inner, every))
            for atom, inner in zip(eqn.invars, rule.dims, strict=True)
        ]
        keys = None if ring is None else self._plan.positions.rule(eqn, number, ring[0])
        if ring is not None and keys is not None:
            # What depends on no token has keys of all positions.
            at, depends = positions_in(ring[1], self.last), self._plan.positions.depends
            operands = [
                v if d is None or depends(atom) else jnp.take(v, at, d, mode="clip")
                for v, atom, d in zip(operands, eqn.invars, keys.dims, strict=True)
            ]
        for side, atom in enumerate(eqn.invars if eqn.primitive.name == "dot_general" else ()):
            kept = isinstance(atom, Var) and atom in self._plan.kept and rule.dims[side] is None
            if isinstance(atom, Var) and kept and self.cache is not None:
                stored, order = self._new[atom], self.decoder.orders[atom]
                found = _plain_product(eqn, side, operands[1 - side], stored, order)
                if found is not None:
                    return found
        rows = self._chosen(every, self._unit(eqn.outvars[number], dim))
        return rule.run(long, operands, rows)[number]

    def _all_rows(self, atom: Atom) -> Value:
        """Return all rows of a value, where all rows are new; it may not be part of the plan."""
        if isinstance(atom, Literal):
            return atom.val
        for need in (WHOLE, *((dim, True) for dim in self._plan.positions.of(atom))):
            if (atom, need) in self._values:
                return self._values[atom, need]
        eqn, number = self._plan.positions.made[atom]
        return bind(self._longs[id(eqn)], [self._all_rows(a) for a in eqn.invars])[number]

    def _run_loop(self, eqn: Equation, long: Equation) -> None:
        """Run a loop over the new rows, from the state that the last one left."""
        _, carries = scan_counts(eqn)
        rule = self._plan.positions.rule(eqn, carries, 0)
        assert rule is not None
        operands = [
            self._read(atom, WHOLE if inner is None else (0, True))
            for atom, inner in zip(eqn.invars, rule.dims, strict=True)
        ]
        fixed, state, sequences = scan_parts(eqn, operands)
        if self.cache is not None:
            state = self.cache["states"][len(self._states)]
        # The state is that after the last whole chunk.
        unit, chunk = self._unit(eqn.outvars[carries], 0), self._plan.positions.chunk
        valid = (self.last - self.rows.start + 1) // chunk * chunk // unit
        state, results = jax.lax.scan(
            _only_valid(long, fixed, carries, valid),
            [jnp.asarray(value) for value in state],
            (jnp.arange(self.rows.count // unit), sequences),
        )
        self._states.append(state)
        for variable, value in zip(eqn.outvars[carries:], results, strict=True):
            self._values[variable, (0, True)] = value
            if variable in self._plan.kept:
                self._keep(variable, value, long.outvars[eqn.outvars.index(variable)])


def _only_valid(
    eqn: Equation, fixed: Sequence[Value], carries: int, valid: Any
) -> Callable[[list[Value], tuple[Array, list[Value]]], tuple[list[Value], list[Value]]]:
    """Return the body of a loop that leaves its state as it is on padding."""

    def body(
        state: list[Value], given: tuple[Array, list[Value]]
    ) -> tuple[list[Value], list[Value]]:
        number, sequences = given
        out = Evaluator().run(eqn.params["jaxpr"], [*fixed, *state, *sequences])
        kept = [jnp.where(number < valid, a, b) for a, b in zip(out, state, strict=False)]
        return kept, out[carries:]

    return body
