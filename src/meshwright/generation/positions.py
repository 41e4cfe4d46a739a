"""Which dims of a program's values are positions, and whether rows depend on later positions.

The program maps the tokens of one row [1, T] to logits [1, T, V]. A value that depends on tokens
has a dim of positions, or two, such as the scores of attention. Where a sum over positions follows,
all later positions must have been masked: their weights are zero whatever the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np

from meshwright.generation.token_decoder import LATER
from meshwright.program.dims.op import primitives
from meshwright.program.dims.row_rules import RowRule, hidden_after, row_rule, source_dim
from meshwright.program.evaluate.dependencies import inputs_of, needed_equations
from meshwright.program.evaluate.evaluator import Evaluator
from meshwright.program.jaxpr.equations import (
    Atom,
    ClosedJaxpr,
    Equation,
    Literal,
    Var,
    aval_of,
    scan_parts,
)
from meshwright.program.jaxpr.walks import where
from meshwright.program.kernels.masks import HIDDEN, Span, mask_spans
from meshwright.trees import is_key

_NO_LOOKAHEAD = -(2**31)
_LATER = primitives(
    """
    reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin sort rev fft
    top_k dot_general conv_general_dilated cumsum cumprod cummax cummin cumlogsumexp
    """
)
"""Operations over positions that read later ones if nothing masks those."""


class NotIncremental(Exception):
    """Why a model's rows cannot be computed one after the other, and ``at`` which operation."""

    def __init__(self, why: str, at: str = "") -> None:
        self.at = at
        super().__init__(f"{why} ({at})" if at else why)

    @classmethod
    def by(cls, eqn: Equation, why: str = "") -> NotIncremental:
        """Return the reason with the operation and its module."""
        unknown = "mixes tokens in a way that no cache is known for"
        why = why or (LATER if eqn.primitive.name in _LATER else unknown)
        return cls(f"the model {why}", where(eqn))


