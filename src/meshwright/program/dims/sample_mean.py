"""Checking that a loss is a mean over samples, so that devices can compute it for their own.

The loss is traced for two numbers of samples, and both programs are walked side by side. Each value
gets a kind (per sample, a sum over samples, or independent of them) and a factor: how it changes
with the number of samples, which a mean divides by.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshwright.errors import Setting, UserError
from meshwright.program.dims.classes import DimClasses
from meshwright.program.dims.elementwise import FROM_NOTHING, SAME_NUMBERS
from meshwright.program.dims.sample_values import (
    EquationPair,
    Kind,
    MixedSamplesError,
    SampleValue,
    constant_value,
    is_uniform,
    mixed_value,
    same_factor,
    same_kind,
)
from meshwright.program.dims.walk import ProgramDims
from meshwright.program.jaxpr.equations import Jaxpr, Literal, aval_of, scan_counts

_LINEAR = SAME_NUMBERS | {"broadcast_in_dim", "neg", "reduce_sum", "slice", "stop_gradient"}
"""Operations whose result has the factor of their first operand."""
_PRODUCTS = frozenset({"mul", "dot_general"})
_SAME_FACTOR = frozenset({"add", "add_any", "concatenate", "select_n", "sub"})
"""Operations whose operands must have the same factor."""


class ProgramPair:
    """The programs of one loss for two numbers of samples."""

    def __init__(self, first: DimClasses, second: DimClasses) -> None:
        self._first, self._second = first, second
        self._ratio = _num_samples(second) / _num_samples(first)

    def outputs(self, num_sums: int) -> list[SampleValue]:
        """Return what is known about the outputs; the first ones as sums over devices."""
        roles = [leaf.role for leaf in self._first.leaves]
        inputs = [SampleValue("per_sample" if r == "batch" else "independent") for r in roles]
        outputs = self._walk(self._first.root, self._second.root, inputs)
        sums = [replace(value, factor=self._sum_factor(value)) for value in outputs[:num_sums]]
        return [*sums, *outputs[num_sums:]]

    def _sum_factor(self, value: SampleValue) -> float | None:
        """Return a value's factor in a sum over devices, all of which add independent values."""
        if value.kind == "sum" or value.factor is None:
            return value.factor
        return value.factor / self._ratio

    def _walk(
        self, first: ProgramDims, second: ProgramDims, inputs: Sequence[SampleValue]
    ) -> list[SampleValue]:
        """Return what is known about the results of a program."""
        known: dict[Any, SampleValue] = dict(zip(first.jaxpr.invars, inputs, strict=True))
        known |= {variable: SampleValue("independent") for variable in first.jaxpr.constvars}
        different = _first_different_operation(first.jaxpr, second.jaxpr)
        for number, eqn in enumerate(first.jaxpr.eqns):
            if different is not None and number >= different:
                error = MixedSamplesError("its operations depend on the number of samples")
                results = [mixed_value(error) for _ in eqn.outvars]
            else:
                other = second.jaxpr.eqns[number]
                pairs = zip(eqn.invars, other.invars, strict=True)
                operands = [_read(known, *atoms) for atoms in pairs]
                programs = first.calls.get(number, ()), second.calls.get(number, ())
                results = self._equation(
                    EquationPair(first, number, eqn, other, operands, *programs)
                )
            known.update(zip(eqn.outvars, results, strict=True))
        outputs = zip(first.jaxpr.outvars, second.jaxpr.outvars, strict=True)
        return [_read(known, *atoms) for atoms in outputs]

    def _equation(self, pair: EquationPair) -> list[SampleValue]:
        try:
            return self._results(pair)
        except MixedSamplesError as error:
            return [mixed_value(error) for _ in pair.first.outvars]

    def _results(self, pair: EquationPair) -> list[SampleValue]:
        kinds = frozenset[Kind](value.kind for value in pair.operands)
        if not pair.first.outvars:
            return []
        if pair.can_be_entered:
            return self._enter(pair)
        for value in pair.operands:
            if value.error is not None:
                raise value.error
        if kinds <= {"independent"}:
            return self._of_independent(pair)
        combines = self._first.combines_samples(pair.program, pair.number)
        if pair.first_calls and (combines or "sum" in kinds):
            raise pair.mixed("combines samples")
        if "sum" in kinds:
            return [self._of_sums(pair, kinds)]
        if combines:
            return [self._combined(pair)]
        return [self._of_samples(pair, variable) for variable in pair.first.outvars]

    def _of_independent(self, pair: EquationPair) -> list[SampleValue]:
        """Return results that depend on no sample: constants, or functions of the weights."""
        variables = pair.first.outvars
        if pair.name in FROM_NOTHING and pair.name != "iota":
            dims = [self._first.sample_dims(pair.program, v) for v in variables]
            results = [SampleValue("per_sample" if own else "independent") for own in dims]
            if pair.name != "random_bits" and any(r.kind == "per_sample" for r in results):
                # A device that makes keys for its samples alone would draw other numbers.
                raise pair.mixed("makes a random key for each sample", combines=False)
            return results
        if (results := pair.constant_results()) is not None:
            return results
        if pair.name == "iota":
            dim = pair.first.params["dimension"]
            counts_samples = dim in self._first.sample_dims(pair.program, variables[0])
            return [SampleValue("independent", None if counts_samples else 1.0)]
        combines = self._first.combines_samples(pair.program, pair.number)
        try:
            factor = None if combines else self._factor(pair)
        except MixedSamplesError:
            # Not an error unless something is computed with it.
            factor = None
        return [SampleValue("independent", factor) for _ in variables]

    def _factor(self, pair: EquationPair) -> float:
        """Return the factor of an operation's results; 1 if all operands have 1."""
        factors = [value.factor for value in pair.operands]
        if None in factors:
            raise pair.mixed("uses a value that depends on the number of samples")
        known = [f for f in factors if f is not None]
        if pair.name in _LINEAR:
            return known[0]
        if pair.name in _PRODUCTS:
            return math.prod(known)
        if pair.name == "div":
            return known[0] / known[1]
        same = known[1:] if pair.name == "select_n" else known
        if pair.name in _SAME_FACTOR and all(same_factor(same[0], f) for f in same):
            return next((f for f in same if not math.isnan(f)), math.nan)
        if all(same_factor(f, 1.0) for f in known):
            return 1.0
        raise pair.mixed("uses a value that depends on the number of samples")

    def _of_samples(self, pair: EquationPair, variable: Any) -> SampleValue:
        """Return the result of an operation that treats each sample by itself."""
        for value, atom in zip(pair.operands, pair.first.invars, strict=True):
            if value.kind == "independent" and not isinstance(atom, Literal):
                _check_uniform(pair, value, self._first.sample_dims(pair.program, atom))
        dims = self._first.sample_dims(pair.program, variable)
        if not dims:
            # The operation combines no samples, so a result without samples depends on none.
            return SampleValue("independent", self._factor(pair))
        if len(dims) > 1:
            raise pair.mixed("combines samples")
        if columns := self._position_columns(pair):
            return SampleValue("per_sample", position_columns=columns)
        return SampleValue("per_sample", self._factor(pair))

    def _position_columns(self, pair: EquationPair) -> frozenset[int]:
        """Return the columns of concatenated indices that hold each sample's position."""
        if pair.name != "concatenate":
            is_copy = pair.name in ("convert_element_type", "copy")
            return pair.operands[0].position_columns if is_copy else frozenset()
        axis, start, columns = pair.first.params["dimension"], 0, set[int]()
        for value, atom in zip(pair.operands, pair.first.invars, strict=True):
            shape, dims = aval_of(atom).shape, self._first.sample_dims(pair.program, atom)
            if value.kind == "independent" and dims and value.constants is not None:
                positions = np.moveaxis(value.constants[0], dims[0], -1)
                if shape[axis] != 1 or (positions != np.arange(shape[dims[0]])).any():
                    raise pair.mixed("uses the position of a sample in the batch", combines=False)
                columns.add(start)
            start += shape[axis]
        return frozenset(columns)

    def _combined(self, pair: EquationPair) -> SampleValue:
        """Return the result of an operation across samples: a sum, or each sample's own row."""
        dims = self._first.sample_dims(pair.program, pair.first.outvars[0])
        if pair.name in ("reduce_sum", "dot_general") and not dims:
            return SampleValue("sum", self._factor(pair))
        if pair.name == "gather" and len(dims) == 1 and self._looks_up_own_row(pair):
            return SampleValue("per_sample", pair.operands[0].factor)
        raise pair.mixed("combines samples")

    def _looks_up_own_row(self, pair: EquationPair) -> bool:
        numbers = pair.first.params["dimension_numbers"]
        dims = self._first.sample_dims(pair.program, pair.first.invars[0])
        looked_up = [numbers.start_index_map[n] for n in pair.operands[1].position_columns]
        return len(dims) == 1 and dims == looked_up and dims[0] in numbers.collapsed_slice_dims

    def _of_sums(self, pair: EquationPair, kinds: frozenset[Kind]) -> SampleValue:
        """Return the result of an operation on sums over samples, which must again be a sum."""
        name, values = pair.name, pair.operands
        sums = [value for value in values if value.kind == "sum"]
        if "per_sample" in kinds:
            raise pair.mixed("combines a sum over samples with single samples")
        if name in _SAME_FACTOR:
            selector = values[: name == "select_n"]
            if any(value.kind == "sum" for value in selector):
                raise pair.mixed("selects by a sum over samples")
            terms = [replace(v, factor=self._sum_factor(v)) for v in values[len(selector) :]]
            if not all(same_factor(terms[0].factor, term.factor) for term in terms):
                raise pair.mixed("combines a sum over samples with other values")
            return SampleValue("sum", self._factor(replace(pair, operands=[*selector, *terms])))
        divided = name == "div" and values[0].kind == "sum" and len(sums) == 1
        if name in _LINEAR or divided or (name in _PRODUCTS and len(sums) == 1):
            return SampleValue("sum", self._factor(pair))
        raise pair.mixed("is not linear in a sum over samples")

    def _enter(self, pair: EquationPair) -> list[SampleValue]:
        """Walk through a call, a cond or a loop."""
        if pair.name == "cond":
            return self._enter_cond(pair)
        if pair.name == "scan":
            return self._enter_scan(pair)
        return self._walk(pair.first_calls[0], pair.second_calls[0], pair.operands)

    def _enter_cond(self, pair: EquationPair) -> list[SampleValue]:
        if pair.operands[0].kind != "independent":
            raise pair.operands[0].error or pair.mixed("combines samples")
        programs = zip(pair.first_calls, pair.second_calls, strict=True)
        first, *rest = (self._walk(*both, pair.operands[1:]) for both in programs)
        if all(same_kind(a, b) for others in rest for a, b in zip(first, others, strict=True)):
            return first
        raise pair.mixed("combines samples")

    def _enter_scan(self, pair: EquationPair) -> list[SampleValue]:
        num_consts, num_carry = scan_counts(pair.first)
        stop = num_consts + num_carry
        for value, atom in zip(pair.operands[stop:], pair.first.invars[stop:], strict=True):
            if value.kind == "per_sample" and 0 in self._first.sample_dims(pair.program, atom):
                raise pair.mixed("loops over samples")
        operands = [replace(value, constants=None) for value in pair.operands]
        error: MixedSamplesError | None = None
        # Repeated, because a carry is zero before the first sum is added to it.
        for _ in range(3):
            results = self._walk(pair.first_calls[0], pair.second_calls[0], operands)
            before, operands[num_consts:stop] = operands[num_consts:stop], results[:num_carry]
            if all(map(same_kind, before, results)):
                return results
            # If samples were combined inside, that is the better message.
            error = next((value.error for value in results if value.error), None)
        if error is not None:
            raise error
        raise pair.mixed("changes how its carry depends on samples")


