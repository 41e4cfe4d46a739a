"""A decoder's program, traced for several lengths that must differ in nothing but their shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.errors import typed_line
from meshwright.generation.positions import NotIncremental
from meshwright.generation.shared_operands import share_operands
from meshwright.generation.token_decoder import COUNT, SplitModel
from meshwright.program.dims.op import primitives
from meshwright.program.dims.walk import ProgramDims
from meshwright.program.evaluate.dependencies import inlined
from meshwright.program.evaluate.evaluator import Environment, entering, unroll_scan
from meshwright.program.jaxpr.equations import (
    CUSTOM_DERIVATIVES,
    REMATS,
    Atom,
    ClosedJaxpr,
    Equation,
    Literal,
    Value,
    Var,
    aval_of,
)
from meshwright.program.kernels.fused_attention import (
    check_cudnn,
    make_attend,
    pays_in_parts,
    run_attention,
)
from meshwright.program.kernels.match_attention import makes_weights, match_attention
from meshwright.program.kernels.regions import NotReplaced
from meshwright.program.kernels.surroundings import Scope
from meshwright.text.units import counted


class PromptAttention(NamedTuple):
    """An attention of a program: its operands, its result, and what computes it for all rows."""

    operands: tuple[Var, ...]
    output: Var
    run: Callable[..., Value]


def find_attention(closed: ClosedJaxpr, kernel: str) -> list[PromptAttention]:
    """Return the attentions of a program that this kernel computes; none if it is empty."""
    found: list[PromptAttention] = []
    if not kernel:
        return found
    consts = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    scope = Scope(ProgramDims(closed.jaxpr, "", 1), consts)
    for end in makes_weights(scope.graph):
        with suppress(NotReplaced):
            # Masks are evaluated, also while a function that reads prompts is traced.
            with jax.ensure_compile_time_eval():
                match = match_attention(scope, end)
            if match is None or (match.operands.leaves and not match.operands.function):
                continue
            own = match.operands
            if kernel == "cudnn" and own.function is None:
                check_cudnn(own, "gpu")
            elif kernel == "cudnn" and not pays_in_parts(own):
                continue
            attend = make_attend(own, "xla" if own.function else kernel)
            run = partial(run_attention, own, attend)
            found.append(PromptAttention(own.inputs, match.output, run))
    return found


SHORT = 61
"""Positions of the short program: a number that is hardly the size of another dim."""
SHORT_CHUNKS = 5
"""Chunks of the short program, for a model that works in chunks."""
_SIZES = primitives(
    """
    shape new_sizes sizes limit_indices start_indices slice_sizes length padding_config padding
    sharding strides
    """
)
"""Parameters of operations that follow from the shapes of their operands and results."""
_UNROLLED = 256
"""Turns of a loop that is unrolled, at most."""
_CUSTOM = CUSTOM_DERIVATIVES | {"custom_vjp_call_jaxpr"}


class OtherOperations(NotIncremental):
    """A model runs other operations for another length."""


class TracedDecoder:
    """A model's program for rows of any length.

    Args:
        model: the model, with values or their shapes.
        length: the most tokens of a row.
        chunk: the model divides positions into chunks of so many.
        divided: whether devices have parts of weights; then those of one input are not joined.
        kernel: what computes attention over whole prompts; empty for the model's own operations.

    Attributes:
        short: the program for few positions; what is known of the program is found here.
    """

    def __init__(
        self,
        model: SplitModel,
        length: int,
        chunk: int = 1,
        *,
        divided: bool = False,
        kernel: str = "",
    ) -> None:
        # Programs are kept for other calls, weights are not.
        self._model, self.chunk, self.num_sources = model.shapes, chunk, len(model.source)
        self.divided, self._kernel = divided, kernel
        self._attention: dict[int, list[PromptAttention]] = {}
        self._loops: list[bool] = []
        short = SHORT if length > SHORT else length - 1
        if chunk > 1:
            short = chunk * (SHORT_CHUNKS + 2 * (length == chunk * SHORT_CHUNKS))
        if short < 4:
            raise NotIncremental(f"{length} tokens are too few to tell positions from other dims")
        self.short = self._trace(short, Loops(short, self._loops, chunk=chunk))
        self._programs: dict[int, ClosedJaxpr] = {}

    def of_length(self, length: int) -> ClosedJaxpr:
        """Return the program for a length; raises `NotIncremental` if it is another one."""
        if length not in self._programs:
            program = self._trace(length, Loops(length, self._loops, again=True))
            _compare(self.short, program)
            self._programs[length] = program
        return self._programs[length]

    def like(self, length: int) -> dict[int, Equation]:
        """Return, by `id` of an equation of the short program, that of a length."""
        eqns = self.of_length(length).jaxpr.eqns
        return dict(zip(map(id, self.short.jaxpr.eqns), eqns, strict=True))

    def attention(self, length: int) -> dict[Var, PromptAttention]:
        """Return, by variable of the short program, what kernels compute in that of a length."""
        programs = self.of_length(length).jaxpr, self.short.jaxpr
        made = ([v for eqn in p.eqns for v in eqn.outvars] for p in programs)
        pairs = ([*p.constvars, *p.invars, *own] for p, own in zip(programs, made, strict=True))
        names = dict(zip(*pairs, strict=True))
        return {
            names[one.output]: one._replace(operands=tuple(names[v] for v in one.operands))
            for one in self._attention[length]
        }

    def of_weights(self, length: int) -> set[Var]:
        """Return the variables of the short program that are made of weights alone.

        What is made of no weight either, such as frequencies, is left to compilers, which see that
        it is the same in all blocks.
        """
        short, long = self.short.jaxpr, self.of_length(length).jaxpr
        found = set(short.invars[: -1 - self.num_sources])
        pairs = zip(short.constvars, long.constvars, strict=True)
        constant = {a for a, b in pairs if aval_of(a).shape == aval_of(b).shape}
        for eqn, other in zip(short.eqns, long.eqns, strict=True):
            read = {a for a in eqn.invars if not isinstance(a, Literal)}
            shapes = [[aval_of(v).shape for v in each.outvars] for each in (eqn, other)]
            if not read <= found | constant or shapes[0] != shapes[1]:
                continue
            (found if read & found else constant).update(eqn.outvars)
        return found

    def _trace(self, length: int, loops: Loops) -> ClosedJaxpr:
        flat = trace_row(self._model, length, loops)
        found = find_attention(flat, self._kernel)
        read = [v for one in found for v in (*one.operands, one.output)]
        count = len(self._model.weights)
        shared = share_operands(flat, 0 if self.divided else count, also=read)
        # What attention reads and makes is returned too, to know its variables in this program.
        names = iter(shared.jaxpr.outvars[len(shared.jaxpr.outvars) - len(read) :])
        self._attention[length] = [
            one._replace(operands=tuple(islice(names, len(one.operands))), output=next(names))
            for one in found
        ]
        return shared


def trace_row(model: SplitModel, length: int, loops: Loops) -> ClosedJaxpr:
    """Return a model's program for one row, without calls and short loops."""
    structs = [*model.shapes.weights, *model.source, jax.ShapeDtypeStruct((1, length), jnp.int32)]
    try:
        traced = jax.make_jaxpr(lambda *args: model.logits_of(args[:-1], args[-1]))(*structs)
    except Exception as error:
        said = f"called with {counted(length, 'token')}, the model raises {typed_line(error)}"
        raise NotIncremental(said) from error
    return inlined(traced, [entering(_CUSTOM | REMATS), loops])


