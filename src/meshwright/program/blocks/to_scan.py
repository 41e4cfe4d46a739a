"""The rolled program: repeated blocks as one scan over stacked leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from meshwright.program.blocks.prove_equal import Name, Rolled, roll_blocks
from meshwright.program.evaluate.evaluator import Evaluator
from meshwright.program.jaxpr.equations import (
    Atom,
    Equation,
    Jaxpr,
    Literal,
    Var,
    aval_of,
    name_stack,
)
from meshwright.program.jaxpr.names import rename_module
from meshwright.program.trace.layout import Layout, stacked_layout
from meshwright.program.trace.traced_loss import TracedLoss


@dataclass(frozen=True)
class _Written:
    """State of the blocks that they replace.

    Attributes:
        leaves: the leaf of each block.
        result: what replaces it in the first block.
        formats: the program's outputs where these are the results in another format.
    """

    leaves: tuple[int, ...]
    result: Var
    formats: tuple[Var, ...]


@dataclass(frozen=True)
class RollResult:
    """A traced loss with its blocks rolled where possible.

    Attributes:
        traced: the program over stacked leaves.
        remarks: for each list of blocks that could not be rolled, why.
    """

    traced: TracedLoss
    remarks: tuple[str, ...]


def roll_program(traced: TracedLoss) -> RollResult:
    """Replace every list of equal blocks by a scan over their stacked leaves."""
    jaxpr = traced.closed.jaxpr
    rolled: list[Rolled] = []
    remarks: list[str] = []
    for blocks in find_block_lists(jaxpr.eqns):
        found = roll_blocks(jaxpr, blocks, partial(_same_leaves, traced.layout))
        if isinstance(found, Rolled) and (left_out := _left_out(blocks, found.blocks)):
            remarks.append(left_out)
        if isinstance(found, str):
            remarks.append(found)
        elif rolled and found.start < rolled[-1].stop:
            remarks.append(f"`{blocks.path}` begins before `{rolled[-1].blocks.path}` has ended")
        else:
            rolled.append(found)
    if not rolled:
        return RollResult(traced, tuple(remarks) or _nothing_found(jaxpr))
    builder = _Builder(traced, rolled)
    return RollResult(builder.program(), (*remarks, *builder.remarks()))


def _same_leaves(layout: Layout, one: str, other: str) -> bool:
    """Whether two modules have the same leaves, trained or not."""
    roles = [
        {
            leaf.path.removeprefix(path): leaf.role
            for leaf in layout.leaves
            if leaf.path.startswith(f"{path}.")
        }
        for path in (one, other)
    ]
    return roles[0] == roles[1]


def _left_out(blocks: BlockList, rolled: BlockList) -> str:
    """Say which of a list's modules are not like the others; empty if all are."""
    others = [path for path in blocks.elements if path not in rolled.elements]
    if not others:
        return ""
    few = ", ".join(f"`{path}`" for path in others[:3]) + (", …" if len(others) > 3 else "")
    first, last = rolled.elements[0], rolled.elements[-1]
    alike = "are equal blocks" if rolled.period == 1 else f"repeat every {rolled.period} blocks"
    return f"of `{blocks.path}` only `{first}` to `{last}` {alike} and are trained alike, not {few}"


def _nothing_found(jaxpr: Jaxpr) -> tuple[str, ...]:
    reason = why_no_list(jaxpr.eqns)
    return (reason,) if reason else ()


