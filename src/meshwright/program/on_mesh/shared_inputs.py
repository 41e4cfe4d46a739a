"""Inputs that several products share: their gradients are added up before anything else is.

The gradient of an activation that a residual connection also reads is a sum like
((r + v) + k) + q, of which query, key and value are partial sums on each device of the tensor axis.
The compiler can only merge reductions that are added to each other directly. The products
therefore read one copy of the activation, so that the sum becomes r + ((v + k) + q).
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from meshwright.program.dims.classes import DimClasses
from meshwright.program.dims.walk import ProgramDims, all_programs
from meshwright.program.evaluate.evaluator import Environment, constrain
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.jaxpr.equations import Equation, Literal, Value, Var
from meshwright.program.kernels.find_kernels import LayoutOf
from meshwright.program.on_mesh.mesh_rules import operands_in_param_dtype


@dataclass(frozen=True)
class SharedInput:
    """An activation that several products read, and its layout."""

    variable: Var
    spec: PartitionSpec


def find_shared_inputs(
    classes: DimClasses, sharded: Collection[int], layout: LayoutOf
) -> dict[Var, SharedInput]:
    """Return, by first result of each product, the activation it shares with others.

    The tensor axis shards the classes that are ``sharded``.
    """
    shared: dict[Var, SharedInput] = {}
    for program in all_programs(classes.root) if sharded else ():
        for variable, products in _shared(classes, program, frozenset(sharded)):
            spec = layout(program, variable)
            if spec is not None:
                one = SharedInput(variable, spec)
                shared.update((eqn.outvars[0], one) for eqn in products)
    return shared


def _shared(
    classes: DimClasses, program: ProgramDims, sharded: frozenset[int]
) -> Iterator[tuple[Var, list[Equation]]]:
    """Yield the variables that several products read and other equations as well."""
    products, others = defaultdict[Var, list[Equation]](list), set[Var]()
    for number, eqn in enumerate(program.jaxpr.eqns):
        events = classes.events_at(program, number)
        spread = {e.source for e in events if e.kind == "spread" and e.classes & sharded}
        for atom in eqn.invars:
            if isinstance(atom, Literal):
                continue
            if eqn.primitive.name == "dot_general" and program.values[atom].source in spread:
                products[atom].append(eqn)
            else:
                others.add(atom)
    others.update(atom for atom in program.jaxpr.outvars if not isinstance(atom, Literal))
    for variable, eqns in products.items():
        if len(eqns) > 1 and variable in others:
            yield variable, eqns


@dataclass(frozen=True, eq=False)
class SharedInputs:
    """Lets the products that share an input, by their first results, read one copy of it."""

    mesh: MeshView
    inputs: Mapping[Var, SharedInput]

    def __call__(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Evaluate a product with the copy; None for other equations."""
        one = self.inputs.get(eqn.outvars[0]) if eqn.outvars else None
        if one is None:
            return None
        if one.variable not in env.copies:
            # A constraint is an operation of its own, with a gradient of its own.
            copy = constrain(env.value(one.variable), self.mesh.sharding(one.spec))
            env.copies[one.variable] = copy
        operands = [
            env.copies[one.variable] if atom is one.variable else value
            for atom, value in zip(
                eqn.invars, env.operands(eqn, operands_in_param_dtype(eqn, env)), strict=True
            )
        ]
        return env.evaluator.continue_after(self, eqn, env.with_operands(eqn, operands))