def _read(known: dict[Any, SampleValue], atom: Any, other: Any) -> SampleValue:
    if not isinstance(atom, Literal):
        return known[atom]
    second = other.val if isinstance(other, Literal) else np.nan
    return constant_value(np.asarray(atom.val), np.asarray(second))


def _check_uniform(pair: EquationPair, value: SampleValue, dims: Sequence[int]) -> None:
    """Refuse constants that differ from sample to sample."""
    if not dims or value.constants is None or pair.name == "concatenate":
        return
    if not is_uniform(value.constants[0], dims[0]):
        raise pair.mixed("uses the position of a sample in the batch", combines=False)


def _first_different_operation(first: Jaxpr, second: Jaxpr) -> int | None:
    """Return the number of the first equation that is another operation; None if none is."""
    for number, (a, b) in enumerate(zip(first.eqns, second.eqns, strict=False)):
        if a.primitive is not b.primitive or len(a.invars) != len(b.invars):
            return number
    shorter = min(len(first.eqns), len(second.eqns))
    return shorter if shorter < len(first.eqns) else None


def _num_samples(classes: DimClasses) -> int:
    return next(leaf.shape[0] for leaf in classes.leaves if leaf.role == "batch" and leaf.shape)


_SYNC = "training.sync_gradients_every"


