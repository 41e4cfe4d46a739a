"""What is known about a value with regard to samples, and how it depends on their number."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.program.dims.walk import ProgramDims
from meshwright.program.jaxpr.equations import Equation, aval_of, bind, equation_module

_LARGEST_CONSTANT = 2**21
"""Elements of the largest constant that is computed."""
_ROUNDING = 1e-5

Kind = Literal["independent", "per_sample", "sum", "mixed"]
"""Whether a value does not depend on samples, has them in a dim, is a sum over them, or combines
them in another way."""


class MixedSamplesError(Exception):
    """An operation, perhaps in a module, treats samples other than one by one or by a sum.

    Attributes:
        module: the module; empty if it is in none.
        combines: whether the result depends on which samples are together; if not, on how many
            there are, or on their order.
    """

    def __init__(self, how: str, module: str = "", *, combines: bool = True) -> None:
        super().__init__(how)
        self.module, self.combines = module, combines


@dataclass(frozen=True)
class SampleValue:
    """What is known about a value.

    Attributes:
        kind: how it depends on samples.
        factor: the value for the second number of samples over that for the first: of one sample's
            part, or of the sum; None if unknown, nan for zero, which fits any factor.
        constants: the value in both programs, if it depends on no input.
        position_columns: for indices, the columns that hold the position of the sample itself.
        error: how it combines samples, if it is mixed.
    """

    kind: Kind
    factor: float | None = 1.0
    constants: tuple[Any, Any] | None = None
    position_columns: frozenset[int] = frozenset()
    error: MixedSamplesError | None = None


@dataclass(frozen=True)
class EquationPair:
    """One equation in both programs: what is known about its operands, and the programs it calls.

    ``program`` has the dims of the first program, where it has this number.
    """

    program: ProgramDims
    number: int
    first: Equation
    second: Equation
    operands: Sequence[SampleValue]
    first_calls: tuple[ProgramDims, ...]
    second_calls: tuple[ProgramDims, ...]

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.first.primitive.name

    @property
    def can_be_entered(self) -> bool:
        """Whether it is a call, a loop or a cond whose programs can be walked through."""
        counts = len(self.first_calls), len(self.second_calls)
        if self.name == "cond":
            return counts[0] == counts[1] > 0
        return counts == (1, 1) and len(self.first_calls[0].jaxpr.invars) == len(self.operands)

    def constant_results(self) -> list[SampleValue] | None:
        """Return the results in both programs, if they depend on no input and are small."""
        constants = [value.constants for value in self.operands]
        avals = [aval_of(variable) for variable in self.second.outvars]
        has_keys = any(jnp.issubdtype(aval.dtype, jax.dtypes.extended) for aval in avals)
        size = max((math.prod(aval.shape) for aval in avals), default=0)
        if self.first_calls or None in constants or has_keys or size > _LARGEST_CONSTANT:
            return None
        with jax.ensure_compile_time_eval():
            first = bind(self.first, [c[0] for c in constants if c is not None])
            second = bind(self.second, [c[1] for c in constants if c is not None])
        return [constant_value(*map(np.asarray, both)) for both in zip(first, second, strict=True)]

    def mixed(self, what: str, *, combines: bool = True) -> MixedSamplesError:
        """Return the error that says what the operation does, and in which module."""
        module = equation_module(self.first) or self.program.path
        return MixedSamplesError(f"its {self.name} {what}", module, combines=combines)


def mixed_value(error: MixedSamplesError) -> SampleValue:
    """Return a value that combines samples."""
    return SampleValue("mixed", None, error=error)


def constant_value(first: Any, second: Any) -> SampleValue:
    """Return a value that depends on no input, from its arrays in both programs."""
    return SampleValue("independent", _factor_between(first, second), (first, second))


def is_uniform(array: Any, dim: int) -> bool:
    """Whether an array is the same all along a dim."""
    return np.array_equal(np.take(array, [0] * array.shape[dim], dim), array)


def same_kind(one: SampleValue, other: SampleValue) -> bool:
    """Whether two values depend on samples in the same way."""
    return one.kind == other.kind and same_factor(one.factor, other.factor)


def same_factor(one: float | None, other: float | None) -> bool:
    """Whether two factors are known and equal, up to rounding; nan equals any."""
    if one is None or other is None:
        return False
    return math.isnan(one) or math.isnan(other) or math.isclose(one, other, rel_tol=_ROUNDING)


def _factor_between(first: Any, second: Any) -> float | None:
    """Return the ratio of two constants; nan if both are zero, None if it is not one number."""
    if not first.any() and not second.any():
        return math.nan
    for dim in range(min(first.ndim, second.ndim)):
        if first.shape[dim] != second.shape[dim]:
            if not (is_uniform(first, dim) and is_uniform(second, dim)):
                return None
            first, second = np.take(first, [0], dim), np.take(second, [0], dim)
    if np.array_equal(first, second, equal_nan=True):
        return 1.0
    if first.size != 1 or second.size != 1 or not (first.item() and second.item()):
        return None
    ratio = second.item() / first.item()
    return ratio if isinstance(ratio, float) and ratio > 0 else None