class Loops:
    """Unrolls loops over anything but positions, such as a model's blocks.

    Args:
        length: the number of positions.
        found: for each loop in order, whether it is unrolled; filled by the first trace.
        again: whether to do as the first trace did.
        chunk: loops over chunks of so many positions are over positions.
    """

    def __init__(
        self, length: int, found: list[bool], *, again: bool = False, chunk: int = 1
    ) -> None:
        self._over, self._found = (length, length // chunk), found
        self._again = iter(list(found)) if again else None

    def __call__(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Return the results of a loop that is unrolled."""
        if eqn.primitive.name != "scan":
            return None
        count = eqn.params["length"]
        unrolled = count not in self._over and count <= _UNROLLED
        if self._again is None:
            self._found.append(unrolled)
        else:
            unrolled = next(self._again, False)
        return unroll_scan(eqn, env) if unrolled else None


def _compare(short: ClosedJaxpr, long: ClosedJaxpr) -> None:
    if len(short.jaxpr.eqns) != len(long.jaxpr.eqns):
        raise OtherOperations("the model runs other operations for another number of tokens")
    names: dict[Var, Var] = {}
    for one, other in zip(short.jaxpr.eqns, long.jaxpr.eqns, strict=True):
        if not _alike(one, other, names):
            raise NotIncremental.by(one, COUNT)
        names.update(zip(one.outvars, other.outvars, strict=True))
    for one, other in zip(short.consts, long.consts, strict=True):
        if not _same_start(np.asarray(one), np.asarray(other)):
            raise NotIncremental(f"the model has a constant that {COUNT}")


def _alike(one: Equation, other: Equation, names: Mapping[Var, Var]) -> bool:
    same = one.primitive is other.primitive and len(one.invars) == len(other.invars)
    if not same or one.params.keys() != other.params.keys():
        return False
    atoms = zip(one.invars, other.invars, strict=True)
    return all(_same_atom(a, b, names) for a, b in atoms) and all(
        key in _SIZES or _same_param(value, other.params[key]) for key, value in one.params.items()
    )


def _same_atom(one: Atom, other: Atom, names: Mapping[Var, Var]) -> bool:
    if isinstance(one, Literal) or isinstance(other, Literal):
        literals = [np.asarray(a.val) for a in (one, other) if isinstance(a, Literal)]
        return len({(value.shape, value.tobytes()) for value in literals}) == 3 - len(literals)
    return one not in names or names[one] is other


def _same_param(one: Any, other: Any) -> bool:
    if isinstance(one, ClosedJaxpr):
        try:
            _compare(one, other)
        except NotIncremental:
            return False
        return True
    if isinstance(one, tuple) and one and isinstance(one[0], ClosedJaxpr):
        return all(_same_param(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other) or str(one) == str(other)


def _same_start(one: np.ndarray, other: np.ndarray) -> bool:
    if one.ndim != other.ndim or one.dtype != other.dtype:
        return False
    if not np.issubdtype(one.dtype, np.number) and one.dtype != bool:
        return one.shape == other.shape
    common = tuple(slice(min(a, b)) for a, b in zip(one.shape, other.shape, strict=True))
    return bool(np.array_equal(one[common], other[common]))
