"""A decoder derived from a model's program: it computes new rows, and keeps what they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from meshwright.generation.decoder import Cache, Weights
from meshwright.generation.positions import Positions
from meshwright.generation.row_plan import WHOLE, Need, plan_rows
from meshwright.generation.row_rules import Rows, row_rule
from meshwright.generation.traced_decoder import TwoLengths, by_short
from meshwright.program.evaluate.evaluator import Evaluator
from meshwright.program.jaxpr.equations import (
    Atom,
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

    reason = ""

    def __init__(self, traced: TwoLengths, length: int) -> None:
        self.length, self._traced = length, traced
        self.plan = plan_rows(Positions(traced.short))
        self._long = by_short(traced)

    def start(self, weights: Weights, tokens: Array, lengths: Array) -> tuple[Array, Cache]:
        """Read the prompts; see `Decoder`."""

        def one(row: Array, length: Array) -> tuple[Array, Cache]:
            rows = Rows(0, row.shape[0])
            return _Rows(self, weights, row, rows, length - 1, None).run()

        return jax.vmap(one)(tokens, lengths)

    def step(
        self, weights: Weights, cache: Cache, tokens: Array, positions: Array
    ) -> tuple[Array, Cache]:
        """Read one more token of each row; see `Decoder`."""

        def one(cache: Cache, token: Array, position: Array) -> tuple[Array, Cache]:
            rows = Rows(position, 1)
            return _Rows(self, weights, token[None], rows, position, cache).run()

        return jax.vmap(one)(cache, tokens, positions)

    @property
    def traced(self) -> TwoLengths:
        """The model's program."""
        return self._traced

    def like(self, variable: Var) -> Any:
        """Return shape and dtype of a variable with all rows."""
        return aval_of(self._long[variable])

    def kept_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of what is kept of each row."""
        return [self.like(variable).shape for variable in self.plan.kept]


class _Rows:
    """One evaluation of new rows; variables are those of the short program."""

    def __init__(
        self,
        decoder: IncrementalDecoder,
        weights: Weights,
        tokens: Array,
        rows: Rows,
        last: Any,
        cache: Cache | None,
    ) -> None:
        self._decoder, self._plan = decoder, decoder.plan
        self._rows, self._last, self._cache = rows, last, cache
        self._values: dict[tuple[Var, Need], Value] = {}
        self._new: dict[Var, Value] = {}
        self._states: list[list[Value]] = []
        short, long = decoder.traced.short, decoder.traced.long
        self._give(short.jaxpr.constvars, long.consts)
        self._give(short.jaxpr.invars[:-1], weights)
        given = short.jaxpr.invars[-1]
        self._values[given, (1, True)] = tokens[None]
        if given in self._plan.kept:
            self._keep(given, tokens[None])

    def run(self) -> tuple[Array, Cache]:
        """Return the logits of the last row, and the new cache."""
        traced = self._decoder.traced
        for eqn, long in zip(traced.short.jaxpr.eqns, traced.long.jaxpr.eqns, strict=True):
            if eqn in self._plan.carried:
                self._run_loop(eqn, long)
                continue
            for number, variable in enumerate(eqn.outvars):
                for need in self._to_compute(variable):
                    self._values[variable, need] = self._compute(eqn, long, number, need)
                if variable in self._plan.kept:
                    row = self._values[variable, (self._plan.kept[variable], True)]
                    self._keep(variable, row)
        logits = self._read(traced.short.jaxpr.outvars[0], (1, False))
        return logits[0, 0], {"rows": list(self._new.values()), "states": self._states}

    def _give(self, variables: Sequence[Var], values: Sequence[Value]) -> None:
        for variable, value in zip(variables, values, strict=True):
            self._values[variable, WHOLE] = value

    def _to_compute(self, variable: Var) -> list[Need]:
        needs = self._plan.needs.get(variable, set())
        # The last row is taken from all new ones where those are needed as well.
        rows = [n for n in needs - {WHOLE} if n[1] or (n[0], True) not in needs]
        if WHOLE not in needs or variable in self._plan.kept:
            return rows
        return [WHOLE, *(n for n in rows if not self._from_whole(variable, n))]

    def _from_whole(self, variable: Var, need: Need) -> bool:
        """Whether rows are taken from all of them, which are computed anyway."""
        eqn, number = self._plan.positions.made[variable]
        rule = row_rule(eqn, number, need[0])
        return rule is None or rule.whole

    def _keep(self, variable: Var, row: Value) -> None:
        dim, like = self._plan.kept.get(variable, 1), self._decoder.like(variable)
        if self._cache is None:
            before = jnp.zeros(like.shape, like.dtype)
        else:
            before = self._cache["rows"][len(self._new)]
        new = jax.lax.dynamic_update_slice_in_dim(before, row, self._rows.start, dim)
        self._new[variable] = self._values[variable, WHOLE] = new

    def _read(self, atom: Atom, need: Need) -> Value:
        if isinstance(atom, Literal):
            return atom.val
        if (atom, need) in self._values:
            return self._values[atom, need]
        dim, every = need
        if not every and (atom, (dim, True)) in self._values:
            inside = Rows(self._last - self._rows.start, 1)
            return inside.of(self._values[atom, (dim, True)], dim)
        return self._chosen(every).of(self._values[atom, WHOLE], dim)

    def _chosen(self, every: bool) -> Rows:
        return self._rows if every else Rows(self._last, 1)

    def _compute(self, eqn: Equation, long: Equation, number: int, need: Need) -> Value:
        if need == WHOLE:
            return bind(long, [self._read(a, WHOLE) for a in eqn.invars])[number]
        dim, every = need
        # Dims are those of the short program: in the long one, sizes may agree by chance.
        rule = row_rule(eqn, number, dim)
        assert rule is not None
        operands = [
            self._read(atom, WHOLE if inner is None else (inner, every))
            for atom, inner in zip(eqn.invars, rule.dims, strict=True)
        ]
        return rule.run(long, operands, self._chosen(every))[number]

    def _run_loop(self, eqn: Equation, long: Equation) -> None:
        """Run a loop over the new rows, from the state that the last one left."""
        constants, carries = scan_counts(eqn)
        rule = row_rule(eqn, carries, 0)
        assert rule is not None
        operands = [
            self._read(atom, WHOLE if inner is None else (0, True))
            for atom, inner in zip(eqn.invars, rule.dims, strict=True)
        ]
        fixed, state = operands[:constants], operands[constants : constants + carries]
        if self._cache is not None:
            state = self._cache["states"][len(self._states)]
        valid = self._last - self._rows.start + 1
        state, results = jax.lax.scan(
            _only_valid(long, fixed, carries, valid),
            [jnp.asarray(value) for value in state],
            (jnp.arange(self._rows.count), operands[constants + carries :]),
        )
        self._states.append(state)
        for variable, value in zip(eqn.outvars[carries:], results, strict=True):
            self._values[variable, (0, True)] = value
            if variable in self._plan.kept:
                self._keep(variable, value)


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
