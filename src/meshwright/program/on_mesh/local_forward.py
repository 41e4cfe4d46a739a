"""The loss of one device's samples, with the random numbers they would get in the whole batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import jax
from jax.sharding import Mesh, PartitionSpec

from meshwright.errors import Setting, UserError
from meshwright.program.dims import DimClasses, Frame, all_frames
from meshwright.program.evaluate.evaluator import Environment
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.jaxpr.equations import Equation, Value, Var, bind
from meshwright.program.kernels.find_kernels import NO_KERNELS, Kernels
from meshwright.program.on_mesh.mesh_forward import Forward, mesh_evaluator, weight_uses
from meshwright.program.on_mesh.remat import Remat
from meshwright.program.trace.traced_loss import TracedLoss


def local_forward(
    traced: TracedLoss,
    draws: LocalDraws,
    mesh: Mesh,
    remat: Remat,
    *,
    wide: bool,
    kernels: Kernels = NO_KERNELS,
) -> Forward:
    """Return the loss of one device's samples, inside a `jax.shard_map` over the batch axes.

    Args:
        traced: the loss, traced for one device's part of a microbatch.
        draws: its random numbers.
        mesh: the mesh.
        remat: what blocks save for their backward pass.
        wide: compute in float64.
        kernels: regions that kernels evaluate.
    """
    # Inside `shard_map` there is only this device, so nothing is divided.
    undivided = [PartitionSpec()] * len(traced.layout.step_leaves)
    view = MeshView(mesh, frozenset(draws.batch_axes))
    uses = weight_uses(traced, {}, undivided)
    evaluator = mesh_evaluator(
        view, uses, remat, wide=wide, kernels=kernels, first=[draws.draw], lookups=False
    )
    return Forward(traced, evaluator, remat)


class LocalDraws:
    """Draws random numbers for the whole microbatch and keeps this device's part.

    Bits are a function of (key, position): a device that draws for all samples gets the same bits
    as without `shard_map`. This costs some arithmetic, and nothing is sent.

    Args:
        whole: the dims of the loss of a whole microbatch, in which the dim of samples is known.
        local: the dims of the same loss for one device's part, which may be a single sample: its
            dim could be any dim of size 1.
        batch_axes: the mesh axes samples are divided over, outermost first, and their sizes.
    """

    def __init__(self, whole: DimClasses, local: DimClasses, batch_axes: Mapping[str, int]) -> None:
        self.batch_axes = dict(batch_axes)
        self._sample_dims: dict[Var, int] = {}
        whole_draws, local_draws = list(_draws(whole)), list(_draws(local))
        if len(whole_draws) != len(local_draws):
            raise UserError(
                f"{Setting('training.sync_gradients_every')} cannot be used: how often the loss "
                "draws random numbers depends on the number of samples",
                why=f"{len(whole_draws)} times for a microbatch, {len(local_draws)} for one "
                "device's part",
                fix=f"write {Setting('training.sync_gradients_every', 1)}",
            )
        for (frame, eqn), (_, local_eqn) in zip(whole_draws, local_draws, strict=True):
            for dim, atoms in enumerate(frame.dims(eqn.outvars[0])):
                if atoms and atoms[0].id in whole.batch:
                    self._sample_dims[local_eqn.outvars[0]] = dim

    def draw(self, eqn: Equation, env: Environment) -> list[Value] | None:
        """Evaluate a draw that has the samples in one of its dims; None for other equations."""
        if eqn.primitive.name != "random_bits" or eqn.outvars[0] not in self._sample_dims:
            return None
        dim = self._sample_dims[eqn.outvars[0]]
        shape = list(eqn.params["shape"])
        size = shape[dim]
        shape[dim] = size * math.prod(self.batch_axes.values())
        params = {**eqn.params, "shape": tuple(shape)}
        (bits,) = bind(eqn.replace(params=params), env.operands(eqn))
        start = jax.lax.axis_index(tuple(self.batch_axes)) * size
        return [jax.lax.dynamic_slice_in_dim(bits, start, size, dim)]


def _draws(classes: DimClasses) -> Iterator[tuple[Frame, Equation]]:
    """Yield the equations that draw random bits, with the frames they are in."""
    for frame in all_frames(classes.root):
        for eqn in frame.jaxpr.eqns:
            if eqn.primitive.name == "random_bits":
                yield frame, eqn
