"""The rolled program: repeated blocks as one scan over stacked leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.program.blocks.block_lists import (
    BlockList,
    find_block_lists,
    pattern_of,
    why_no_list,
)
from meshwright.program.blocks.connections import read_atom, with_even_connections
from meshwright.program.blocks.prove_equal import Column, Name, RolledBlockList, roll_block_list
from meshwright.program.blocks.rows import RowBlocks, Rows, array_of, roll_rows
from meshwright.program.evaluate.evaluator import Evaluator
from meshwright.program.jaxpr.equations import Atom, Equation, Literal, Var, aval_of, name_stack
from meshwright.program.jaxpr.names import rename_module
from meshwright.program.trace.layout import Layout, stacked_layout
from meshwright.program.trace.traced_loss import TracedLoss


@dataclass(frozen=True)
class _WrittenState:
    """A state leaf that each block writes.

    Attributes:
        result: its new value, in the first block.
        casts: the new value of each block in the leaf's dtype, if it has to be cast.
    """

    leaves: tuple[int, ...]
    result: Var
    casts: tuple[Var, ...]


@dataclass(frozen=True)
class RollResult:
    """A traced loss with its blocks rolled where possible, and remarks why other lists were not."""

    traced: TracedLoss
    remarks: tuple[str, ...]


def roll_program(traced: TracedLoss, *, even_connections: bool = False) -> RollResult:
    """Replace every list of equal blocks by a scan over their stacked leaves.

    With ``even_connections``, blocks between which the model computes different things are rolled,
    too, at the cost of passing on all values that are read later (`with_even_connections`).
    """
    apart = frozenset[str]()
    if even_connections:
        traced, apart = with_even_connections(traced, partial(_same_leaves, traced.layout))
    jaxpr = traced.closed.jaxpr
    rolled_lists: list[RolledBlockList] = []
    remarks: list[str] = []
    for blocks in find_block_lists(jaxpr.eqns):
        rolled = roll_block_list(jaxpr, blocks, partial(_same_leaves, traced.layout, apart))
        if isinstance(rolled, str):
            remarks.append(rolled)
            continue
        if remark := _unrolled_blocks(blocks, rolled):
            remarks.append(remark)
        if rolled_lists and rolled.start < rolled_lists[-1].stop:
            before = rolled_lists[-1].blocks.path
            remarks.append(f"`{blocks.path}` starts before `{before}` has ended")
        else:
            rolled_lists.append(rolled)
    if not rolled_lists:
        in_rows = roll_rows(traced)
        if not isinstance(in_rows, RowBlocks):
            # Lists of modules are what people look for first.
            reasons = (*(remarks or [why_no_list(jaxpr.eqns)]), in_rows)
            return RollResult(traced, tuple(filter(None, reasons)))
        builder = _Builder(in_rows.traced, [in_rows.rolled], in_rows.rows)
        return RollResult(builder.program(), ())
    builder = _Builder(traced, rolled_lists)
    return RollResult(builder.program(), (*remarks, *builder.remarks()))


def _same_leaves(layout: Layout, apart: frozenset[str], one: str, other: str) -> bool:
    """Whether two modules have the same leaves, trained or not; those `apart` do not count."""
    roles = [
        {
            leaf.path.removeprefix(path): leaf.role
            for leaf in layout.leaves
            if leaf.path.startswith(f"{path}.") and leaf.path not in apart
        }
        for path in (one, other)
    ]
    return roles[0] == roles[1]


def _unrolled_blocks(blocks: BlockList, whole: RolledBlockList) -> str:
    """Say which of a list's modules are not rolled, and why; empty if all are."""
    rolled = whole.blocks
    others = [path for path in blocks.elements if path not in rolled.elements]
    if not others:
        return ""
    few = ", ".join(f"`{path}`" for path in others[:3]) + (", …" if len(others) > 3 else "")
    first, last = rolled.elements[0], rolled.elements[-1]
    alike = "are equal blocks" if rolled.period == 1 else f"repeat every {rolled.period} blocks"
    return (
        f"in `{blocks.path}`, only `{first}` to `{last}` {alike} and are trained alike, not {few}"
        + (f": {whole.why_not_all}" if whole.why_not_all else "")
    )


