"""Samples apart: proving that a loss is a mean over samples, which devices can take by themselves.

The loss is traced for two numbers of samples, and both programs are walked side by side. A value
has the samples in one of its dims, is a sum over them, or is the same wherever it is computed; and
it has a factor: how it changes with the number of samples, by which means divide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.errors import Setting, UserError
from meshwright.program.dims import DimClasses, Frame
from meshwright.program.dims.elementwise import FROM_NOTHING, SAME_NUMBERS
from meshwright.program.jaxpr import equations as jaxprs
from meshwright.program.jaxpr.equations import (
    Equation,
    Jaxpr,
    aval_of,
    bind,
    name_stack,
    scan_counts,
)
from meshwright.program.jaxpr.names import module_of

_LINEAR = SAME_NUMBERS | {"broadcast_in_dim", "neg", "reduce_sum", "slice", "stop_gradient"}
"""Operations of one operand whose result grows as it does."""
_PRODUCTS = frozenset({"mul", "dot_general"})
_ALIKE = frozenset({"add", "add_any", "concatenate", "select_n", "sub"})
"""Operations whose operands must have the same factor."""
_LARGEST_CONSTANT = 1 << 16
"""Elements of a constant that is worth computing."""
_ROUNDING = 1e-5
_SYNC = "training.sync_gradients_every"

Kind = Literal["free", "samples", "sum", "mixed"]


@dataclass(frozen=True)
class _Value:
    """What is known of a value.

    Attributes:
        kind: whether it is the same for all samples, has them in a dim, is a sum over them, or
            mixes them in another way.
        factor: the value in the second program over that in the first, of one sample's part or of
            the sum; None if unknown, nan for zero, which fits any.
        constants: the value in both programs, if it depends on nothing.
        own_places: of indices, the columns that hold the place of the sample itself.
        mixed: how it mixes samples.
    """

    kind: Kind
    factor: float | None = 1.0
    constants: tuple[Any, Any] | None = None
    own_places: frozenset[int] = frozenset()
    mixed: _MixedError | None = None


class _MixedError(Exception):
    """Samples meet in an operation, of a module perhaps."""

    def __init__(self, how: str, module: str = "") -> None:
        super().__init__(how)
        self.module = module


def check_mean(first: DimClasses, second: DimClasses, metrics: Sequence[str]) -> None:
    """Refuse a loss that is no mean over samples, nor a ratio of sums over them.

    Args:
        first: the loss of some samples.
        second: the same loss of another number of samples.
        metrics: names of its metrics.
    """
    names = ["the loss", *(f"metric `{name}`" for name in metrics)]
    states = [leaf.path for leaf in first.leaves if leaf.role == "state"]
    found = _Pair(first, second).outputs()
    pairs = zip(names, found[::2], found[1::2], strict=False)
    for name, total, weight in pairs:
        if error := total.mixed or weight.mixed or _not_divided(total, weight):
            raise _refused(name, error)
    for path, value in zip(states, found[2 * len(names) :], strict=True):
        if value.kind != "free" or not _same(value.factor, 1.0):
            raise UserError(
                f"{Setting(_SYNC)} cannot be used: `{path}` depends on the samples of a microbatch",
                why="devices have only their own samples until gradients are reduced",
                fix=f"write {Setting(_SYNC, 1)}",
            )


def _not_divided(total: _Value, weight: _Value) -> _MixedError | None:
    if _same(total.factor, weight.factor):
        return None
    return _MixedError("it is a sum over samples that is not divided by their number")


def _refused(name: str, error: _MixedError) -> UserError:
    if error.module:
        return UserError(
            f"{Setting(_SYNC)} cannot be used: `{error.module}` mixes samples",
            why=f"{error} (as in BatchNorm), and those of a microbatch lie on different devices",
            fix=f"write {Setting(_SYNC, 1)}",
        )
    return UserError(
        f"{Setting(_SYNC)} cannot be used: {name} is no mean over samples",
        why=f"{error}, and devices have only their own samples until gradients are reduced",
        fix="return a mean over samples, or mw.Weighted(total, weight) of sums over them (as for a "
        f"masked mean; a weight of 0 needs no guard); or write {Setting(_SYNC, 1)}",
    )


class _Pair:
    """Two programs of one loss."""

    def __init__(self, first: DimClasses, second: DimClasses) -> None:
        self._first, self._second = first, second
        self._ratio = _num_samples(second) / _num_samples(first)

    def outputs(self) -> list[_Value]:
        """Return what is known of the outputs; totals and weights as sums."""
        roles = [leaf.role for leaf in self._first.leaves]
        inputs = [_Value("samples" if role == "batch" else "free") for role in roles]
        found = self._run(self._first.root, self._second.root, inputs)
        count = len(found) - roles.count("state")
        sums = [replace(value, factor=self._growth(value)) for value in found[:count]]
        return [*sums, *found[count:]]

    def _growth(self, value: _Value) -> float | None:
        """Return how a value grows if it is added up over devices, which repeat what is free."""
        if value.kind == "sum" or value.factor is None:
            return value.factor
        return value.factor / self._ratio

    def _run(self, first: Frame, second: Frame, inputs: Sequence[_Value]) -> list[_Value]:
        known: dict[Any, _Value] = dict(zip(first.jaxpr.invars, inputs, strict=True))
        known |= {variable: _Value("free") for variable in first.jaxpr.constvars}
        differs = _where_they_part(first.jaxpr, second.jaxpr)
        for number, eqn in enumerate(first.jaxpr.eqns):
            if differs is not None and number >= differs:
                error = _MixedError("which operations there are depends on the number of samples")
                results = [_mixed(error) for _ in eqn.outvars]
            else:
                other = second.jaxpr.eqns[number]
                pairs = zip(eqn.invars, other.invars, strict=True)
                operands = [self._read(known, *atoms) for atoms in pairs]
                frames = first.calls.get(number, ()), second.calls.get(number, ())
                results = self._equation(_Call(first, number, eqn, other, operands, *frames))
            known.update(zip(eqn.outvars, results, strict=True))
        ends = zip(first.jaxpr.outvars, second.jaxpr.outvars, strict=True)
        return [self._read(known, *atoms) for atoms in ends]

    def _read(self, known: dict[Any, _Value], atom: Any, other: Any) -> _Value:
        if not isinstance(atom, jaxprs.Literal):
            return known[atom]
        theirs = other.val if isinstance(other, jaxprs.Literal) else np.nan
        return _constant(np.asarray(atom.val), np.asarray(theirs))

    def _kind_by_dims(self, frame: Frame, variable: Any) -> Kind:
        return "samples" if self._sample_dims(frame, variable) else "free"

    def _sample_dims(self, frame: Frame, variable: Any) -> list[int]:
        batch = self._first.batch
        dims = enumerate(frame.dims(variable))
        return [n for n, atoms in dims if any(atom.id in batch for atom in atoms)]

    def _mixes(self, call: _Call) -> bool:
        """Whether an operation works across samples."""
        events = (self._first.events[n] for n in call.frame.noted.get(call.number, ()))
        return any(e.kind != "spread" and e.classes & self._first.batch for e in events)

    def _equation(self, call: _Call) -> list[_Value]:
        try:
            return self._results(call)
        except _MixedError as error:
            return [_mixed(error) for _ in call.eqn.outvars]

    def _results(self, call: _Call) -> list[_Value]:
        kinds = frozenset[Kind](value.kind for value in call.operands)
        if not call.eqn.outvars:
            return []
        if call.can_be_entered:
            return self._called(call)
        for value in call.operands:
            if value.mixed is not None:
                raise value.mixed
        if kinds <= {"free"}:
            return self._free(call)
        if call.frames and (self._mixes(call) or "sum" in kinds):
            raise call.mixed("works across samples")
        if "sum" in kinds:
            return [self._of_sums(call, kinds)]
        if self._mixes(call):
            return [self._across(call)]
        return [self._of_samples(call, variable) for variable in call.eqn.outvars]

    def _free(self, call: _Call) -> list[_Value]:
        """Values that depend on no sample: constants, or what follows from the weights."""
        name, variables = call.eqn.primitive.name, call.eqn.outvars
        if name in FROM_NOTHING and name != "iota":
            found = [_Value(self._kind_by_dims(call.frame, v)) for v in variables]
            if name != "random_bits" and any(value.kind == "samples" for value in found):
                # What is drawn with them is not what each device finds in its part of the draw.
                raise call.mixed("makes a random key for each sample")
            return found
        if (found := call.constants()) is not None:
            return found
        if name == "iota":
            counted = call.eqn.params["dimension"] in self._sample_dims(call.frame, variables[0])
            return [_Value("free", None if counted else 1.0)]
        try:
            factor = None if self._mixes(call) else self._factor(call)
        except _MixedError:
            # Nothing is wrong with it unless something is computed with it.
            factor = None
        return [_Value("free", factor) for _ in variables]

    def _factor(self, call: _Call) -> float:
        """Return the factor of an operation's results; all are 1 where it is not linear."""
        name, factors = call.eqn.primitive.name, [value.factor for value in call.operands]
        if None in factors:
            raise call.mixed("uses what depends on the number of samples")
        known = [f for f in factors if f is not None]
        if name in _LINEAR:
            return known[0]
        if name in _PRODUCTS:
            return math.prod(known)
        if name == "div":
            return known[0] / known[1]
        alike = known[1:] if name == "select_n" else known
        if name in _ALIKE and all(_same(alike[0], f) for f in alike):
            return next((f for f in alike if not math.isnan(f)), math.nan)
        if all(_same(f, 1.0) for f in known):
            return 1.0
        raise call.mixed("uses what depends on the number of samples")

    def _of_samples(self, call: _Call, variable: Any) -> _Value:
        """Return a result of operands that have samples, which the operation keeps apart."""
        for value, atom in zip(call.operands, call.eqn.invars, strict=True):
            if value.kind == "free" and not isinstance(atom, jaxprs.Literal):
                self._check_uniform(call, value, self._sample_dims(call.frame, atom))
        dims = self._sample_dims(call.frame, variable)
        if not dims:
            # To lose the samples, something would have had to work across them.
            return _Value("free", self._factor(call))
        if len(dims) > 1:
            raise call.mixed("brings samples together")
        if places := self._own_places(call):
            return _Value("samples", own_places=places)
        return _Value("samples", self._factor(call))

    def _check_uniform(self, call: _Call, value: _Value, dims: Sequence[int]) -> None:
        """Refuse values made from nothing that differ from sample to sample."""
        if not dims or value.constants is None or call.eqn.primitive.name == "concatenate":
            return
        if not _uniform(value.constants[0], dims[0]):
            raise call.mixed("uses the place of a sample in the batch")

    def _own_places(self, call: _Call) -> frozenset[int]:
        """Return the columns of joined indices that count samples."""
        if call.eqn.primitive.name != "concatenate":
            kept = call.eqn.primitive.name in ("convert_element_type", "copy")
            return call.operands[0].own_places if kept else frozenset()
        axis, start, found = call.eqn.params["dimension"], 0, set[int]()
        for value, atom in zip(call.operands, call.eqn.invars, strict=True):
            shape, dims = aval_of(atom).shape, self._sample_dims(call.frame, atom)
            if value.kind == "free" and dims and value.constants is not None:
                counted = np.moveaxis(value.constants[0], dims[0], -1)
                if shape[axis] != 1 or (counted != np.arange(shape[dims[0]])).any():
                    raise call.mixed("uses the place of a sample in the batch")
                found.add(start)
            start += shape[axis]
        return frozenset(found)

    def _across(self, call: _Call) -> _Value:
        """Return the result of an operation that works across samples: a sum, or none is known."""
        name = call.eqn.primitive.name
        dims = self._sample_dims(call.frame, call.eqn.outvars[0])
        if name in ("reduce_sum", "dot_general") and not dims:
            return _Value("sum", self._factor(call))
        if name == "gather" and len(dims) == 1 and self._reads_own(call):
            return _Value("samples", call.operands[0].factor)
        raise call.mixed("works across samples")

    def _reads_own(self, call: _Call) -> bool:
        """Whether each sample looks up its own row."""
        numbers = call.eqn.params["dimension_numbers"]
        dims = self._sample_dims(call.frame, call.eqn.invars[0])
        looked_up = [numbers.start_index_map[n] for n in call.operands[1].own_places]
        return len(dims) == 1 and dims == looked_up and dims[0] in numbers.collapsed_slice_dims

    def _of_sums(self, call: _Call, kinds: frozenset[Kind]) -> _Value:
        """Return the result of an operation on sums over samples, which must keep them sums."""
        name, values = call.eqn.primitive.name, call.operands
        sums = [value for value in values if value.kind == "sum"]
        if "samples" in kinds:
            raise call.mixed("brings a sum over samples and samples together")
        if name in _ALIKE:
            chosen_by = values[: name == "select_n"]
            if any(value.kind == "sum" for value in chosen_by):
                raise call.mixed("chooses by a sum over samples")
            grown = [replace(v, factor=self._growth(v)) for v in values[len(chosen_by) :]]
            if not all(_same(grown[0].factor, value.factor) for value in grown):
                raise call.mixed("joins a sum over samples with what is none")
            return _Value("sum", self._factor(replace(call, operands=[*chosen_by, *grown])))
        divided = name == "div" and values[0].kind == "sum" and len(sums) == 1
        if name in _LINEAR or divided or (name in _PRODUCTS and len(sums) == 1):
            return _Value("sum", self._factor(call))
        raise call.mixed("is computed from a sum over all samples")

    def _called(self, call: _Call) -> list[_Value]:
        """Walk through a call or a loop."""
        if call.eqn.primitive.name == "cond":
            if call.operands[0].kind != "free":
                raise call.operands[0].mixed or call.mixed("works across samples")
            pairs = zip(call.frames, call.other_frames, strict=True)
            first, *rest = (self._run(*pair, call.operands[1:]) for pair in pairs)
            if all(_alike(a, b) for others in rest for a, b in zip(first, others, strict=True)):
                return first
            raise call.mixed("works across samples")
        frames = call.frames[0], call.other_frames[0]
        if call.eqn.primitive.name != "scan":
            return self._run(*frames, call.operands)
        num_consts, num_carry = scan_counts(call.eqn)
        rows = num_consts + num_carry
        for value, atom in zip(call.operands[rows:], call.eqn.invars[rows:], strict=True):
            if value.kind == "samples" and 0 in self._sample_dims(call.frame, atom):
                raise call.mixed("runs over samples")
        operands = [replace(value, constants=None) for value in call.operands]
        mixed: _MixedError | None = None
        # What is carried is zero before the first sum is added to it.
        for _ in range(3):
            results = self._run(*frames, operands)
            before, operands[num_consts:rows] = operands[num_consts:rows], results[:num_carry]
            if all(map(_alike, before, results)):
                return results
            # What differs from turn to turn may do so for a reason.
            mixed = next((value.mixed for value in results if value.mixed), None)
        if mixed is not None:
            raise mixed
        raise call.mixed("changes what it carries")