class _Builder:
    """Re-traces a program with some of its equations rolled."""

    def __init__(self, traced: TracedLoss, rolled: Sequence[Rolled]) -> None:
        self.traced = traced
        self.rolled = rolled
        self.jaxpr = traced.closed.jaxpr
        count = len(traced.layout.leaves)
        self.leaf_of = {v: i for i, v in enumerate(self.jaxpr.invars[:count])}
        self.casts = casts_of(self.jaxpr.eqns, set(self.leaf_of))
        self.groups = self._leaf_groups()
        self.written = [self._written(rolled) for rolled in self.rolled]
        written = [own.leaves for found in self.written for own in found]
        self.formats = {v for found in self.written for own in found for v in own.formats}
        groups = list(dict.fromkeys([*self.groups.values(), *written]))
        self.layout = _with_patterns(stacked_layout(traced.layout.leaves, groups))
        self.numbers = {step.sources: n for n, step in enumerate(self.layout.step_leaves)}

    def program(self) -> TracedLoss:
        structs = [step.leaf.struct for step in self.layout.step_leaves]
        structs += [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in self.traced.batch]
        closed = jax.make_jaxpr(self._run)(*structs)
        return TracedLoss(closed, self.layout, self.traced.batch, self.traced.metric_names)

    def remarks(self) -> list[str]:
        """Name the blocks that have no stack because only some of them are trained."""
        found: list[str] = []
        for rolled in self.rolled:
            if any(name in self.groups for name in rolled.varying):
                continue
            every = map(self._leaf_numbers, rolled.varying.values())
            for leaves in ([self.traced.layout.leaves[n] for n in own] for own in every if own):
                trained = [leaf.path for leaf in leaves if leaf.role == "param"]
                frozen = [leaf.path for leaf in leaves if leaf.role != "param"]
                if trained and frozen:
                    found.append(
                        f"the blocks of `{rolled.blocks.path}` have no weights in common stacks: "
                        f"`{trained[0]}` is trained, `{frozen[0]}` is not (freeze the same "
                        "part of every block, or blocks in a row)"
                    )
                    break
        return found

    def _leaf_groups(self) -> dict[Name, tuple[int, ...]]:
        """Return, for names that stand for (casts of) one leaf of each block, these leaves."""
        groups: dict[Name, tuple[int, ...]] = {}
        group_of: dict[int, tuple[int, ...]] = {}
        for name, atoms in (pair for rolled in self.rolled for pair in rolled.varying.items()):
            found = self._leaf_group(atoms)
            # A leaf can be in one stack only: what else reads it gets its slice.
            if found and all(group_of.setdefault(leaf, found) == found for leaf in found):
                groups[name] = found
        return groups

    def _leaf_group(self, atoms: Sequence[Atom]) -> tuple[int, ...] | None:
        numbers = self._leaf_numbers(atoms)
        same_format = len({atom in self.casts for atom in atoms if isinstance(atom, Var)}) == 1
        return numbers if numbers and same_format and self._alike(numbers) else None

    def _leaf_numbers(self, atoms: Sequence[Atom]) -> tuple[int, ...] | None:
        variables = [atom for atom in atoms if not isinstance(atom, Literal)]
        sources = [self.casts.get(v, v) for v in variables]
        if len(variables) < len(atoms) or not all(s in self.leaf_of for s in sources):
            return None
        return tuple(self.leaf_of[source] for source in sources)

    def _alike(self, numbers: Sequence[int]) -> bool:
        """Whether leaves can be one stack."""
        leaves = [self.traced.layout.leaves[number] for number in numbers]
        kinds = {
            (leaf.role, leaf.is_weight, leaf.shape, leaf.dtype, leaf.variable, leaf.annotation)
            for leaf in leaves
        }
        depths = {leaf.path.count(".") for leaf in leaves}
        return len(kinds) == len(depths) == 1 and len(set(numbers)) == len(numbers)

    def _written(self, rolled: Rolled) -> list[_Written]:
        """Return the state that each block replaces by the same result, whether read or not."""
        state = [i for i, leaf in enumerate(self.traced.layout.leaves) if leaf.role == "state"]
        outputs = self.jaxpr.outvars[len(self.jaxpr.outvars) - len(state) :]
        after = {i: v for i, v in zip(state, outputs, strict=True) if not isinstance(v, Literal)}
        formats = casts_of(self.jaxpr.eqns[rolled.stop :], _results(rolled))
        replaced: dict[Var, list[int]] = {}
        for number, output in after.items():
            replaced.setdefault(formats.get(output) or output, []).append(number)
        group_of = {leaf: group for group in self.groups.values() for leaf in group}
        found: list[_Written] = []
        for result, names in rolled.results.items():
            for group in zip(*(replaced.get(name, []) for name in names), strict=False):
                fits = all(group_of.setdefault(leaf, group) == group for leaf in group)
                own = tuple(after[leaf] for leaf in group)
                if fits and self._alike(group):
                    found.append(_Written(group, result, () if own == names else own))
        return found

    def _run(self, *inputs: Any) -> list[Any]:
        env = self._environment(inputs)
        evaluator = Evaluator()
        done = 0
        for rolled, written in zip(self.rolled, self.written, strict=True):
            _extend(env, self._outer(done, rolled.start), evaluator)
            _extend(env, rolled.before, evaluator)
            self._scan(rolled, written, env)
            done = rolled.stop
        _extend(env, self._outer(done, len(self.jaxpr.eqns)), evaluator)
        return self._outputs(env, inputs)

    def _environment(self, inputs: Sequence[Any]) -> _Leaves:
        env = _Leaves(self, inputs[: len(self.layout.step_leaves)])
        env.update(zip(self.jaxpr.constvars, self.traced.closed.consts, strict=True))
        batch = inputs[len(self.layout.step_leaves) :]
        env.update(zip(self.jaxpr.invars[len(self.leaf_of) :], batch, strict=True))
        return env

    def _outer(self, start: int, stop: int) -> list[Equation]:
        """Return equations outside of blocks; casts are made where leaves are read or written."""
        eqns = self.jaxpr.eqns[start:stop]
        elsewhere = self.casts.keys() | self.formats
        return [e for e in eqns if not (e.outvars and e.outvars[0] in elsewhere)]

    def _scan(self, rolled: Rolled, written: Sequence[_Written], env: _Leaves) -> None:
        evaluator = Evaluator(scope=partial(_renamed_scope, rolled.blocks))
        names = list(rolled.varying)
        cast = [own for own in written if own.formats]
        constants = {v: env[v] for v in rolled.constants}

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            inner: dict[Any, Any] = dict(constants)
            inner.update(zip((c.enters for c in rolled.carries), carry, strict=True))
            inner.update(zip(names, xs, strict=False))
            evaluator.extend(inner, rolled.eqns)
            results = [inner[v] for v in rolled.results]
            results += [inner[own.result].astype(aval_of(own.formats[0]).dtype) for own in cast]
            return [inner[c.leaves] for c in rolled.carries], results

        init = [_read(c.initial, env) for c in rolled.carries]
        xs = [self._stack(name, rolled.varying[name], env) for name in names]
        # State that is never read is given to the blocks as well: it belongs to them.
        xs += [env.leaves[n] for n in self._unread(rolled, written)]
        carry, ys = jax.lax.scan(body, init, xs, length=rolled.blocks.num_blocks)
        every = [*rolled.results.values(), *(own.formats for own in cast)]
        for counterparts, values in zip(every, ys, strict=True):
            env.stacks[counterparts] = values
            env.later.update((v, (values, index)) for index, v in enumerate(counterparts))
        env.update(zip((c.last for c in rolled.carries), carry, strict=True))

    def _unread(self, rolled: Rolled, written: Sequence[_Written]) -> list[int]:
        read = {self.groups.get(name) for name in rolled.varying}
        return [self.numbers[own.leaves] for own in written if own.leaves not in read]

    def _stack(self, name: Name, atoms: Sequence[Atom], env: _Leaves) -> Any:
        if name not in self.groups:
            return jnp.stack([_read(atom, env) for atom in atoms])
        stacked = env.leaves[self.numbers[self.groups[name]]]
        dtype = aval_of(name).dtype
        return stacked if stacked.dtype == dtype else stacked.astype(dtype)

    def _outputs(self, env: _Leaves, inputs: Sequence[Any]) -> list[Any]:
        pairs = self.traced.num_results
        outvars = self.jaxpr.outvars
        values = [_read(atom, env) for atom in outvars[:pairs]]
        state = [i for i, leaf in enumerate(self.traced.layout.leaves) if leaf.role == "state"]
        after = dict(zip(state, outvars[pairs:], strict=True))
        for number, step in enumerate(self.layout.step_leaves):
            if step.leaf.role != "state":
                continue
            atoms = tuple(after[source] for source in step.sources)
            own = tuple(self.jaxpr.invars[source] for source in step.sources)
            known = not any(isinstance(atom, Literal) for atom in atoms)
            if known and atoms == own:
                values.append(inputs[number])
            elif known and step.stacked and atoms in env.stacks:
                values.append(env.stacks[atoms])
            else:
                each = [_read(atom, env) for atom in atoms]
                values.append(jnp.stack(each) if step.stacked else each[0])
        return values


