"""Checks of the arguments of `mw.pipeline.Pipeline`, before anything is compiled."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from meshwright.config.argument_checks import check_count, check_kind, wrong_kind
from meshwright.errors import UserError, typed_line
from meshwright.mesh.axes import is_whole
from meshwright.mesh.build import Device, check_devices
from meshwright.pipeline.execute.slots import is_float
from meshwright.pipeline.schedule.schedules import Schedule, get_schedule
from meshwright.text.units import a_type, counted
from meshwright.trees import PyTree, check_num_samples
from meshwright.weighted import Weighted


def read_schedule(schedule: str | Schedule, num_chunks: int | None) -> Schedule:
    """Return a schedule by name, or the schedule itself, after checking its chunks."""
    if num_chunks is not None:
        check_count("num_chunks", num_chunks)
    fix = 'write schedule="1f1b", or the result of mw.pipeline.get_schedule'
    check_kind("schedule", schedule, (str, Schedule), fix)
    if isinstance(schedule, str):
        schedule = get_schedule(schedule, num_chunks or 2)
    if num_chunks is not None and schedule.num_chunks != num_chunks:
        raise UserError(
            f"num_chunks={num_chunks} does not go with schedule={schedule.name!r}",
            why=f"it has {counted(schedule.num_chunks, 'piece')} of the model on each stage",
            fix='leave num_chunks out, or write schedule="interleaved"',
        )
    return schedule


def read_devices(devices: Sequence[Device] | None) -> list[Device]:
    """Return the devices, all of them by default, after checking that none is listed twice."""
    check_devices(devices)
    listed = list(jax.devices() if devices is None else devices)
    for number, device in enumerate(listed):
        if device in listed[:number]:
            raise UserError(
                f"devices[{number}] is {device}, which is listed already",
                why="stages run at the same time, each on its own devices",
                fix="name each device once",
            )
    return listed


def check_seed(seed: object) -> None:
    """Refuse a seed that is not an integer."""
    if not is_whole(seed):
        raise wrong_kind("seed", seed, "write an integer")


def check_unused(states: PyTree) -> None:
    """Refuse optimizer states whose buffers an earlier step has reused."""
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(states)):
        raise UserError(
            "states were already used by an earlier step",
            why="a step reuses their memory for the new states it returns",
            fix="write loss, states = pipeline.update(optimizer, states, x, y)",
        )


def check_output(output: PyTree, samples: int) -> None:
    """Refuse an output whose microbatches cannot be concatenated along dim 0."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(output):
        if leaf.shape[:1] != (samples,):
            where = jax.tree_util.keystr(path)
            raise UserError(
                f"the output{f' {where}' if where else ''} has no samples in dim 0",
                why=f"it is {describe(leaf)} for a microbatch of {counted(samples, 'sample')}",
                fix="keep samples in dim 0; compute values of all samples together in the loss",
            )


def check_balance_by(balance_by: object) -> None:
    """Refuse anything but ``flops`` and ``memory``."""
    if balance_by not in ("flops", "memory"):
        raise UserError(
            f"stages cannot be balanced by {balance_by!r}",
            why="they can have about equal FLOPs, or parameters of about equal size",
            fix='write balance_by="flops" or balance_by="memory"',
        )


def check_division(
    num_layers: int, num_devices: int, schedule: Schedule, stages: int, microbatches: int
) -> None:
    """Refuse numbers of layers, devices, stages and microbatches that do not fit together."""
    chunks = schedule.num_chunks
    if num_layers < stages * chunks:
        pieces = f"{stages} stages" + (f" × {chunks} chunks" if chunks > 1 else "")
        most = num_layers // chunks
        smaller = f"write num_stages={most}" if most else 'write schedule="1f1b"'
        raise UserError(
            f"{counted(num_layers, 'layer')} cannot be divided into {pieces}",
            why=f"each of the {stages * chunks} pieces needs at least one layer",
            fix=f"{smaller}, or give at least {stages * chunks} layers",
        )
    if num_devices < stages:
        raise UserError(
            f"{stages} stages need at least {stages} devices",
            why=f"there are {num_devices}",
            fix=f"write num_stages={num_devices}",
        )
    schedule.shape(microbatches, stages)


