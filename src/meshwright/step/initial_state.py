"""The initial state of a training: drawn parameters and a new optimizer state, born sharded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.compiled.quick_options import quick_options
from meshwright.program.blocks.parts import Part, parts_of
from meshwright.program.jaxpr.equations import (
    Atom,
    ClosedJaxpr,
    Equation,
    Literal,
    Var,
    aval_of,
    bind,
)
from meshwright.program.trace.layout import Layout
from meshwright.step.compile_by_kind import ProgramsByKind, repeat_little
from meshwright.step.state import TrainState
from meshwright.step.train_step import TrainStep
from meshwright.trees import is_key

FEW_ELEMENTS = 2**22
"""A model with fewer elements is drawn sooner than fast code for it would be compiled."""

SMALL = 64
"""Random keys and counters of at most this many elements are computed at once."""


def draw_leaves(
    closed: ClosedJaxpr,
    words: Any,
    layout: Layout,
    shardings: Sequence[NamedSharding],
    *,
    quickly: bool = False,
) -> list[Any]:
    """Return the step's leaves, each computed by a small program, or by one if they share much.

    Args:
        closed: the program from the words of a random key to the model's leaves.
        words: the words.
        layout: which of the model's leaves each of the step's leaves holds.
        shardings: of the step's leaves.
        quickly: compile for a single run instead of for speed.
    """
    known, rest = _compute_keys(closed, words)
    outputs = closed.jaxpr.outvars
    parts = parts_of(rest, outputs)
    num_elements = sum(math.prod(aval_of(atom).shape) for atom in outputs)
    options = quick_options() if quickly or num_elements < FEW_ELEMENTS else None
    if not repeat_little(parts):
        create = jaxpr_as_fun(closed)
        # The key is an argument: XLA would spend minutes folding what follows from a constant.
        return jax.jit(
            lambda words: layout.from_canonical(create(words)),
            out_shardings=list(shardings),
            compiler_options=options,
        )(words)
    programs = ProgramsByKind(closed.jaxpr, known, options)
    leaves: list[Any] = []
    for step, sharding in zip(layout.step_leaves, shardings, strict=True):
        held = [parts[source] for source in step.sources]
        if step.stacked:
            rows = [held[n] for n in step.rows] if step.rows else held
            leaves.append(_stacked(programs, rows, sharding))
        else:
            leaves.append(programs.compute(held[0], sharding))
    return leaves


def start_from(step: TrainStep, leaves: Sequence[Any]) -> TrainState:
    """Return the initial state for values of the step's leaves, which are on the mesh already."""
    values = list(leaves)
    closed, abstract = jax.make_jaxpr(step.fresh_state, return_shape=True)(values)
    variables = [*closed.jaxpr.invars, *closed.jaxpr.constvars]
    known = dict(zip(variables, [*values, *closed.consts], strict=True))
    programs = ProgramsByKind(closed.jaxpr, known, quick_options())
    parts = parts_of(closed.jaxpr.eqns, closed.jaxpr.outvars)
    shardings = jax.tree.leaves(step.shardings.state)
    state = [
        known[part.inputs[0]]
        if _is_input(part, closed.jaxpr.invars)
        else programs.compute(part, sharding)
        for part, sharding in zip(parts, shardings, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract), state)


def _is_input(part: Part, inputs: Sequence[Var]) -> bool:
    """Whether an output is an input as it is."""
    return not part.eqns and part.inputs[:1] != () and part.inputs[0] in inputs


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
    # The integers are the same on every device, and a CPU starts each operation soonest.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        for eqn in jaxpr.eqns:
            is_known = all(isinstance(a, Literal) or a in known for a in eqn.invars)
            if is_known and all(map(_is_small, eqn.outvars)):
                results = bind(eqn, [_read(known, atom) for atom in eqn.invars])
                known.update(zip(eqn.outvars, results, strict=True))
            else:
                rest.append(eqn)
    return known, rest


def _is_small(variable: Var) -> bool:
    aval = aval_of(variable)
    exact = is_key(aval.dtype) or jnp.issubdtype(aval.dtype, jnp.integer)
    return exact and math.prod(aval.shape) <= SMALL


def _read(known: dict[Var, Any], atom: Atom) -> Any:
    return atom.val if isinstance(atom, Literal) else known[atom]