class _Leaves(dict[Var, Any]):
    """An environment that slices stacks, and casts leaves, only where one of them is read."""

    def __init__(self, builder: _Builder, leaves: Sequence[Any]) -> None:
        super().__init__()
        self.leaves = leaves
        self.stacks: dict[tuple[Any, ...], Any] = {}
        self.later: dict[Var, tuple[Any, int | None]] = {}
        self._casts = builder.casts
        for number, step in enumerate(builder.layout.step_leaves):
            for position, source in enumerate(step.sources):
                variable = builder.jaxpr.invars[source]
                self.later[variable] = (leaves[number], position if step.stacked else None)

    def __missing__(self, variable: Var) -> Any:
        if variable in self._casts:
            self[variable] = self[self._casts[variable]].astype(aval_of(variable).dtype)
        else:
            value, position = self.later[variable]
            self[variable] = value if position is None else value[position]
        return self[variable]


def _extend(env: _Leaves, eqns: Sequence[Equation], evaluator: Evaluator) -> None:
    """Evaluate equations; leaves are sliced and cast before their scope is entered.

    That a cast belongs to no module is known by its having no scope; see `casts_of`.
    """
    for eqn in eqns:
        for atom in eqn.invars:
            _read(atom, env)
        evaluator.extend(env, [eqn])


