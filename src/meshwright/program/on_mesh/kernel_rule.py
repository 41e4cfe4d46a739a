"""The rule that evaluates regions of a program by kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import NamedSharding

from meshwright.program.evaluate.evaluator import Environment, pinned
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.jaxpr.equations import Equation, Value, Var
from meshwright.program.kernels.find_kernels import Kernels


@dataclass(frozen=True, eq=False)
class KernelRule:
    """Evaluates each region at the place of one of its equations, and skips the others.

    Attributes:
        mesh: where the program runs.
        kernels: the regions.
        pins: layouts of their results.
    """

    mesh: MeshView
    kernels: Kernels
    pins: Mapping[Var, NamedSharding]

    def __call__(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Evaluate a region, or skip one of its equations; None for others."""
        first = eqn.outvars[0] if eqn.outvars else None
        region = self.kernels.regions.get(first) if first is not None else None
        if region is None:
            skipped = first in self.kernels.interior or first in self.kernels.elsewhere
            # Nothing reads what is not computed: regions with readers outside are not replaced.
            return [env.values.get(v) for v in eqn.outvars] if skipped else None
        env.evaluator.equations(region.place.ahead, env)
        results = dict(zip(region.outputs, region.kernel(region, env, self.mesh), strict=True))
        for variable, value in results.items():
            if variable not in eqn.outvars:
                # The equation it is made by, where it would be pinned, is skipped.
                env.values[variable] = pinned(variable, value, self.pins)
        return [results.get(variable) for variable in eqn.outvars]
