"""The traced loss on one device's own samples, drawing the random numbers it would draw for all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshwright.errors import Setting, UserError
from meshwright.program.dims import DimClasses, Frame, all_frames
from meshwright.program.forward import OnMesh, WideOnMesh, weight_uses
from meshwright.program.jaxprs import Equation, Var, bind
from meshwright.program.remat import Remat
from meshwright.program.segments import cut
from meshwright.program.trace import LossValue, TracedLoss


class LocalForward:
    """The loss of one device's samples, inside a `jax.shard_map` over the batch axes.

    Args:
        traced: the loss, traced for one device's part of a microbatch.
        draws: its random numbers.
        mesh: the mesh.
        remat: what blocks keep for their backward pass.
        wide: hold every float as float64.
    """

    def __init__(
        self,
        traced: TracedLoss,
        draws: LocalDraws,
        mesh: Any,
        remat: Remat,
        *,
        wide: bool,
    ) -> None:
        self._traced = traced
        self._pieces = cut(traced.closed.jaxpr)
        # No layouts inside `shard_map`: there is only this device.
        nowhere = [PartitionSpec()] * len(traced.layout.step_leaves)
        uses = weight_uses(traced, {}, nowhere)
        kind = _WideLocal if wide else _Local
        self._make = lambda: kind(mesh, uses, remat, draws)

    def __call__(self, leaves: Sequence[Any], batch: Sequence[Any]) -> LossValue:
        """Evaluate the loss on the step's leaf values and this device's batch leaves."""
        outputs = self._make().program(self._traced.closed, self._pieces, [*leaves, *batch])
        return self._traced.read_outputs(outputs)


class LocalDraws:
    """Draws random numbers for the whole microbatch and keeps this device's part.

    Bits are a function of (key, place), so a device that draws for all gets the bits it would
    have got without `shard_map`; it costs some arithmetic and sends nothing.

    Args:
        whole: the dims of the loss of a whole microbatch, which keeps samples apart.
        own: the dims of the same loss for one device's part, perhaps a single sample, whose dim
            looks like any other of size 1.
        batch_axes: the mesh axes samples are divided over, outermost first, and their sizes.
    """

    def __init__(self, whole: DimClasses, own: DimClasses, batch_axes: Mapping[str, int]) -> None:
        self.batch_axes = dict(batch_axes)
        self._dims: dict[Var, int] = {}
        theirs, mine = list(_draws(whole)), list(_draws(own))
        if len(theirs) != len(mine):
            raise UserError(
                f"{Setting('training.sync_gradients_every')} cannot be used: how often the loss "
                "draws random numbers depends on the number of samples",
                why=f"{len(theirs)} times for a microbatch, {len(mine)} for one device's part",
                fix=f"write {Setting('training.sync_gradients_every', 1)}",
            )
        for (frame, eqn), (_, draw) in zip(theirs, mine, strict=True):
            for dim, atoms in enumerate(frame.dims(eqn.outvars[0])):
                if atoms and atoms[0].id in whole.batch:
                    self._dims[draw.outvars[0]] = dim

    def draw(self, eqn: Equation, args: list[Any]) -> list[Any] | None:
        """Evaluate a draw whose result has the samples in one of its dims; None for others."""
        if eqn.primitive.name != "random_bits" or eqn.outvars[0] not in self._dims:
            return None
        dim = self._dims[eqn.outvars[0]]
        shape = list(eqn.params["shape"])
        own = shape[dim]
        shape[dim] = own * math.prod(self.batch_axes.values())
        (bits,) = bind(eqn.replace(params={**eqn.params, "shape": tuple(shape)}), args)
        place = jax.lax.axis_index(tuple(self.batch_axes)) * own
        return [jax.lax.dynamic_slice_in_dim(bits, place, own, dim)]


class _Local(OnMesh):
    def __init__(self, mesh: Any, uses: Any, remat: Remat, draws: LocalDraws) -> None:
        super().__init__(mesh, {}, (), uses, remat)
        self._draws = draws

    def leaf(self, eqn: Equation, args: list[Any]) -> list[Any]:
        return self._draws.draw(eqn, args) or super().leaf(eqn, args)

    def _weight_operand(self, eqn: Equation) -> int | None:
        # A lookup's gradient needs no layout here; half-precision products are summed as elsewhere.
        return None if eqn.primitive.name == "gather" else super()._weight_operand(eqn)


class _WideLocal(_Local, WideOnMesh):
    """The same in float64."""


def _draws(classes: DimClasses) -> Iterator[tuple[Frame, Equation]]:
    """Yield the equations that draw random bits, with the frames they are in."""
    for frame in all_frames(classes.root):
        for eqn in frame.jaxpr.eqns:
            if eqn.primitive.name == "random_bits":
                yield frame, eqn