def find_mixing(classes: DimClasses) -> MixedSamplesError | None:
    """Return where a loss treats samples other than one by one or by sums; None if it does not.

    One trace is enough for that. Whether sums are divided by the number of samples is not looked
    at, which takes two (`check_mean`).
    """
    total, weight = ProgramPair(classes, classes).outputs(2)[:2]
    return total.error or weight.error


def check_mean(
    first: DimClasses, second: DimClasses, metrics: Sequence[str], kept: Sequence[str]
) -> None:
    """Refuse a loss that is neither a mean over samples nor a ratio of sums over them.

    ``first`` and ``second`` are the same loss of two numbers of samples. Its outputs end with the
    new values of the leaves at the paths ``kept``.
    """
    names = ["the loss", *(f"metric `{name}`" for name in metrics)]
    outputs = ProgramPair(first, second).outputs(2 * len(names))
    for name, total, weight in zip(names, outputs[::2], outputs[1::2], strict=False):
        if error := _ratio_problem(total, weight):
            raise _refusal(name, error)
    for path, value in zip(kept, outputs[2 * len(names) :], strict=True):
        if value.kind != "independent" or not same_factor(value.factor, 1.0):
            raise UserError(
                f"{Setting(_SYNC)} cannot be used: `{path}` depends on the samples of a microbatch",
                why="until gradients are reduced, each device has only its own samples",
                fix=f"write {Setting(_SYNC, 1)}",
            )


