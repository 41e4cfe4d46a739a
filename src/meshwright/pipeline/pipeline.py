"""Pipelines of stages that differ: modules or functions, each stage on its own devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from meshwright.errors import UserError
from meshwright.pipeline.advice import pipeline_warnings
from meshwright.pipeline.balance import balance
from meshwright.pipeline.operations import Times
from meshwright.pipeline.parts import Part, chain, read_part, shape_after
from meshwright.pipeline.schedules import Schedule, get_schedule
from meshwright.pipeline.separate import Host, Loss, Stage, output_tree
from meshwright.pipeline.timeline import Timeline, simulate
from meshwright.program.flops import forward_flops


@dataclass(frozen=True)
class StageReport:
    """What one stage has.

    Attributes:
        layers: numbers of the layers it runs.
        parameters: how many numbers it trains.
        flops: products of one microbatch's forward pass.
        devices: ids of its devices.
    """

    layers: tuple[int, ...]
    parameters: int
    flops: int
    devices: tuple[int, ...]


class Pipeline:
    """A model given as a list of layers, divided into stages on different devices.

    Nothing is padded: each stage is a program of its own, for its own shapes.

    Args:
        stages: NNX modules, Linen modules, functions of x, or pairs (function(params, x), params),
            in order. Neighbours are joined if there are more than ``num_stages``.
        loss: ``loss(output, target)``: a mean over samples, or `mw.Weighted`.
        example: a batch of inputs, as arrays or shapes; its values are not used.
        num_stages: how many stages; all devices, or one for each element of ``stages``.
        schedule: gpipe, 1f1b, interleaved or zb_h1.
        num_microbatches: microbatches per batch; four per stage by default.
        num_chunks: pieces of the model on each stage, for interleaved.
        balance_by: what stages should have equal amounts of: flops or memory.
        devices: where; all devices by default. Each stage has as many, for different samples.
        seed: of the parameters of Linen modules.
    """

    def __init__(
        self,
        stages: Sequence[Any],
        *,
        loss: Loss,
        example: Any,
        num_stages: int | None = None,
        schedule: str | Schedule = "1f1b",
        num_microbatches: int | None = None,
        num_chunks: int = 2,
        balance_by: Literal["flops", "memory"] = "flops",
        devices: Sequence[Any] | None = None,
        seed: int = 0,
    ) -> None:
        devices = list(devices) if devices is not None else jax.devices()
        self.schedule = (
            schedule if isinstance(schedule, Schedule) else get_schedule(schedule, num_chunks)
        )
        chunks = self.schedule.num_chunks
        self.num_stages = num_stages or min(len(stages) // chunks or 1, len(devices))
        self.num_microbatches = num_microbatches or 4 * self.num_stages
        x = self._microbatch_shape(example)
        parts, costs = _read_all(stages, x, seed, balance_by)
        groups = balance(costs, self.num_stages * chunks)
        self._parts = [chain([parts[n] for n in group]) for group in groups]
        meshes = _divide_devices(devices, self.num_stages)
        last = len(groups) - 1
        self._stages = [
            Stage(
                part,
                meshes[number % self.num_stages],
                first=number == 0,
                loss=loss if number == last else None,
            )
            for number, part in enumerate(self._parts)
        ]
        self._params = [jax.device_put(s.part.params, s.everywhere) for s in self._stages]
        self._states = [jax.device_put(s.part.state, s.everywhere) for s in self._stages]
        self._apply = [jax.jit(part.apply) for part in self._parts]
        trees: list[Any] = []
        self.stages: list[StageReport] = []
        for group, part, stage in zip(groups, self._parts, self._stages, strict=True):
            self.stages.append(_report(group, part, stage.mesh, x))
            x = shape_after(part, x)
            trees.append(output_tree(x))
        self._host = Host(self._stages, self.schedule, trees)

    def __call__(self, x: Any) -> Any:
        """Return the output for a batch, its microbatches passing through the stages."""
        outputs: list[Any] = []
        for piece in self._split(x):
            for number, stage in enumerate(self._stages):
                piece, _ = self._apply[number](
                    self._params[number], self._states[number], stage.put(piece)
                )
            outputs.append(piece)
        return jax.tree.map(lambda *pieces: jnp.concatenate(pieces), *outputs)

    def loss_and_gradients(self, x: Any, target: Any) -> tuple[Any, list[Any]]:
        """Return the mean loss of a batch and, for each stage, the gradients of its parameters."""
        inputs, targets = self._split(x), self._split(target)
        found = self._host.run(self._params, self._states, inputs, targets)
        self._states = found.states
        weight = np.asarray(found.weight)
        weight = weight if weight else np.ones_like(weight)
        scaled = [jax.tree.map(lambda g: g / weight.astype(g.dtype), g) for g in found.gradients]
        return found.total / weight, scaled

    @property
    def params(self) -> list[Any]:
        """Each stage's parameters, on its own devices."""
        return self._params

    @params.setter
    def params(self, values: Sequence[Any]) -> None:
        pairs = zip(values, self._stages, strict=True)
        self._params = [jax.device_put(value, stage.everywhere) for value, stage in pairs]

    def modules(self) -> list[Any]:
        """Return what ``stages`` was, with the values it has now."""
        pairs = zip(self._parts, self._params, self._states, strict=True)
        return [layer for part, params, state in pairs for layer in part.rebuild(params, state)]

    def timeline(self) -> Timeline:
        """Return when each stage works, simulated from its FLOPs."""
        shape = self.schedule.shape(self.num_microbatches, self.num_stages)
        costs = self._costs()
        mean = sum(costs) / len(costs) or 1
        times = Times(scale=tuple(Fraction(cost) / Fraction(mean) for cost in costs))
        return simulate(
            self.schedule.operations(self.num_microbatches, self.num_stages), shape, times
        )

    def warnings(self) -> list[str]:
        """Return what is worth changing, one sentence each."""
        return pipeline_warnings(
            self.schedule, self.num_microbatches, self.num_stages, self._costs()
        )

    @property
    def most_kept(self) -> list[int]:
        """The most microbatches each stage has kept at a time so far."""
        return list(self._host.most_kept)

    def _costs(self) -> list[int]:
        costs = [0] * self.num_stages
        for number, stage in enumerate(self.stages):
            costs[number % self.num_stages] += stage.flops
        return costs

    def _microbatch_shape(self, example: Any) -> Any:
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(
                (-(-a.shape[0] // self.num_microbatches), *a.shape[1:]), a.dtype
            ),
            example,
        )

    def _split(self, batch: Any) -> list[Any]:
        """Divide a batch into microbatches of nearly equal size; no sample is left out."""
        leaves, tree = jax.tree.flatten(batch)
        if leaves[0].shape[0] < self.num_microbatches:
            raise UserError(
                f"{leaves[0].shape[0]} samples cannot be divided into {self.num_microbatches} "
                "microbatches",
                fix=f"write num_microbatches={leaves[0].shape[0]}, or give more samples",
            )
        pieces = [np.array_split(np.asarray(leaf), self.num_microbatches) for leaf in leaves]
        return [jax.tree.unflatten(tree, list(each)) for each in zip(*pieces, strict=True)]


def _read_all(
    given: Sequence[Any], x: Any, seed: int, balance_by: str
) -> tuple[list[Part], list[float]]:
    parts: list[Part] = []
    costs: list[float] = []
    for number, layer in enumerate(given):
        part = read_part(layer, x, jax.random.fold_in(jax.random.key(seed), number))
        parts.append(part)
        bytes_ = sum(a.nbytes for a in jax.tree.leaves(part.params))
        # Layers without products still take some time.
        costs.append(float(bytes_ if balance_by == "memory" else _flops(part, x) or 1))
        x = shape_after(part, x)
    return parts, costs


def _flops(part: Part, x: Any) -> int:
    closed = jax.make_jaxpr(lambda p, s, x: part.apply(p, s, x)[0])(part.params, part.state, x)
    return forward_flops(closed.jaxpr)


def _report(group: range, part: Part, mesh: Mesh, x: Any) -> StageReport:
    parameters = sum(int(np.prod(a.shape)) for a in jax.tree.leaves(part.params))
    ids = tuple(int(device.id) for device in mesh.devices.flat)
    return StageReport(tuple(group), parameters, _flops(part, x), ids)


def _divide_devices(devices: Sequence[Any], num_stages: int) -> list[Mesh]:
    if len(devices) < num_stages:
        raise UserError(
            f"{num_stages} stages need as many devices",
            why=f"there are {len(devices)}",
            fix=f"write num_stages={len(devices)}",
        )
    each = len(devices) // num_stages
    groups = [devices[n * each : (n + 1) * each] for n in range(num_stages)]
    return [Mesh(np.array(group), ("data",), axis_types=(AxisType.Auto,)) for group in groups]