@dataclass(frozen=True)
class _Call:
    """One equation, in both programs."""

    frame: Frame
    number: int
    eqn: Equation
    other: Equation
    operands: Sequence[_Value]
    frames: tuple[Frame, ...]
    other_frames: tuple[Frame, ...]

    def constants(self) -> list[_Value] | None:
        """Return the results in both programs, if they depend on nothing and are small."""
        given = [value.constants for value in self.operands]
        avals = [aval_of(variable) for variable in self.other.outvars]
        keys = any(jnp.issubdtype(aval.dtype, jax.dtypes.extended) for aval in avals)
        size = max((math.prod(aval.shape) for aval in avals), default=0)
        if self.frames or None in given or keys or size > _LARGEST_CONSTANT:
            return None
        with jax.ensure_compile_time_eval():
            ours = bind(self.eqn, [c[0] for c in given if c is not None])
            theirs = bind(self.other, [c[1] for c in given if c is not None])
        return [_constant(*map(np.asarray, both)) for both in zip(ours, theirs, strict=True)]

    @property
    def can_be_entered(self) -> bool:
        """Whether it is a call, a loop or a branch whose programs can be walked through."""
        counts = len(self.frames), len(self.other_frames)
        if self.eqn.primitive.name == "cond":
            return counts[0] == counts[1] > 0
        return counts == (1, 1) and len(self.frames[0].jaxpr.invars) == len(self.operands)

    def mixed(self, what: str) -> _MixedError:
        module = module_of(name_stack(self.eqn)) or self.frame.path
        return _MixedError(f"its {self.eqn.primitive.name} {what}", module)