def has_weight(classes: DimClasses) -> bool:
    """Whether a loss is divided by a weight that is a sum over samples, as in `mw.Weighted`."""
    return ProgramPair(classes, classes).outputs(2)[1].kind == "sum"


def mean_problem(first: DimClasses, second: DimClasses) -> MixedSamplesError | None:
    """Return why a loss is no mean over samples; None if it is one, or a ratio of sums over them.

    ``first`` and ``second`` are the same loss of two numbers of samples.
    """
    return _ratio_problem(*ProgramPair(first, second).outputs(2)[:2])


def _ratio_problem(total: SampleValue, weight: SampleValue) -> MixedSamplesError | None:
    if error := total.error or weight.error:
        return error
    if same_factor(total.factor, weight.factor):
        return None
    return MixedSamplesError("it is a sum over samples that is not divided by their number")


def _refusal(name: str, error: MixedSamplesError) -> UserError:
    if error.module:
        return UserError(
            f"{Setting(_SYNC)} cannot be used: `{error.module}` mixes samples",
            why=f"{error} (as in BatchNorm), and those of a microbatch are on different devices",
            fix=f"write {Setting(_SYNC, 1)}",
        )
    return UserError(
        f"{Setting(_SYNC)} cannot be used: {name} is not a mean over samples",
        why=f"{error}, and until gradients are reduced, each device has only its own samples",
        fix="return a mean over samples, or mw.Weighted(total, weight) of sums over them (as for a "
        f"masked mean; a weight of 0 needs no guard); or write {Setting(_SYNC, 1)}",
    )
