"""The rule that evaluates regions of a program by kernels."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.program.evaluate.evaluator import Environment
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.jaxpr.equations import Equation, Value
from meshwright.program.kernels.find_kernels import Kernels


@dataclass(frozen=True, eq=False)
class KernelRule:
    """Evaluates each region at its last equation, and skips the others.

    Attributes:
        mesh: where the program runs.
        kernels: the regions.
    """

    mesh: MeshView
    kernels: Kernels

    def __call__(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Evaluate a region, or skip one of its equations; None for others."""
        first = eqn.outvars[0] if eqn.outvars else None
        region = self.kernels.regions.get(first) if first is not None else None
        if region is None:
            skipped = first in self.kernels.interior or first in self.kernels.postponed
            # Nothing reads these results: regions with readers outside are not replaced.
            return [None] * len(eqn.outvars) if skipped else None
        results = dict(zip(region.outputs, region.kernel(region, env, self.mesh), strict=True))
        for variable, value in results.items():
            if variable not in eqn.outvars:
                env.values[variable] = env.evaluator.pinned(variable, value)
        return [results.get(variable) for variable in eqn.outvars]
