"""The mesh that the stages of a traced loss run on, and the layouts of values on it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import Mesh, PartitionSpec

from meshwright.mesh.axes import PIPE
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.evaluate.weight_uses import GatherSpecs
from meshwright.program.jaxpr.equations import Var
from meshwright.program.kernels.find_kernels import Kernels
from meshwright.program.on_mesh.mesh_forward import LocalDraws
from meshwright.program.on_mesh.remat import Remat


@dataclass(frozen=True)
class StageContext:
    """The mesh and the layouts of a traced loss inside of a pipeline.

    Attributes:
        mesh: the mesh.
        pins: layouts of activations.
        weights: variables that depend on weights alone.
        gathers: by number of the step leaf, the layouts of weights divided over fsdp, on one stage.
        whole: by number of the step leaf, its layout when gathered, on one stage.
        kernels: regions that kernels evaluate.
        remat: what blocks save for their backward pass.
        wide: compute in float64.
        draws: the random draws of a loss of one device's samples; None for one of all samples.
    """

    mesh: Mesh
    pins: Mapping[Var, PartitionSpec]
    weights: Collection[Var]
    gathers: Mapping[int, GatherSpecs]
    whole: Sequence[PartitionSpec]
    kernels: Kernels
    remat: Remat
    wide: bool
    draws: LocalDraws | None = None

    @property
    def view(self) -> MeshView:
        """The mesh as a stage sees it."""
        return MeshView(self.mesh, frozenset({PIPE, *self.batch_axes}))

    @property
    def platform(self) -> str:
        """The platform of the devices."""
        return self.view.platform

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes over which each device has its own samples."""
        return () if self.draws is None else tuple(self.draws.batch_axes)