class Positions:
    """The positions of a program's values; its last input is the tokens [1, T].

    It is traced for few positions, which it may divide into chunks of so many. ``longer`` is the
    same program for more of them, to see how far back masks let rows see.
    """

    def __init__(
        self, closed: ClosedJaxpr, chunk: int = 1, longer: ClosedJaxpr | None = None
    ) -> None:
        self.closed, self.jaxpr, self.chunk = closed, closed.jaxpr, chunk
        self._longer = longer or closed
        self.windows: set[int] = set()
        """How far back masks that were looked at let rows see."""
        self.made: dict[Var, tuple[Equation, int]] = {
            variable: (eqn, number)
            for eqn in self.jaxpr.eqns
            for number, variable in enumerate(eqn.outvars)
        }
        tokens = self.jaxpr.invars[-1]
        self.length = int(aval_of(tokens).shape[1])
        self.dims: dict[Var, tuple[int, ...]] = {tokens: (1,)}
        """By variable that depends on tokens, its dims of positions."""
        self._constants: dict[Var, Any] = {}
        for eqn in self.jaxpr.eqns:
            self._follow(eqn)

    def depends(self, atom: Atom) -> bool:
        """Whether a value depends on tokens."""
        return not isinstance(atom, Literal) and atom in self.dims

    def of(self, atom: Atom) -> tuple[int, ...]:
        """Return the dims of positions of a value; none if it does not depend on tokens."""
        return () if isinstance(atom, Literal) else self.dims.get(atom, ())

    def rule(self, eqn: Equation, result: int, dim: int) -> RowRule | None:
        """Return how rows along a dim of one result are computed; None if there is no way."""
        return row_rule(eqn, result, dim, self.chunk)

    def unit(self, atom: Atom, dim: int) -> int:
        """Return how many positions one index of a dim of positions stands for."""
        # Chunks, and one more or less, are far fewer than positions.
        few = aval_of(atom).shape[dim] <= self.length // self.chunk + 2
        return self.chunk if few else 1

    def _follow(self, eqn: Equation) -> None:
        if not any(self.depends(a) for a in eqn.invars):
            return
        for number, variable in enumerate(eqn.outvars):
            shape = aval_of(variable).shape
            dims = [d for d in range(len(shape)) if self._is_positions(eqn, number, d)]
            self.dims[variable] = tuple(dims)

    def _is_positions(self, eqn: Equation, result: int, dim: int) -> bool:
        rule = self.rule(eqn, result, dim)
        if rule is None:
            return False
        if rule.whole:
            inner, _ = source_dim(eqn, dim)
            return any(inner in self.of(a) for a in eqn.invars)
        pairs = zip(eqn.invars, rule.dims, strict=True)
        return any(inner is not None and inner in self.of(a) for a, inner in pairs)

    def mixed_by(self, atom: Atom) -> Equation:
        """Return the equation that took the positions from a value that has none."""
        assert not isinstance(atom, Literal)
        eqn, _ = self.made[atom]
        before = [a for a in eqn.invars if self.depends(a) and not self.of(a)]
        return self.mixed_by(before[0]) if before else eqn

    def lookahead(self, atom: Atom, dim: int) -> int:
        """Return how many positions later than its own a row of a value depends on, at most."""
        if not self.depends(atom) or isinstance(atom, Literal) or atom not in self.made:
            return 0 if self.depends(atom) else _NO_LOOKAHEAD
        return self._lookaheads[atom, dim]

    @cached_property
    def _lookaheads(self) -> Mapping[tuple[Var, int], int]:
        found: dict[tuple[Var, int], int] = {(self.jaxpr.invars[-1], 1): 0}
        for eqn in self.jaxpr.eqns:
            for number, variable in enumerate(eqn.outvars):
                for dim in self.of(variable):
                    found[variable, dim] = self._reach(eqn, number, dim, found)
        return found

    def _reach(
        self, eqn: Equation, result: int, dim: int, found: Mapping[tuple[Var, int], int]
    ) -> int:
        rule = self.rule(eqn, result, dim)
        assert rule is not None
        reach = _NO_LOOKAHEAD
        offset = 0
        for atom, inner in zip(eqn.invars, rule.dims, strict=True):
            later = 0
            if rule.whole:
                inner, later = source_dim(eqn, dim)
                if eqn.primitive.name == "concatenate":
                    later = -offset
                    offset += aval_of(atom).shape[dim]
                later *= self.unit(eqn.outvars[result], dim)
            if inner is not None and inner in self.of(atom) and not isinstance(atom, Literal):
                reach = max(reach, found.get((atom, inner), 0) + later)
        return reach

    def masked(self, atom: Atom, row: int, key: int, window: int = 0) -> str:
        """Return what a value is where the key is later than the row, by its dims of the two.

        That is ``zero``, ``low`` (so negative that its exponential vanishes), or nothing. With a
        window, it is about keys that are at least so much earlier instead.
        """
        if not self.depends(atom):
            spans = self._spans(atom, row, key)
            hidden = [] if spans is None else [span.excludes(window) for span in spans]
            return "zero" if hidden[:1] == [True] else "low" if hidden[2:] == [True] else ""
        assert not isinstance(atom, Literal)
        if atom not in self.made:
            return ""
        eqn, number = self.made[atom]
        name = eqn.primitive.name
        if name == "select_n":
            return self._chosen(eqn, row, key, window)
        rules = self.rule(eqn, number, row), self.rule(eqn, number, key)
        if rules[0] is None or rules[1] is None or rules[0].whole or rules[1].whole:
            return ""
        states: list[str] = []
        for operand, a, b in zip(eqn.invars, rules[0].dims, rules[1].dims, strict=True):
            if a is None or b is None:
                states.append(self._scalar(operand))
            else:
                states.append(self.masked(operand, a, b, window))
        return hidden_after(name, states)

    def _spans(self, atom: Atom, row: int, key: int) -> Sequence[Span] | None:
        """Return `mask_spans` of a value in the longer program; None if it is no constant."""
        program = self._program(atom, self._longer)
        if program is None:
            return None
        spans = mask_spans(program, row, key)
        most = aval_of(program.jaxpr.outvars[0]).shape[key]
        self.windows |= {span.most + 1 for span in spans if 0 <= span.most < most - 1}
        return spans

    @cached_property
    def _numbers(self) -> Mapping[int, int]:
        return {id(eqn): number for number, eqn in enumerate(self.jaxpr.eqns)}

    def _scalar(self, atom: Atom) -> str:
        """What a value without both dims is, everywhere."""
        if self.depends(atom):
            return ""
        value = self.constant(atom)
        if value is None or not value.size:
            return ""
        if value.dtype != bool and bool((value > 0).all()):
            return "positive"
        return "zero" if not value.any() else "low" if bool((value <= HIDDEN).all()) else ""

    def _chosen(self, eqn: Equation, row: int, key: int, window: int) -> str:
        predicate, *cases = eqn.invars
        states = [
            self.masked(case, row, key, window) if aval_of(case).shape else self._scalar(case)
            for case in cases
        ]
        if self.depends(predicate):
            # A mask of padding and later positions: false at later ones.
            return states[0] if self.masked(predicate, row, key, window) == "zero" else ""
        same = aval_of(predicate).shape == aval_of(eqn.outvars[0]).shape
        spans = self._spans(predicate, row, key) if same else None
        if spans is None:
            return ""
        picked = [not spans[1].excludes(window), not spans[0].excludes(window)]
        found = {state for state, is_picked in zip(states, picked, strict=False) if is_picked}
        return found.pop() if len(found) == 1 and len(states) == 2 else ""

    def constant(self, atom: Atom) -> np.ndarray | None:
        """Return a value that depends on neither tokens nor weights; None if it does."""
        if isinstance(atom, Literal):
            return np.asarray(atom.val)
        if atom not in self._constants:
            program = self._program(atom, self.closed)
            with jax.ensure_compile_time_eval():
                value = None if program is None else Evaluator().run(program, [])[0]
            self._constants[atom] = None if value is None else np.asarray(value)
        return self._constants[atom]

    def _program(self, atom: Atom, closed: ClosedJaxpr) -> ClosedJaxpr | None:
        """Return what computes a constant, in this program or a longer one; None if it is none."""
        if isinstance(atom, Literal) or is_key(aval_of(atom)):
            return None
        known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        if atom in self.made:
            eqn, number = self.made[atom]
            variable = closed.jaxpr.eqns[self._numbers[id(eqn)]].outvars[number]
        elif atom in self.jaxpr.constvars:
            variable = closed.jaxpr.constvars[self.jaxpr.constvars.index(atom)]
        else:
            return None
        needed = needed_equations(closed.jaxpr.eqns, [variable])
        if not inputs_of(needed) <= known.keys():
            return None

        def run() -> Any:
            Evaluator().extend(known, needed)
            return known[variable]

        return jax.make_jaxpr(run)()

    def carried(self, eqn: Equation) -> bool:
        """Whether an equation is a loop over positions with a state that begins without tokens."""
        if eqn.primitive.name != "scan":
            return False
        constants, carried, sequences = scan_parts(eqn, eqn.invars)
        return not any(map(self.depends, (*constants, *carried))) and all(
            self.of(a) == (0,) for a in sequences if self.depends(a)
        )