def _mixed(error: _MixedError) -> _Value:
    return _Value("mixed", None, mixed=error)


def _where_they_part(first: Jaxpr, second: Jaxpr) -> int | None:
    """Return the number of the first equation that is another operation; None if all are alike."""
    for number, (a, b) in enumerate(zip(first.eqns, second.eqns, strict=False)):
        if a.primitive is not b.primitive or len(a.invars) != len(b.invars):
            return number
    shorter = min(len(first.eqns), len(second.eqns))
    return shorter if shorter < len(first.eqns) else None


def _num_samples(classes: DimClasses) -> int:
    return next(leaf.shape[0] for leaf in classes.leaves if leaf.role == "batch" and leaf.shape)


def _constant(ours: Any, theirs: Any) -> _Value:
    return _Value("free", _quotient(ours, theirs), (ours, theirs))


def _quotient(ours: Any, theirs: Any) -> float | None:
    """Return the number by which one constant is the other; nan for zeros, None for no number."""
    if not ours.any() and not theirs.any():
        return math.nan
    for dim in range(min(ours.ndim, theirs.ndim)):
        if ours.shape[dim] != theirs.shape[dim]:
            if not (_uniform(ours, dim) and _uniform(theirs, dim)):
                return None
            ours, theirs = np.take(ours, [0], dim), np.take(theirs, [0], dim)
    if np.array_equal(ours, theirs, equal_nan=True):
        return 1.0
    if ours.size != 1 or theirs.size != 1 or not (ours.item() and theirs.item()):
        return None
    ratio = theirs.item() / ours.item()
    return ratio if isinstance(ratio, float) and ratio > 0 else None


def _uniform(array: Any, dim: int) -> bool:
    """Whether an array is the same all along a dim."""
    return np.array_equal(np.take(array, [0] * array.shape[dim], dim), array)


def _alike(before: _Value, after: _Value) -> bool:
    return before.kind == after.kind and _same(before.factor, after.factor)


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return False
    return math.isnan(one) or math.isnan(other) or math.isclose(one, other, rel_tol=_ROUNDING)
