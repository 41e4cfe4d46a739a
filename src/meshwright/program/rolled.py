"""The rolled program: repeated blocks as one scan over stacked leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.program.blocks import find_block_lists
from meshwright.program.interpret import Environment, Interpreter
from meshwright.program.jaxprs import Equation, Literal, Var, aval_of, name_stack
from meshwright.program.layout import stacked_layout
from meshwright.program.names import rename_module
from meshwright.program.roll import Atom, Name, Rolled, roll_blocks
from meshwright.program.trace import TracedLoss


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
        found = roll_blocks(jaxpr, blocks)
        if isinstance(found, str):
            remarks.append(found)
        elif rolled and found.start < rolled[-1].stop:
            remarks.append(f"`{blocks.path}` begins before `{rolled[-1].blocks.path}` has ended")
        else:
            rolled.append(found)
    if rolled:
        traced = _Builder(traced, rolled).program()
    return RollResult(traced, tuple(remarks))


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
        self.layout = stacked_layout(
            traced.layout.leaves, list(dict.fromkeys(self.groups.values()))
        )
        self.numbers = {step.sources: n for n, step in enumerate(self.layout.step_leaves)}

    def program(self) -> TracedLoss:
        structs = [step.leaf.struct for step in self.layout.step_leaves]
        structs += [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in self.traced.batch]
        closed = jax.make_jaxpr(self._run)(*structs)
        return TracedLoss(closed, self.layout, self.traced.batch, self.traced.metric_names)

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
        variables = [atom for atom in atoms if not isinstance(atom, Literal)]
        sources = [self.casts.get(v, v) for v in variables]
        if len(variables) < len(atoms) or not all(s in self.leaf_of for s in sources):
            return None
        numbers = tuple(self.leaf_of[source] for source in sources)
        leaves = [self.traced.layout.leaves[number] for number in numbers]
        kinds = {
            (leaf.role, leaf.is_weight, leaf.dtype, leaf.variable, leaf.annotation, v in self.casts)
            for v, leaf in zip(variables, leaves, strict=True)
        }
        return numbers if len(kinds) == 1 and len(set(numbers)) == len(numbers) else None

    def _run(self, *inputs: Any) -> list[Any]:
        env = self._environment(inputs)
        interpreter = Interpreter()
        done = 0
        for rolled in self.rolled:
            interpreter.equations(self._outer(done, rolled.start), env)
            self._scan(rolled, env)
            done = rolled.stop
        interpreter.equations(self._outer(done, len(self.jaxpr.eqns)), env)
        return self._outputs(env, inputs)

    def _environment(self, inputs: Sequence[Any]) -> _Leaves:
        env = _Leaves(self, inputs[: len(self.layout.step_leaves)])
        env.update(zip(self.jaxpr.constvars, self.traced.closed.consts, strict=True))
        batch = inputs[len(self.layout.step_leaves) :]
        env.update(zip(self.jaxpr.invars[len(self.leaf_of) :], batch, strict=True))
        return env

    def _outer(self, start: int, stop: int) -> list[Equation]:
        """Return equations outside of blocks; leaves are cast where they are read."""
        eqns = self.jaxpr.eqns[start:stop]
        return [e for e in eqns if not (e.outvars and e.outvars[0] in self.casts)]

    def _scan(self, rolled: Rolled, env: _Leaves) -> None:
        interpreter = _Renamed(rolled.blocks.path)
        names = list(rolled.varying)
        constants = {v: env[v] for v in rolled.constants}

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            inner: dict[Any, Any] = dict(constants)
            inner.update(zip((c.enters for c in rolled.carries), carry, strict=True))
            inner.update(zip(names, xs, strict=True))
            interpreter.equations(rolled.eqns, inner)
            return [inner[c.leaves] for c in rolled.carries], [inner[v] for v in rolled.results]

        init = [_read(c.initial, env) for c in rolled.carries]
        xs = [self._stack(name, rolled.varying[name], env) for name in names]
        carry, ys = jax.lax.scan(body, init, xs, length=rolled.blocks.num_blocks)
        for counterparts, values in zip(rolled.results.values(), ys, strict=True):
            env.stacks[counterparts] = values
            env.later.update((v, (values, index)) for index, v in enumerate(counterparts))
        env.update(zip((c.last for c in rolled.carries), carry, strict=True))

    def _stack(self, name: Name, atoms: Sequence[Atom], env: _Leaves) -> Any:
        if name not in self.groups:
            return jnp.stack([_read(atom, env) for atom in atoms])
        stacked = env.leaves[self.numbers[self.groups[name]]]
        dtype = aval_of(name).dtype
        return stacked if stacked.dtype == dtype else stacked.astype(dtype)

    def _outputs(self, env: _Leaves, inputs: Sequence[Any]) -> list[Any]:
        pairs = 2 * (1 + len(self.traced.metric_names))
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


class _Renamed(Interpreter):
    """Names the rolled block's scopes ``blocks.*`` instead of ``blocks.0``."""

    def __init__(self, path: str) -> None:
        self._path = path

    def scope(self, eqn: Equation) -> str:
        return rename_module(name_stack(eqn), f"{self._path}.0", f"{self._path}.*")


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


def _read(atom: Any, env: Environment) -> Any:
    return jnp.asarray(atom.val, aval_of(atom).dtype) if isinstance(atom, Literal) else env[atom]
