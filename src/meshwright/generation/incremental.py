"""A decoder derived from a model's program: it computes new rows, and keeps what they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.generation.positions import NotIncremental, Positions
from meshwright.generation.row_plan import WHOLE, Need, plan_rows, stored_order
from meshwright.generation.row_rules import Rows
from meshwright.generation.token_decoder import Cache, Source, Weights, with_source
from meshwright.generation.traced_decoder import TracedDecoder
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
)


class IncrementalDecoder:
    """Computes the logits of new tokens from a cache of earlier ones.

    Args:
        traced: the model's program.
        length: the most tokens of a row.
    """

    reason = sees = ""

    def __init__(self, traced: TracedDecoder, length: int) -> None:
        self.length, self.traced = length, traced
        self.plan = plan_rows(Positions(traced.short, traced.chunk), traced.num_sources)
        self.orders = {v: stored_order(self.plan, v, dim) for v, dim in self.plan.kept.items()}
        """By kept variable, the order of its dims in the cache."""
        traced.of_length(length)

    def start(
        self, weights: Weights, tokens: Array, lengths: Array, source: Source = ()
    ) -> tuple[Array, Cache]:
        """Read the prompts; see `TokenDecoder`."""
        chunk = self.traced.chunk
        tokens = _lengthened(tokens, 1, -(-tokens.shape[1] // chunk) * chunk)
        program = self._program_for_prompts(tokens.shape[1])

        def one(row: Array, length: Array, source: Source) -> tuple[Array, Cache]:
            rows, given = Rows(0, row.shape[0]), with_source(weights, source)
            return _Rows(self, program, given, row, rows, length - 1, None).run()

        logits, cache = jax.vmap(one)(tokens, lengths, source)
        return logits, {**cache, "rows": self._with_room(cache["rows"])}

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

    def _with_room(self, kept: Sequence[Array]) -> list[Array]:
        """Return the cache of prompts with room for what is to come."""
        unit, found = self.plan.positions.unit, list[Array]()
        for value, (variable, dim) in zip(kept, self.plan.kept.items(), strict=True):
            place = self.orders[variable].index(dim) + 1
            found.append(_lengthened(value, place, self.length // unit(variable, dim)))
        return found


def _lengthened(value: Array, dim: int, length: int) -> Array:
    room = [(0, length - value.shape[dim] if d == dim else 0) for d in range(value.ndim)]
    return jnp.pad(value, room)


class _Rows:
    """One evaluation of new rows; variables are those of the short program."""

    def __init__(
        self,
        decoder: IncrementalDecoder,
        program: ClosedJaxpr,
        weights: Weights,
        tokens: Array,
        rows: Rows,
        last: Any,
        cache: Cache | None,
    ) -> None:
        self._decoder, self._plan, self._program = decoder, decoder.plan, program
        self._rows, self._last, self._cache = rows, last, cache
        self._values: dict[tuple[Var, Need], Value] = {}
        self._new: dict[Var, Value] = {}
        self._states: list[list[Value]] = []
        short = decoder.traced.short.jaxpr
        self._give(short.constvars, program.consts)
        self._give(short.invars[: len(weights)], weights)
        if cache is not None:
            self._give(self._plan.fixed, cache["source"])
        given = short.invars[-1]
        self._values[given, (1, True)] = tokens[None]
        if given in self._plan.kept:
            self._keep(given, tokens[None], self._program.jaxpr.invars[-1])

    def run(self) -> tuple[Array, Cache]:
        """Return the logits of the last row, and the new cache."""
        short = self._decoder.traced.short.jaxpr
        for eqn, long in zip(short.eqns, self._program.jaxpr.eqns, strict=True):
            if eqn in self._plan.carried:
                self._run_loop(eqn, long)
                continue
            for number, variable in enumerate(eqn.outvars):
                for need in self._to_compute(variable):
                    self._values[variable, need] = self._compute(eqn, long, number, need)
                if variable in self._plan.kept:
                    row = self._values[variable, (self._plan.kept[variable], True)]
                    self._keep(variable, row, long.outvars[number])
        logits = self._read(short.outvars[0], (1, False))
        # In the order of the plan: equations come in the other one.
        rows = [self._new[variable] for variable in self._plan.kept]
        source = [self._values[variable, WHOLE] for variable in self._plan.fixed]
        return logits[0, 0], {"rows": rows, "states": self._states, "source": source}

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
        once = variable in self._plan.of_source and self._cache is not None
        return rows if once else [WHOLE, *rows]

    def _from_whole(self, variable: Var, need: Need) -> bool:
        """Whether rows are taken from all of them, which are computed anyway."""
        eqn, number = self._plan.positions.made[variable]
        rule = self._plan.positions.rule(eqn, number, need[0])
        return rule is None or rule.whole

    def _keep(self, variable: Var, row: Value, long: Var) -> None:
        """Add new rows to what is kept."""
        order = self._decoder.orders[variable]
        dim = order.index(self._plan.kept[variable])
        row = jnp.transpose(row, order)
        if self._cache is None:
            before = jnp.zeros([aval_of(long).shape[d] for d in order], row.dtype)
        else:
            before = self._cache["rows"][list(self._plan.kept).index(variable)]
        start = self._rows.chunks(self._unit(variable, self._plan.kept[variable])).start
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
            inside = Rows(self._last - self._rows.start, 1).chunks(unit)
            return inside.of(self._values[atom, (dim, True)], dim)
        return self._chosen(every, unit).of(self._values[atom, WHOLE], dim)

    def _chosen(self, every: bool, unit: int) -> Rows:
        return (self._rows if every else Rows(self._last, 1)).chunks(unit)

    def _unit(self, atom: Atom, dim: int) -> int:
        return self._plan.positions.unit(atom, dim)

    def _compute(self, eqn: Equation, long: Equation, number: int, need: Need) -> Value:
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
        rows = self._chosen(every, self._unit(eqn.outvars[number], dim))
        return rule.run(long, operands, rows)[number]

    def _run_loop(self, eqn: Equation, long: Equation) -> None:
        """Run a loop over the new rows, from the state that the last one left."""
        constants, carries = scan_counts(eqn)
        rule = self._plan.positions.rule(eqn, carries, 0)
        assert rule is not None
        operands = [
            self._read(atom, WHOLE if inner is None else (0, True))
            for atom, inner in zip(eqn.invars, rule.dims, strict=True)
        ]
        fixed, state = operands[:constants], operands[constants : constants + carries]
        if self._cache is not None:
            state = self._cache["states"][len(self._states)]
        # The state is that after the last whole chunk.
        unit, chunk = self._unit(eqn.outvars[carries], 0), self._plan.positions.chunk
        valid = (self._last - self._rows.start + 1) // chunk * chunk // unit
        state, results = jax.lax.scan(
            _only_valid(long, fixed, carries, valid),
            [jnp.asarray(value) for value in state],
            (jnp.arange(self._rows.count // unit), operands[constants + carries :]),
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