def _renamed_scope(blocks: BlockList, eqn: Equation) -> str:
    """Return the rolled block's scopes, named ``blocks.*`` instead of ``blocks.0``."""
    scopes = name_stack(eqn)
    for element, pattern in blocks.patterns():
        scopes = rename_module(scopes, element, pattern)
    return scopes


def casts_of(eqns: Sequence[Equation], leaves: set[Var]) -> dict[Var, Var]:
    """Return, for every variable that is only another format of a leaf, that leaf."""
    return {
        eqn.outvars[0]: eqn.invars[0]
        for eqn in eqns
        if eqn.primitive.name == "convert_element_type"
        and not isinstance(eqn.invars[0], Literal)
        and eqn.invars[0] in leaves
        and not name_stack(eqn)
    }


def _with_patterns(layout: Layout) -> Layout:
    """Name stacks as their blocks are named."""
    steps = list(layout.step_leaves)
    for n, step in enumerate(steps):
        if step.stacked:
            paths = [layout.leaves[source].path for source in step.sources]
            steps[n] = replace(step, leaf=replace(step.leaf, path=pattern_of(paths)))
    return replace(layout, step_leaves=tuple(steps))


def _results(rolled: Rolled) -> set[Var]:
    return {name for names in rolled.results.values() for name in names}


def _read(atom: Atom, env: Mapping[Var, Any]) -> Any:
    return jnp.asarray(atom.val, aval_of(atom).dtype) if isinstance(atom, Literal) else env[atom]