def check_untraced(**values: PyTree) -> None:
    """Refuse to run inside a transformation of JAX, which has shapes but no values."""
    names = [
        name
        for name, value in values.items()
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))
    ]
    # Inside jax.jit even a constant is traced, whatever was passed to the pipeline.
    if names or isinstance(jnp.zeros(()), Tracer):
        verb = "are" if len(names) > 1 else "is"
        traced = f"; {' and '.join(names)} {verb} traced" if names else ""
        raise UserError(
            "a pipeline cannot run inside jax.jit, jax.grad or jax.vmap",
            why="its stages are separate programs on different devices, which cannot be part of "
            f"another program{traced}",
            fix="call it outside them; its stages are compiled anyway, and loss_and_gradients "
            "returns gradients",
        )


def count_samples(name: str, batch: PyTree) -> int:
    """Return the number of samples, which must be the same for all arrays of a batch."""
    leaves = jax.tree.leaves(batch)
    if not leaves:
        raise UserError(
            f"{name} has no arrays",
            why="it is divided into microbatches along dim 0 of its arrays",
            fix=f"pass arrays as {name}; for a loss without a target, pass x as the target",
        )
    if any(not getattr(leaf, "shape", ()) for leaf in leaves):
        raise UserError(
            f"{name} has a leaf that is not an array of samples",
            why="each of its leaves must be an array with samples in dim 0",
            fix=f"give {name} as numpy or JAX arrays",
        )
    named, _ = jax.tree_util.tree_flatten_with_path(batch)
    sizes = {name + jax.tree_util.keystr(path): leaf.shape[0] for path, leaf in named}
    return check_num_samples(sizes, name)


def describe(tree: PyTree) -> str:
    """Return the dtypes and shapes of arrays: ``float32[4, 6]``, with their keys if nested."""
    arrays: list[str] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = jnp.asarray(leaf) if np.isscalar(leaf) else leaf
        key = jax.tree_util.keystr(path, simple=True, separator=".")
        arrays.append(f"{key}: " * bool(key) + f"{array.dtype}{list(array.shape)}")
    return ", ".join(arrays) or "nothing"


def check_loss(loss: Callable[[PyTree, PyTree], object], output: PyTree, target: PyTree) -> None:
    """Refuse a loss that fails on these shapes, or that is not a scalar."""
    try:
        value = jax.eval_shape(loss, output, target)
    except Exception as error:
        raise UserError(
            "the loss fails",
            why=f"the output is {describe(output)}, the target {describe(target)}: "
            f"{typed_line(error)}",
            fix="write loss(output, target) for one microbatch of both",
        ) from error
    parts = (value.total, value.weight) if isinstance(value, Weighted) else (value,)
    scalar = all(getattr(p, "shape", None) == () for p in parts)
    if not scalar or not is_float(parts[0]):
        raise UserError(
            "the loss is not a float, so it has no gradient"
            if scalar
            else "the loss is not a scalar",
            why="loss(output, target) returns "
            + ("" if isinstance(value, jax.ShapeDtypeStruct) else f"{a_type(value)} of ")
            + describe(value),
            fix="return its mean over samples, or mw.Weighted(total, weight)",
        )


def check_per_stage(name: str, values: object, num_stages: int) -> list[PyTree]:
    """Return a list after checking that it has one element per stage (or per chunk)."""
    if not isinstance(values, list | tuple):
        raise UserError(
            f"{name} is of type {type(values).__name__}, not a list",
            fix=f"give {name} as a list of {num_stages}, one for each stage",
        )
    per_stage: list[PyTree] = list(values)
    if len(per_stage) != num_stages:
        raise UserError(
            f"{name} has {len(per_stage)} elements for {num_stages} stages",
            why="it needs one per stage, or one per chunk of each stage",
            fix=f"give a list of {num_stages}",
        )
    return per_stage


def check_like(name: str, new: PyTree, present: PyTree) -> None:
    """Refuse parameters of another structure or other shapes than the current ones."""
    if jax.tree.structure(new) != jax.tree.structure(present):
        raise UserError(
            f"{name} has another structure than the stage's parameters",
            fix="change the values in pipeline.params with jax.tree.map, not its structure",
        )
    for value, old in zip(jax.tree.leaves(new), jax.tree.leaves(present), strict=True):
        if np.shape(value) != old.shape:
            raise UserError(
                f"{name} has an array of shape {list(np.shape(value))} "
                f"for one of {list(old.shape)}",
                fix="give arrays of the same shapes",
            )
