"""Where the stages of a traced loss run, and how its values are laid out there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import Mesh, PartitionSpec

from meshwright.mesh.axes import PIPE
from meshwright.program.evaluate.gather import GatherSpecs
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.jaxpr.equations import Var
from meshwright.program.on_mesh.local_forward import LocalDraws
from meshwright.program.on_mesh.remat import Remat


@dataclass(frozen=True)
class StageContext:
    """Where a traced loss runs.

    Attributes:
        mesh: the mesh.
        pins: layouts of activations.
        weights: variables that hold weights and no data.
        gathers: by number of the step leaf, the layouts of weights divided over fsdp, on one stage.
        whole: by number of the step leaf, its layout when gathered, on one stage.
        remat: what blocks keep for their backward pass.
        wide: hold every float as float64.
        draws: for a loss of one device's samples, its random numbers; None for one of all samples.
    """

    mesh: Mesh
    pins: Mapping[Var, PartitionSpec]
    weights: Collection[Var]
    gathers: Mapping[int, GatherSpecs]
    whole: Sequence[PartitionSpec]
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
        """The axes over which each device has samples of its own."""
        return () if self.draws is None else tuple(self.draws.batch_axes)
