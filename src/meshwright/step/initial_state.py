"""The initial state of a run: random parameters and a new optimizer state, sharded from the start.

The program that initializes a model draws each parameter by code of its own. Compilers may take
longer for it than for the step, although most outputs differ in nothing but their random key. So it
is run output by output, and what is computed alike is compiled once. Later models of the same
process use what earlier ones compiled.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from meshwright.compiled.compile_program import quick_options
from meshwright.program.evaluate.evaluator import Evaluator
from meshwright.program.jaxpr.equations import (
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Literal,
    Var,
    aval_of,
    bind,
)
from meshwright.program.jaxpr.walks import program_key
from meshwright.program.trace.layout import Layout, StepLeaf
from meshwright.step.state import TrainState
from meshwright.step.train_step import TrainStep
from meshwright.trees import is_key

SMALL = 64
"""Random keys and counters of at most this many elements are computed at once."""


def draw_leaves(
    closed: ClosedJaxpr,
    words: Any,
    layout: Layout,
    shardings: Sequence[NamedSharding],
    *,
    given: Mapping[int, Any],
    quickly: bool = False,
) -> list[Any]:
    """Return the step's leaves, each from a small program, or all from one if they share much work.

    ``closed`` is the program from the words of a random key to the model's leaves; leaves that are
    given by number are not computed.
    """
    known, rest = _compute_keys(closed, words)
    parts = parts_of(rest, closed.jaxpr.outvars)
    steps = [step for n, step in enumerate(layout.step_leaves) if n not in given]
    options = quick_options() if quickly else None
    wanted = [parts[source] for step in steps for source in step.sources]
    apart = sum(len(part.eqns) for part in wanted)
    together = len({id(eqn) for part in wanted for eqn in part.eqns})
    if apart > REPEATED * together:
        return _draw_together(closed, words, layout, shardings, given, options)
    programs = ProgramsByKind(closed.jaxpr, known, options)

    def draw(step: StepLeaf, sharding: NamedSharding) -> Any:
        held = [parts[source] for source in step.sources]
        if not step.stacked:
            return programs.compute(held[0], sharding)
        return _stacked(programs, [held[n] for n in step.rows] if step.rows else held, sharding)

    return [
        given[n] if n in given else draw(step, sharding)
        for n, (step, sharding) in enumerate(zip(layout.step_leaves, shardings, strict=True))
    ]


def _draw_together(
    closed: ClosedJaxpr,
    words: Any,
    layout: Layout,
    shardings: Sequence[NamedSharding],
    given: Mapping[int, Any],
    options: Any,
) -> list[Any]:
    """Return the step's leaves, those that are not given computed by one program."""
    create, count = jaxpr_as_fun(closed), len(layout.step_leaves)
    wanted = [n for n in range(count) if n not in given]

    def run(words: Any) -> list[Any]:
        leaves = layout.from_canonical(create(words))
        return [leaves[n] for n in wanted]

    # The key is an argument: XLA would spend minutes folding what follows from a constant.
    compiled = jax.jit(run, out_shardings=[shardings[n] for n in wanted], compiler_options=options)
    whole = {**given, **dict(zip(wanted, compiled(words), strict=True))}
    return [whole[n] for n in range(count)]


