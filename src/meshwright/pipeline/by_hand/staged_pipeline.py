"""`Pipeline`: stages given as modules or functions, each on its own devices."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import AxisType, Mesh

from meshwright.config.argument_checks import (
    check_clip_norm,
    check_count,
    check_optimizer,
    check_takes,
)
from meshwright.config.microbatches import MICROBATCHES_PER_STAGE
from meshwright.errors import UserError
from meshwright.mesh.build import Device
from meshwright.pipeline.by_hand import stage_checks as checks
from meshwright.pipeline.by_hand.balance import balance, fewer_stages, timeline_of, unused_devices
from meshwright.pipeline.by_hand.gpipe import warn_of_relu
from meshwright.pipeline.by_hand.host import BatchRun
from meshwright.pipeline.by_hand.layer_forms import (
    Layer,
    Part,
    TracedPart,
    chain,
    read_part,
    to_default_device,
    trace,
)
from meshwright.pipeline.by_hand.layers import naming_layer, read_layers
from meshwright.pipeline.by_hand.stage_programs import (
    Loss,
    StagePrograms,
    copied,
    form_of_arrays,
    update_stages,
)
from meshwright.pipeline.execute.slots import MessageSplit
from meshwright.pipeline.schedule.advice import pipeline_warnings
from meshwright.pipeline.schedule.schedules import Schedule
from meshwright.pipeline.schedule.timeline_drawing import Timeline
from meshwright.text.units import counted, human_count
from meshwright.trees import PyTree, resize_batch


@dataclass(frozen=True)
class StageReport:
    """One stage: numbers of its layers, parameters, FLOPs of a forward pass, ids of its devices."""

    layers: tuple[int, ...]
    parameters: int
    flops: int
    devices: tuple[int, ...]

    def __str__(self) -> str:
        layers = f"layer {self.layers[0]}"
        if len(self.layers) > 1:
            layers = f"layers {self.layers[0]}–{self.layers[-1]}"
        devices = f"device{'s' * (len(self.devices) > 1)} {', '.join(map(str, self.devices))}"
        return (
            f"{layers}, {self.parameters:,} parameters, {human_count(self.flops)} FLOPs "
            f"a microbatch, {devices}"
        )


class Pipeline:
    """A model given as a list of layers, divided into stages on different devices.

    Nothing is padded: each stage is a program of its own, for its own shapes.

    Args:
        stages: NNX modules, Linen modules, functions of x, or pairs (function(params, x), params),
            in order; none twice. Neighbours are joined if there are more than ``num_stages``.
        loss: ``loss(output, target)``: a mean over samples, or `mw.Weighted`.
        example: a batch of inputs, as arrays or shapes; its values are not used.
        num_stages: number of stages; by default as many as devices or elements of ``stages``,
            whichever is smaller.
        schedule: gpipe, 1f1b, interleaved or zb_h1.
        num_microbatches: microbatches per batch; four per stage by default.
        num_chunks: pieces of the model on each stage, for interleaved; 2 by default.
        balance_by: balance stages by flops, or by the memory of parameters.
        devices: devices of the pipeline, all by default; each stage gets the same number and
            shards samples over them.
        seed: seed of the parameters of Linen modules.
    """

    def __init__(
        self,
        stages: Sequence[Layer],
        *,
        loss: Loss,
        example: PyTree,
        num_stages: int | None = None,
        schedule: str | Schedule = "1f1b",
        num_microbatches: int | None = None,
        num_chunks: int | None = None,
        balance_by: Literal["flops", "memory"] = "flops",
        devices: Sequence[Device] | None = None,
        seed: int = 0,
    ) -> None:
        for name, count in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
            if count is not None:
                check_count(name, count)
        checks.check_balance_by(balance_by)
        check_takes("loss", loss, ["output", "target"])
        checks.check_seed(seed)
        self._user_layers, self._devices = read_layers(stages), checks.read_devices(devices)
        warn_of_relu(self._user_layers)
        self.schedule = checks.read_schedule(schedule, num_chunks)
        chunks = self.schedule.num_chunks
        layers, available = len(self._user_layers), len(self._devices)
        self.num_stages = num_stages or min(layers // chunks or 1, available)
        self.num_microbatches = num_microbatches or MICROBATCHES_PER_STAGE * self.num_stages
        checks.check_division(
            layers, available, self.schedule, self.num_stages, self.num_microbatches
        )
        self._loss = loss
        size = -(-checks.count_samples("example", example) // self.num_microbatches)
        self._layers, traced = _read_all(self._user_layers, resize_batch(example, size), seed)
        # Layers without products still take some time.
        self._flops = [part.flops or 1 for part in traced]
        leaves = [jax.tree.leaves(part.params) for part in self._layers]
        sizes = [sum(array.nbytes for array in arrays) for arrays in leaves]
        self._costs = self._flops if balance_by == "flops" else sizes
        self._place(balance(self._costs, self.num_stages * chunks), traced)

    def _place(self, groups: Sequence[range], traced: Sequence[TracedPart]) -> None:
        """Turn each group of layers into a stage on its devices."""
        self._parts = [chain([self._layers[n] for n in group]) for group in groups]
        # All stages get the same number of devices; remaining ones are not used.
        each = len(self._devices) // self.num_stages
        own = [self._devices[n * each : (n + 1) * each] for n in range(self.num_stages)]
        meshes = [Mesh(np.array(group), ("data",), axis_types=(AxisType.Auto,)) for group in own]
        last = len(groups) - 1
        self._stages = [
            StagePrograms(
                part,
                meshes[number % self.num_stages],
                first=number == 0,
                loss=self._loss if number == last else None,
            )
            for number, part in enumerate(self._parts)
        ]
        self._params = [jax.device_put(s.part.params, s.everywhere) for s in self._stages]
        self._states = [jax.device_put(s.part.state, s.everywhere) for s in self._stages]
        self._evaluate = [jax.jit(part.evaluate) for part in self._parts]
        self.stages = [
            StageReport(
                tuple(group),
                sum(int(np.prod(a.shape)) for a in jax.tree.leaves(stage.part.params)),
                sum(traced[n].flops for n in group),
                tuple(int(device.id) for device in stage.mesh.devices.flat),
            )
            for group, stage in zip(groups, self._stages, strict=True)
        ]
        self._outputs = [MessageSplit.of(traced[group[-1]].output) for group in groups]
        self._most_kept = [0] * len(groups)
        self._checked_forms: set[Hashable] = set()

    def __call__(self, x: PyTree) -> PyTree:
        """Return the output for a batch of any size, in evaluation mode.

        NNX modules run as after ``eval()``: without dropout, with the statistics gathered so far.
        """
        checks.check_untraced(x=x)
        count = min(self.num_microbatches, checks.count_samples("x", x))
        inputs = self._split("x", x, count)
        self._check_fit(inputs[0])
        outputs: list[PyTree] = []
        for piece in inputs:
            for number, stage in enumerate(self._stages):
                piece = self._evaluate[number](
                    self._params[number], self._states[number], stage.put(piece)
                )
            checks.check_output(piece, jax.tree.leaves(inputs[len(outputs)])[0].shape[0])
            outputs.append(piece)
        return jax.tree.map(lambda *pieces: jnp.concatenate(pieces), *outputs)

    def loss_and_gradients(self, x: PyTree, target: PyTree) -> tuple[Array, list[PyTree]]:
        """Return the mean loss of a batch and, for each stage, the gradients of its parameters.

        Modules run in the mode they were given in, which is training unless you called ``eval()``.
        Their state, such as statistics and random streams, carries over from batch to batch.
        """
        checks.check_untraced(x=x, target=target)
        samples, targets = checks.count_samples("x", x), checks.count_samples("target", target)
        if samples != targets:
            raise UserError(
                f"x has {counted(samples, 'sample')}, target {targets}",
                why="both are divided into the same microbatches, along dim 0",
                fix="pass one target for each sample",
            )
        count = self.num_microbatches
        inputs, expected = self._split("x", x, count), self._split("target", target, count)
        self._check_fit(inputs[0], expected[0])
        run = BatchRun(self._stages, self._outputs, self._params, self._states, inputs, expected)
        run.run(self.schedule)
        self._states = run.states
        self._most_kept = list(map(max, self._most_kept, run.most_kept))
        weight = np.asarray(sum(run.weights[1:], start=run.weights[0]))
        weight = weight if weight else np.ones_like(weight)
        scaled = jax.tree.map(
            lambda g, p: (g / weight.astype(g.dtype)).astype(p.dtype), run.sums, self._params
        )
        return sum(run.totals[1:], start=run.totals[0]) / weight, scaled

    def init(self, optimizer: optax.GradientTransformation) -> list[PyTree]:
        """Return an optax optimizer's state for each stage, on the stage's devices."""
        check_optimizer(optimizer)
        return [
            jax.jit(lambda params: copied(optimizer.init(params)), out_shardings=s.everywhere)(own)
            for s, own in zip(self._stages, self._params, strict=True)
        ]

    def update(
        self,
        optimizer: optax.GradientTransformation,
        states: Sequence[PyTree],
        x: PyTree,
        target: PyTree,
        *,
        clip_norm: float | None = None,
    ) -> tuple[Array, list[PyTree]]:
        """Train on a batch; return its loss before the step, and the optimizer's new states.

        Args:
            optimizer: any optax transformation. It sees the leaves of one stage at a time.
            states: what `init` or the previous call returned; they cannot be reused.
            x: inputs, samples in dim 0.
            target: targets of the loss, as many samples.
            clip_norm: largest norm of the gradients of all stages together.
        """
        check_optimizer(optimizer)
        check_clip_norm(clip_norm)
        states = checks.check_per_stage("states", states, len(self._stages))
        checks.check_untraced(states=states)
        checks.check_unused(states)
        loss, gradients = self.loss_and_gradients(x, target)
        self._params, after = update_stages(
            optimizer, self._stages, gradients, states, self._params, clip_norm
        )
        return loss, after

    @property
    def params(self) -> list[PyTree]:
        """Each stage's parameters, on its own devices."""
        return self._params

    @params.setter
    def params(self, values: Sequence[PyTree]) -> None:
        new_params = checks.check_per_stage("params", values, len(self._stages))
        checks.check_untraced(params=values)
        for number, (new, present) in enumerate(zip(new_params, self._params, strict=True)):
            checks.check_like(f"params[{number}]", new, present)
        pairs = zip(new_params, self._stages, strict=True)
        self._params = [jax.device_put(value, stage.everywhere) for value, stage in pairs]

    def modules(self) -> list[Layer]:
        """Return the layers as in ``stages`` with their current values, on the default device.

        A Linen module is returned bound to its values: call it, or use ``unbind()``.
        """
        return [
            layer
            for part, params, state in zip(self._parts, self._params, self._states, strict=True)
            for layer in part.rebuild(*jax.tree.map(to_default_device, (params, state)))
        ]

    def timeline(self) -> Timeline:
        """Return when each stage works, simulated from the FLOPs of the stages."""
        shape = self.schedule.shape(self.num_microbatches, self.num_stages)
        return timeline_of(self.schedule, shape, self._stage_flops())

    def warnings(self) -> list[str]:
        """Return suggested changes, one sentence each."""
        shape = self.schedule.shape(self.num_microbatches, self.num_stages)
        warnings = pipeline_warnings(
            self.schedule,
            self.num_microbatches,
            self.num_stages,
            self._stage_flops(),
            bubble=self.timeline().bubble,
            remedy=fewer_stages(self._costs, self._flops, shape, self.schedule),
        )
        unused = unused_devices(
            len(self._devices), self.num_stages, len(self._user_layers) // self.schedule.num_chunks
        )
        return warnings + ([unused] if unused else [])

    @property
    def most_kept(self) -> list[int]:
        """The largest number of microbatches in memory so far, by stage and chunk."""
        return list(self._most_kept)

    def __repr__(self) -> str:
        chunks = self.schedule.num_chunks
        pieces = f" × {chunks} chunks" if chunks > 1 else ""
        lines = [
            f"Pipeline: {counted(self.num_stages, 'stage')}{pieces}, {self.schedule.name} with "
            f"{counted(self.num_microbatches, 'microbatch')}"
        ]
        for number, stage in enumerate(self.stages):
            chunk, of = divmod(number, self.num_stages)
            name = f"stage {of}" + (f", chunk {chunk}" if chunks > 1 else "")
            lines.append(f"  {name}: {stage}")
        return "\n".join(lines)

    def _stage_flops(self) -> list[int]:
        count = self.num_stages
        return [sum(each.flops for each in self.stages[n::count]) for n in range(count)]

    def _check_fit(self, x: PyTree, target: PyTree = None) -> None:
        """Raise if layers or loss fail on these shapes, which are checked once."""
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (x, target))
        if (key := form_of_arrays(shapes)) in self._checked_forms:
            return
        x, target = shapes
        for number, (layer, part) in enumerate(zip(self._user_layers, self._layers, strict=True)):
            with naming_layer(number, layer, x):
                x = trace(part, x).output
        if target is not None:
            checks.check_loss(self._loss, x, target)
        self._checked_forms.add(key)

    def _split(self, name: str, batch: PyTree, count: int) -> list[PyTree]:
        """Split a batch into microbatches of nearly equal size; no sample is left out."""
        leaves, tree = jax.tree.flatten(batch)
        samples = leaves[0].shape[0]
        if samples < count:
            groups = self.num_stages if self.schedule.num_chunks > 1 else 1
            fits = samples // groups * groups
            smaller = f"write num_microbatches={fits}, or " if fits else ""
            raise UserError(
                f"{counted(samples, 'sample')} cannot be divided into {count} microbatches",
                why=f"{name} has fewer samples than there are microbatches",
                fix=f"{smaller}pass more samples",
            )
        pieces = [np.array_split(np.asarray(leaf), count) for leaf in leaves]
        return [jax.tree.unflatten(tree, list(each)) for each in zip(*pieces, strict=True)]


def _read_all(layers: Sequence[Layer], x: PyTree, seed: int) -> tuple[list[Part], list[TracedPart]]:
    parts: list[Part] = []
    traced: list[TracedPart] = []
    for number, layer in enumerate(layers):
        with naming_layer(number, layer, x):
            parts.append(read_part(layer, x, jax.random.fold_in(jax.random.key(seed), number)))
            traced.append(trace(parts[-1], x))
        x = traced[-1].output
    return parts, traced
