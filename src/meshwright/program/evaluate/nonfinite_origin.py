"""Finding the equation with which values stop being finite, by evaluating a program eagerly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.program.evaluate.evaluator import (
    Environment,
    Evaluator,
    enter_call,
    enter_cond,
    enter_while,
    unroll_scan,
)
from meshwright.program.jaxpr.equations import (
    CALLS,
    CUSTOM_DERIVATIVES,
    REMATS,
    ClosedJaxpr,
    Equation,
    Value,
    name_stack,
)
from meshwright.program.jaxpr.names import module_of


@dataclass(frozen=True)
class ArraySummary:
    """A summary of an array's values: how many are NaN or infinite.

    The ``largest`` is the largest finite magnitude, or 0.
    """

    shape: tuple[int, ...]
    dtype: str
    largest: float
    nans: int
    infs: int

    def __str__(self) -> str:
        counts = [f"{n} {what}" for n, what in ((self.nans, "NaN"), (self.infs, "inf")) if n]
        shape = ", ".join(map(str, self.shape))
        return f"{self.dtype}[{shape}], max |x| {self.largest:.4g}" + "".join(
            f", {each}" for each in counts
        )


@dataclass(frozen=True)
class Origin:
    """Where values stop being finite: an equation, or an input of the program.

    Attributes:
        order: how many equations were evaluated before it; -1 for an input.
        module: the path of the module; empty for the loss outside of the model, or an input.
        operation: the primitive of the equation, or the name of the input.
        backward: whether it belongs to the backward pass.
        before: its floating-point operands.
        after: the first result that is not finite.
        cause: where an infinity comes from that this equation makes a NaN of.
    """

    order: int
    module: str
    operation: str
    backward: bool
    before: tuple[ArraySummary, ...]
    after: ArraySummary
    cause: Origin | None = None

    @property
    def place(self) -> tuple[str, str]:
        """The module and the operation."""
        return self.module, self.operation

    @property
    def first(self) -> Origin:
        """The first equation of the chain: that of the infinity, if there is one."""
        return self if self.cause is None else self.cause.first


def summarize(value: Any) -> ArraySummary:
    """Summarize an array of floats."""
    array = np.asarray(jnp.asarray(value, jnp.float32))
    good = np.abs(array[np.isfinite(array)])
    return ArraySummary(
        tuple(array.shape),
        str(value.dtype),
        float(good.max()) if good.size else 0.0,
        int(np.isnan(array).sum()),
        int(np.isinf(array).sum()),
    )


def find_origins(
    closed: ClosedJaxpr,
    args: Sequence[Value],
    names: Sequence[str],
    forward: Collection[tuple[str, str]] | None = None,
) -> tuple[list[Origin], list[Origin]]:
    """Evaluate a program; return where results, and where any values stop being finite.

    ``names`` are what its inputs are called. For a program of gradients, ``forward`` are the places
    where the loss alone has such values: its other equations belong to the backward pass.
    """
    tracker = _Tracker(names, args, forward)
    with jax.disable_jit():
        found = [tracker.origin(value) for value in tracker.run(closed, args)]
    return [origin for origin in found if origin is not None], tracker.noted


@dataclass(frozen=True)
class _Bad:
    """A value that is not finite; it is kept, so that its id stays its own."""

    value: Value
    has_nan: bool
    origin: Origin | None


class _Tracker(Evaluator):
    """Evaluates equations one by one and follows values that are not finite.

    A NaN made from numbers without NaN is an origin, and so is an infinity made from finite
    numbers. Infinities that a program has as constants, such as those of masks, are none.
    """

    def __init__(
        self,
        names: Sequence[str],
        args: Sequence[Value],
        forward: Collection[tuple[str, str]] | None,
    ) -> None:
        super().__init__()
        self.noted: list[Origin] = []
        self._forward = forward
        self._bad: dict[int, _Bad] = {}
        self._scopes: list[str] = []
        self._order = 0
        for name, value in zip(names, args, strict=True):
            if kind := _kind(value):
                origin = Origin(-1, "", name, False, (), summarize(value))
                self._bad[id(value)] = _Bad(value, kind == "nan", origin)

    def origin(self, value: Value) -> Origin | None:
        """Return where a value stopped being finite; None if it is finite."""
        return self._bad[id(value)].origin if id(value) in self._bad else None

    def equation(self, eqn: Equation, env: Environment) -> list[Value]:
        """Evaluate one equation, and look at its results unless it contains a program."""
        if rule := _RULES.get(eqn.primitive.name):
            self._scopes.append(name_stack(eqn))
            try:
                return rule(eqn, env)
            finally:
                self._scopes.pop()
        operands = env.operands(eqn)
        results = self.numerics.bind(eqn, operands)
        self._order += 1
        for value in results:
            if kind := _kind(value):
                self._note(value, kind == "nan", operands, eqn)
        return results

    def derive(self, value: Value, sources: Iterable[Value]) -> Value:
        """Return a value that was cut from others, or put together from them."""
        kind = _kind(value)
        origins = [self._bad[id(each)] for each in sources if id(each) in self._bad]
        if kind and origins:
            self._bad[id(value)] = _Bad(value, kind == "nan", _earliest(origins))
        return value

    def _note(self, value: Value, has_nan: bool, operands: Sequence[Value], eqn: Equation) -> None:
        bad = [self._bad[id(each)] for each in operands if id(each) in self._bad]
        constants = any(id(each) not in self._bad and _kind(each) for each in operands)
        if has_nan and any(each.has_nan for each in bad):
            origin = _earliest([each for each in bad if each.has_nan])
        elif not has_nan and (bad or constants):
            origin = _earliest(bad)
        else:
            place = module_of("/".join([*self._scopes, name_stack(eqn)])), eqn.primitive.name
            floats = [each for each in operands if _is_float(each)]
            origin = Origin(
                self._order,
                *place,
                self._forward is not None and place not in self._forward,
                tuple(map(summarize, map(jnp.asarray, floats))),
                summarize(value),
                _earliest(bad),
            )
            self.noted.append(origin)
        self._bad[id(value)] = _Bad(value, has_nan, origin)


def _earliest(bad: Sequence[_Bad]) -> Origin | None:
    known = [each.origin for each in bad if each.origin is not None]
    return min(known, key=lambda origin: origin.order, default=None)


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(getattr(value, "dtype", type(value)), jnp.floating)


def _kind(value: Any) -> str:
    """Return whether a value has a NaN, or only infinities; empty if it is finite."""
    if not _is_float(value) or bool(jnp.isfinite(value).all()):
        return ""
    return "nan" if bool(jnp.isnan(value).any()) else "inf"


def _scan(eqn: Equation, env: Environment) -> list[Value]:
    assert isinstance(env.evaluator, _Tracker)
    derive = env.evaluator.derive
    return unroll_scan(
        eqn,
        env,
        lambda stack, turn: derive(stack[turn], [stack]),
        lambda column: derive(jnp.stack(column), column),
    )


_RULES: Mapping[str, Callable[[Equation, Environment], list[Value]]] = {
    **dict.fromkeys((*CALLS, *REMATS, *CUSTOM_DERIVATIVES), enter_call),
    "scan": _scan,
    "while": enter_while,
    "cond": enter_cond,
}
"""Calls, loops and branches are entered, one iteration after another."""