def start_from(step: TrainStep, leaves: Sequence[Any]) -> TrainState:
    """Return the initial state for values of the step's leaves, which are on the mesh already."""
    values = list(leaves)
    closed, abstract = jax.make_jaxpr(step.fresh_state, return_shape=True)(values)
    variables = [*closed.jaxpr.invars, *closed.jaxpr.constvars]
    known = dict(zip(variables, [*values, *closed.consts], strict=True))
    programs = ProgramsByKind(closed.jaxpr, known, quick_options())
    parts = parts_of(closed.jaxpr.eqns, closed.jaxpr.outvars)
    shardings = jax.tree.leaves(step.shardings.state)
    unused = set(closed.jaxpr.invars)

    def compute(part: Part, sharding: NamedSharding) -> Any:
        if part.eqns or not part.inputs:
            return programs.compute(part, sharding)
        variable, value = part.inputs[0], known[part.inputs[0]]
        if variable in unused and value.sharding.is_equivalent_to(sharding, value.ndim):
            unused.remove(variable)
            return value
        # The step donates each buffer of the state once: an optimizer that remembers the initial
        # parameters gets a copy.
        return jax.jit(jnp.copy, out_shardings=sharding)(value)

    state = [compute(part, sharding) for part, sharding in zip(parts, shardings, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(abstract), state)


def _stacked(programs: ProgramsByKind, rows: Sequence[Part], sharding: NamedSharding) -> Any:
    together = programs.compute_rows(rows, sharding)
    if together is not None:
        return together
    of_row = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    values = [programs.compute(part, of_row) for part in rows]
    return jax.jit(lambda rows: jnp.stack(rows), out_shardings=sharding)(values)


def _compute_keys(closed: ClosedJaxpr, words: Any) -> tuple[dict[Var, Any], list[Equation]]:
    """Compute random keys and counters; return all known values, and the other equations."""
    jaxpr = closed.jaxpr
    known: dict[Var, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    known[jaxpr.invars[0]] = words
    rest: list[Equation] = []
    with _on_cpu():
        for eqn in jaxpr.eqns:
            is_known = all(isinstance(a, Literal) or a in known for a in eqn.invars)
            if is_known and all(map(_is_small, eqn.outvars)):
                operands = [a.val if isinstance(a, Literal) else known[a] for a in eqn.invars]
                known.update(zip(eqn.outvars, bind(eqn, operands), strict=True))
            else:
                rest.append(eqn)
    return known, rest


def _on_cpu() -> AbstractContextManager[Any]:
    """Compute on a CPU, which starts each operation soonest: integers are the same everywhere."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        # JAX may be restricted to accelerators, such as by JAX_PLATFORMS=cuda.
        return nullcontext()


def _is_small(variable: Var) -> bool:
    aval = aval_of(variable)
    exact = is_key(aval.dtype) or jnp.issubdtype(aval.dtype, jnp.integer)
    return exact and math.prod(aval.shape) <= SMALL


@dataclass(frozen=True, eq=False)
class Part:
    """How one output of a program is computed: by equations in order, and what they read."""

    eqns: tuple[Equation, ...]
    inputs: tuple[Var, ...]
    output: Atom

    def program(self, whole: Jaxpr) -> ClosedJaxpr:
        """Return the program from the inputs to the output, a part of the ``whole``."""
        program = whole.replace(
            constvars=[],
            invars=list(self.inputs),
            outvars=[self.output],
            eqns=list(self.eqns),
            debug_info=whole.debug_info.with_unknown_names(),
        )
        return ClosedJaxpr(program, ())


def parts_of(eqns: Sequence[Equation], outputs: Iterable[Atom]) -> list[Part]:
    """Return how each output is computed with these equations."""
    makers = {variable: n for n, eqn in enumerate(eqns) for variable in eqn.outvars}
    return [_part(eqns, makers, output) for output in outputs]


def _part(eqns: Sequence[Equation], makers: dict[Var, int], output: Atom) -> Part:
    needed, waiting = set[int](), [output]
    while waiting:
        atom = waiting.pop()
        number = None if isinstance(atom, Literal) else makers.get(atom)
        if number is not None and number not in needed:
            needed.add(number)
            waiting += eqns[number].invars
    chosen = tuple(eqns[number] for number in sorted(needed))
    read = [*(atom for eqn in chosen for atom in eqn.invars), output]
    outside = [a for a in read if not isinstance(a, Literal) and a not in makers]
    return Part(chosen, tuple(dict.fromkeys(outside)), output)


REPEATED = 2
"""Parts that share equations are computed apart if they have at most this many times as many
equations as the program."""

MOST_KINDS = 512
"""How many kinds of parts are remembered; beyond that, the oldest are forgotten."""

_functions: dict[Hashable, Any] = {}


class ProgramsByKind:
    """Computes parts of one program; those that are alike share a compiled function."""

    def __init__(
        self, whole: Jaxpr, known: Mapping[Var, Any], compiler_options: Mapping[str, Any] | None
    ) -> None:
        self._whole, self._known = whole, known
        self._options = dict(compiler_options or {}) or None

    def compute(self, part: Part, sharding: Sharding) -> Any:
        """Return the output of a part."""
        return self._compiled(part, sharding)(*map(self._input, part.inputs))

    def compute_rows(self, parts: Sequence[Part], sharding: Sharding) -> Any | None:
        """Return the outputs of parts as rows of one array; None if they are not alike."""
        if len({self._key(part) for part in parts}) > 1:
            return None
        inputs = zip(*([self._input(v) for v in part.inputs] for part in parts), strict=True)
        compiled = self._compiled(parts[0], sharding, rows=len(parts))
        return compiled(*(np.stack(rows) for rows in inputs))

    def _input(self, variable: Var) -> Any:
        value = self._known[variable]
        return np.asarray(jax.random.key_data(value)) if is_key(value.dtype) else value

    def _compiled(self, part: Part, sharding: Sharding, rows: int | None = None) -> Any:
        formats = tuple(self._format(variable) for variable in part.inputs)
        options = tuple((self._options or {}).items())
        kind = (self._key(part), formats, sharding, rows, options)
        if kind in _functions:
            return _functions[kind]
        one = self._function(part)
        several = jax.vmap(lambda _, *inputs: one(*inputs))
        function = jax.jit(
            one if rows is None else lambda *inputs: several(jnp.arange(rows), *inputs),
            out_shardings=sharding,
            compiler_options=self._options,
        )
        if len(_functions) >= MOST_KINDS:
            del _functions[next(iter(_functions))]
        _functions[kind] = function
        return function

    def _key(self, part: Part) -> Hashable:
        return program_key(part.program(self._whole))

    def _format(self, variable: Var) -> Hashable:
        """Return what a function depends on of an input, besides its value."""
        value = self._known[variable]
        kind = str(jax.random.key_impl(value)) if is_key(value.dtype) else ""
        return np.shape(value), str(value.dtype), kind

    def _function(self, part: Part) -> Any:
        """Return a function of the inputs, with the words of random keys instead of the keys."""
        program = part.program(self._whole)
        known = [self._known[variable] for variable in part.inputs]
        kinds = [jax.random.key_impl(value) if is_key(value.dtype) else None for value in known]

        def of_words(*inputs: Any) -> Any:
            keys = [
                x if kind is None else jax.random.wrap_key_data(x, impl=kind)
                for x, kind in zip(inputs, kinds, strict=True)
            ]
            return Evaluator().run(program, keys)[0]

        return of_words
