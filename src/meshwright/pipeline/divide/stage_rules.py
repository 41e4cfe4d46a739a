"""The evaluation rule inside a pipeline stage: no equation may exchange values between stages."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.pipeline.divide.lookups import (
    SCATTERS,
    divided_rows,
    divides_rows,
    in_whole_dims,
    picked,
    picks_one,
)
from meshwright.pipeline.divide.moving_dims import all_whole, make_whole, moving_dims
from meshwright.program.evaluate.evaluator import Environment
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.jaxpr.equations import Equation, Literal, Value, aval_of
from meshwright.program.on_mesh.mesh_rules import operands_in_param_dtype


@dataclass(frozen=True)
class WithinStage:
    """Evaluates what moves values along a dim, or looks values up, with that dim whole.

    The compiler would move pieces of a divided dim by an exchange of all devices, and stages that
    run different operations would deadlock.

    Attributes:
        mesh: the mesh, its pipe axis divided by hand.
    """

    mesh: MeshView

    def __call__(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Evaluate an equation that would cross stages; None for others."""
        if math.prod(self.mesh.auto_axes.values()) == 1:
            return None
        if eqn.primitive.name in SCATTERS:
            return self._scattered(eqn, env)
        if dims := moving_dims(eqn):
            return self._moved(eqn, env, dims)
        return self._looked_up(eqn, env) if eqn.primitive.name == "gather" else None

    def _scattered(self, eqn: Equation, env: Environment) -> list[Value]:
        mesh = self.mesh.for_constraints
        indexed = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
        target, *others = env.operands(eqn)
        whole = env.with_operands(eqn, [make_whole(target, mesh, indexed), *others])
        # By the rules that follow: in float64, how a scatter combines is widened as well.
        results = env.evaluator.continue_after(self, eqn, whole)
        return [make_whole(a, mesh, indexed) for a in results]

    def _moved(self, eqn: Equation, env: Environment, dims: tuple[int, ...]) -> list[Value]:
        mesh = self.mesh.for_constraints
        operands = env.operands(eqn, operands_in_param_dtype(eqn, env))
        whole = env.with_operands(eqn, all_whole(operands, mesh, dims))
        # Results, too: their gradients move the other way.
        return all_whole(env.evaluator.continue_after(self, eqn, whole), mesh, dims)

    def _looked_up(self, eqn: Equation, env: Environment) -> list[Value] | None:
        mesh, weights = self.mesh.for_constraints, env.evaluator.weights
        table = eqn.invars[0]
        use = None if isinstance(table, Literal) else weights.uses.get(table)
        if use is not None and not divides_rows(eqn, use.whole):
            return None
        operands = env.operands(eqn, operands_in_param_dtype(eqn, env))
        if use is not None:
            rows = divided_rows(eqn, operands[0], operands[1], mesh, use.whole)
            return [weights.cast(rows, aval_of(eqn.outvars[0]).dtype)]
        if picks_one(eqn):
            return [picked(eqn, operands[0], operands[1])]
        return in_whole_dims(eqn, operands, mesh)