class _Builder:
    """Re-traces a program with its equal blocks rolled."""

    def __init__(
        self, traced: TracedLoss, rolled_lists: Sequence[RolledBlockList], rows: Rows | None = None
    ) -> None:
        self.traced = traced
        self.rolled_lists = rolled_lists
        self.rows = rows or {}
        self.jaxpr = traced.closed.jaxpr
        count = len(traced.layout.leaves)
        self.leaf_of = {v: i for i, v in enumerate(self.jaxpr.invars[:count])}
        self.casts = casts_of(self.jaxpr.eqns, set(self.leaf_of))
        self.groups = self._leaf_groups()
        self.written = [self._written_state(rolled) for rolled in rolled_lists]
        states = [state for written in self.written for state in written]
        self.state_casts = {variable for state in states for variable in state.casts}
        groups = dict.fromkeys([*self.groups.values(), *(state.leaves for state in states)])
        leaves = traced.layout.leaves
        paths = {group: pattern_of([leaves[n].path for n in group]) for group in groups}
        self.layout = stacked_layout(leaves, paths)
        self.numbers = {step.sources: n for n, step in enumerate(self.layout.step_leaves)}

    def program(self) -> TracedLoss:
        structs = [step.leaf.struct for step in self.layout.step_leaves]
        structs += [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in self.traced.batch]
        closed = jax.make_jaxpr(self._run)(*structs)
        traced = self.traced
        return TracedLoss(closed, self.layout, traced.batch, traced.metric_names, self._kept()[1])

    def remarks(self) -> list[str]:
        """Name the blocks whose weights are not stacked because only some are trained."""
        remarks: list[str] = []
        for rolled in self.rolled_lists:
            if any(name in self.groups for name in rolled.varying):
                continue
            every = map(self._leaf_numbers, rolled.varying.values())
            for leaves in ([self.traced.layout.leaves[n] for n in same] for same in every if same):
                trained = [leaf.path for leaf in leaves if leaf.role == "param"]
                frozen = [leaf.path for leaf in leaves if leaf.role != "param"]
                if trained and frozen:
                    remarks.append(
                        f"the weights of `{rolled.blocks.path}` are not stacked: "
                        f"`{trained[0]}` is trained, `{frozen[0]}` is not (freeze the same "
                        "part of every block, or consecutive blocks)"
                    )
                    break
        return remarks

    def _leaf_groups(self) -> dict[Name, tuple[int, ...]]:
        """Return, by name of a value that is a leaf (or its cast) in each block, these leaves."""
        groups: dict[Name, tuple[int, ...]] = {}
        group_of: dict[int, tuple[int, ...]] = {}
        pairs = [pair for rolled in self.rolled_lists for pair in rolled.varying.items()]
        for name, atoms in pairs:
            group = self._leaf_numbers(atoms)
            same_dtype = len({atom in self.casts for atom in atoms if isinstance(atom, Var)}) == 1
            if not group or not same_dtype or not self._can_stack(group):
                continue
            # A leaf can only be in one stack: other readers get its slice.
            if all(group_of.setdefault(leaf, group) == group for leaf in group):
                groups[name] = group
        return groups

    def _leaf_numbers(self, atoms: Sequence[Atom]) -> tuple[int, ...] | None:
        variables = [atom for atom in atoms if not isinstance(atom, Literal)]
        sources = [self.casts.get(v, v) for v in variables]
        if len(variables) < len(atoms) or not all(s in self.leaf_of for s in sources):
            return None
        return tuple(self.leaf_of[source] for source in sources)

    def _can_stack(self, numbers: Sequence[int]) -> bool:
        """Whether leaves can be stacked."""
        leaves = [self.traced.layout.leaves[number] for number in numbers]
        kinds = {
            (leaf.role, leaf.is_weight, leaf.shape, leaf.dtype, leaf.variable, leaf.annotation)
            for leaf in leaves
        }
        depths = {leaf.path.count(".") for leaf in leaves}
        return len(kinds) == len(depths) == 1 and len(set(numbers)) == len(numbers)

    def _written_state(self, rolled: RolledBlockList) -> list[_WrittenState]:
        """Return the leaves that all blocks write, whether they read them or not."""
        outputs = self.jaxpr.outvars[self.traced.num_results :]
        pairs = zip(self.traced.kept, outputs, strict=True)
        after = {i: v for i, v in pairs if not isinstance(v, Literal)}
        results = {variable for same in rolled.results.values() for variable in same}
        casts = casts_of(self.jaxpr.eqns[rolled.stop :], results)
        leaves_of: dict[Var, list[int]] = {}
        for number, output in after.items():
            leaves_of.setdefault(casts.get(output) or output, []).append(number)
        group_of = {leaf: group for group in self.groups.values() for leaf in group}
        written: list[_WrittenState] = []
        for result, variables in rolled.results.items():
            for group in zip(*(leaves_of.get(v, []) for v in variables), strict=False):
                fits = all(group_of.setdefault(leaf, group) == group for leaf in group)
                outputs = tuple(after[leaf] for leaf in group)
                if fits and self._can_stack(group):
                    is_cast = outputs != variables
                    written.append(_WrittenState(group, result, outputs if is_cast else ()))
        return written

    def _run(self, *inputs: Any) -> list[Any]:
        env = self._environment(inputs)
        evaluator = Evaluator()
        done = 0
        for rolled, written in zip(self.rolled_lists, self.written, strict=True):
            _extend(env, self._outside(done, rolled.start), evaluator)
            _extend(env, rolled.hoisted, evaluator)
            self._scan(rolled, written, env)
            done = rolled.stop
        _extend(env, self._outside(done, len(self.jaxpr.eqns)), evaluator)
        return self._outputs(env, inputs)

    def _environment(self, inputs: Sequence[Any]) -> _LazyValues:
        env = _LazyValues(self, inputs[: len(self.layout.step_leaves)])
        env.update(zip(self.jaxpr.constvars, self.traced.closed.consts, strict=True))
        batch = inputs[len(self.layout.step_leaves) :]
        env.update(zip(self.jaxpr.invars[len(self.leaf_of) :], batch, strict=True))
        return env

    def _outside(self, start: int, stop: int) -> list[Equation]:
        """Return equations outside of blocks, except casts of leaves, which are cast when used."""
        eqns = self.jaxpr.eqns[start:stop]
        casts = self.casts.keys() | self.state_casts
        return [e for e in eqns if not (e.outvars and e.outvars[0] in casts)]

    def _scan(
        self, rolled: RolledBlockList, written: Sequence[_WrittenState], env: _LazyValues
    ) -> None:
        evaluator = Evaluator(scope=partial(_renamed_scope, rolled.blocks))
        names = list(rolled.varying)
        cast = [state for state in written if state.casts]
        constants = {v: env[v] for v in rolled.constants}

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            inner: dict[Any, Any] = dict(constants)
            inner.update(zip((c.received for c in rolled.carries), carry, strict=True))
            inner.update(zip(names, xs, strict=False))
            evaluator.extend(inner, rolled.eqns)
            results = [inner[v] for v in rolled.results]
            results += [inner[s.result].astype(aval_of(s.casts[0]).dtype) for s in cast]
            return [inner[c.passed_on] for c in rolled.carries], results

        init = [read_atom(c.initial, env) for c in rolled.carries]
        xs = [self._stack(name, rolled.varying[name], env) for name in names]
        # State that is only written is passed to the scan too: it belongs to the blocks.
        read = {self.groups.get(name) for name in names}
        unread = [state.leaves for state in written if state.leaves not in read]
        xs += [env.leaves[self.numbers[leaves]] for leaves in unread]
        carry, ys = jax.lax.scan(body, init, xs, length=rolled.blocks.num_blocks)
        every = [*rolled.results.values(), *(state.casts for state in cast)]
        for counterparts, values in zip(every, ys, strict=True):
            env.stacks[counterparts] = values
            env.pending.update((v, (values, index)) for index, v in enumerate(counterparts))
        env.update(zip((c.final for c in rolled.carries), carry, strict=True))

    def _stack(self, name: Name, atoms: Column, env: _LazyValues) -> Any:
        if array := array_of(atoms, self.rows):
            return env[array]
        if name not in self.groups:
            return jnp.stack([read_atom(atom, env) for atom in atoms])
        stacked = env.leaves[self.numbers[self.groups[name]]]
        dtype = aval_of(name).dtype
        return stacked if stacked.dtype == dtype else stacked.astype(dtype)

    def _kept(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the numbers of the step leaves that are state, and of written parameters."""
        steps = list(enumerate(self.layout.step_leaves))
        written = set(self.traced.written)
        return (
            tuple(n for n, step in steps if step.leaf.role == "state"),
            tuple(n for n, step in steps if written & set(step.sources)),
        )

    def _outputs(self, env: _LazyValues, inputs: Sequence[Any]) -> list[Any]:
        pairs = self.traced.num_results
        outvars = self.jaxpr.outvars
        values = [read_atom(atom, env) for atom in outvars[:pairs]]
        after = dict(zip(self.traced.kept, outvars[pairs:], strict=True))
        for number in (number for numbers in self._kept() for number in numbers):
            step = self.layout.step_leaves[number]
            before = tuple(self.jaxpr.invars[source] for source in step.sources)
            atoms = tuple(after.get(s, v) for s, v in zip(step.sources, before, strict=True))
            are_variables = not any(isinstance(atom, Literal) for atom in atoms)
            if are_variables and atoms == before:
                values.append(inputs[number])
            elif are_variables and step.stacked and atoms in env.stacks:
                values.append(env.stacks[atoms])
            else:
                each = [read_atom(atom, env) for atom in atoms]
                values.append(jnp.stack(each) if step.stacked else each[0])
        return values


class _LazyValues(dict[Var, Any]):
    """An environment that slices stacks and casts leaves only when they are read.

    Attributes:
        stacks: by variables of the unrolled program, the stack of their values.
        pending: by variable, the leaf or stack it is in, and its position if that is a stack.
    """

    def __init__(self, builder: _Builder, leaves: Sequence[Any]) -> None:
        super().__init__()
        self.leaves = leaves
        self.stacks: dict[tuple[Any, ...], Any] = {}
        self.pending: dict[Var, tuple[Any, int | None]] = {}
        self._casts = builder.casts
        for number, step in enumerate(builder.layout.step_leaves):
            for position, source in enumerate(step.sources):
                variable = builder.jaxpr.invars[source]
                self.pending[variable] = (leaves[number], position if step.stacked else None)

    def __missing__(self, variable: Var) -> Any:
        if variable in self._casts:
            self[variable] = self[self._casts[variable]].astype(aval_of(variable).dtype)
        else:
            value, position = self.pending[variable]
            self[variable] = value if position is None else value[position]
        return self[variable]


def _extend(env: _LazyValues, eqns: Sequence[Equation], evaluator: Evaluator) -> None:
    """Evaluate equations; leaves are sliced and cast outside of their scope.

    `casts_of` recognizes the cast of a leaf by having no scope.
    """
    for eqn in eqns:
        for atom in eqn.invars:
            read_atom(atom, env)
        evaluator.extend(env, [eqn])


def _renamed_scope(blocks: BlockList, eqn: Equation) -> str:
    """Return the rolled block's scopes, named ``blocks.*`` instead of ``blocks.0``."""
    scopes = name_stack(eqn)
    for element, pattern in blocks.patterns():
        scopes = rename_module(scopes, element, pattern)
    return scopes


def casts_of(eqns: Sequence[Equation], leaves: set[Var]) -> dict[Var, Var]:
    """Return, for every variable that is a cast of a leaf outside of modules, that leaf."""
    return {
        eqn.outvars[0]: eqn.invars[0]
        for eqn in eqns
        if eqn.primitive.name == "convert_element_type"
        and not isinstance(eqn.invars[0], Literal)
        and eqn.invars[0] in leaves
        and not name_stack(eqn)
    }
