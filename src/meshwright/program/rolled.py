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
from meshwright.program.names import MODULE_MARK
from meshwright.program.roll import Rolled, roll_blocks
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
    found = [roll_blocks(jaxpr, blocks) for blocks in find_block_lists(jaxpr.eqns)]
    rolled = [result for result in found if isinstance(result, Rolled)]
    remarks = tuple(result for result in found if isinstance(result, str))
    if not rolled:
        return RollResult(traced, remarks)
    builder = _Builder(traced, rolled)
    return RollResult(builder.program(), remarks)


class _Builder:
    """Re-traces a program with some of its equations rolled."""

    def __init__(self, traced: TracedLoss, rolled: Sequence[Rolled]) -> None:
        self.traced = traced
        self.rolled = rolled
        self.jaxpr = traced.closed.jaxpr
        count = len(traced.layout.leaves)
        self.leaf_of = {v: i for i, v in enumerate(self.jaxpr.invars[:count])}
        self.casts = casts_of(self.jaxpr.eqns, set(self.leaf_of))
        groups = [g for r in rolled for v in r.varying.values() if (g := self._leaf_group(v))]
        self.layout = stacked_layout(traced.layout.leaves, list(dict.fromkeys(groups)))
        self.place = {
            source: (number, position)
            for number, step in enumerate(self.layout.step_leaves)
            if step.stacked
            for position, source in enumerate(step.sources)
        }

    def program(self) -> TracedLoss:
        structs = [step.leaf.struct for step in self.layout.step_leaves]
        structs += [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in self.traced.batch]
        closed = jax.make_jaxpr(self._run)(*structs)
        return TracedLoss(closed, self.layout, self.traced.batch, self.traced.metric_names)

    def _leaf_group(self, variables: tuple[Var, ...]) -> tuple[int, ...] | None:
        """Return the leaves these variables are (or are casts of), if all are."""
        sources = [self.casts.get(v, v) for v in variables]
        if not all(source in self.leaf_of for source in sources):
            return None
        return tuple(self.leaf_of[source] for source in sources)

    def _run(self, *inputs: Any) -> list[Any]:
        env = self._environment(inputs)
        interpreter = Interpreter()
        done = 0
        stacked = {v for r in self.rolled for vs in r.varying.values() for v in vs}
        for rolled in self.rolled:
            self._outer(interpreter, env, self.jaxpr.eqns[done : rolled.start], stacked)
            self._scan(rolled, env)
            done = rolled.stop
        self._outer(interpreter, env, self.jaxpr.eqns[done:], set())
        return self._outputs(env, inputs)

    def _environment(self, inputs: Sequence[Any]) -> _Leaves:
        env = _Leaves(self, inputs[: len(self.layout.step_leaves)])
        env.update(zip(self.jaxpr.constvars, self.traced.closed.consts, strict=True))
        batch = inputs[len(self.layout.step_leaves) :]
        env.update(zip(self.jaxpr.invars[len(self.leaf_of) :], batch, strict=True))
        return env

    def _outer(
        self, interpreter: Interpreter, env: Environment, eqns: Sequence[Equation], skip: set[Var]
    ) -> None:
        # Casts of leaves that are scanned over are done on the stack.
        own = [e for e in eqns if not (e.outvars[:1] and e.outvars[0] in skip & set(self.casts))]
        interpreter.equations(own, env)

    def _scan(self, rolled: Rolled, env: _Leaves) -> None:
        interpreter = _Renamed(rolled.blocks.path)
        names = list(rolled.varying)
        ys_names = list(rolled.results)
        constants = {v: env[v] for v in rolled.constants}

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            inner: Environment = dict(constants)
            inner.update(zip((c.enters for c in rolled.carries), carry, strict=True))
            inner.update(zip(names, xs, strict=True))
            interpreter.equations(rolled.eqns, inner)
            return [inner[c.leaves] for c in rolled.carries], [inner[v] for v in ys_names]

        init = [env[c.initial] for c in rolled.carries]
        xs = [self._stack(rolled.varying[name], env) for name in names]
        carry, ys = jax.lax.scan(body, init, xs, length=rolled.blocks.num_blocks)
        finals = {c.leaves: value for c, value in zip(rolled.carries, carry, strict=True)}
        for name, values in zip(ys_names, ys, strict=True):
            counterparts = rolled.results[name]
            env.stacks[counterparts] = values
            for index, variable in enumerate(counterparts):
                last = index == len(counterparts) - 1 and name in finals
                env.later[variable] = (finals[name], None) if last else (values, index)

    def _stack(self, variables: tuple[Var, ...], env: _Leaves) -> Any:
        group = self._leaf_group(variables)
        if group is None:
            return jnp.stack([env[v] for v in variables])
        stacked = env.leaves[self.place[group[0]][0]]
        return (
            stacked.astype(aval_of(variables[0]).dtype) if variables[0] in self.casts else stacked
        )

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
            if all(self.leaf_of.get(a) == s for a, s in zip(atoms, step.sources, strict=True)):
                values.append(inputs[number])
            elif step.stacked and atoms in env.stacks:
                values.append(env.stacks[atoms])
            else:
                each = [_read(atom, env) for atom in atoms]
                values.append(jnp.stack(each) if step.stacked else each[0])
        return values


class _Leaves(dict[Var, Any]):
    """An environment that slices stacked leaves and results only where one block's is read."""

    def __init__(self, builder: _Builder, leaves: Sequence[Any]) -> None:
        super().__init__()
        self.leaves = leaves
        self.stacks: dict[tuple[Any, ...], Any] = {}
        self.later: dict[Var, tuple[Any, int | None]] = {}
        for number, step in enumerate(builder.layout.step_leaves):
            for position, source in enumerate(step.sources):
                variable = builder.jaxpr.invars[source]
                self.later[variable] = (leaves[number], position if step.stacked else None)

    def __missing__(self, variable: Var) -> Any:
        value, position = self.later[variable]
        self[variable] = value if position is None else value[position]
        return self[variable]


class _Renamed(Interpreter):
    """Names the rolled block's scopes ``blocks.*`` instead of ``blocks.0``."""

    def __init__(self, path: str) -> None:
        self._first, self._any = f"{MODULE_MARK}{path}.0", f"{MODULE_MARK}{path}.*"

    def scope(self, eqn: Equation) -> str:
        return "/".join(
            self._any + part[len(self._first) :]
            if part == self._first or part.startswith(self._first + ".")
            else part
            for part in name_stack(eqn).split("/")
        )


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
    return atom.val if isinstance(atom, Literal) else env[atom]
