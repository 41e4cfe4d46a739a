"""Loading weights into the sharded arrays of a step: each device's slice is read alone."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from meshwright.program.trace.adapters import PREFIX
from meshwright.program.trace.layout import StepLeaf
from meshwright.step.assemble import Assembled
from meshwright.step.state import TrainState
from meshwright.weights.hf_folder import Folder
from meshwright.weights.match import Weights, find_weights
from meshwright.weights.views import Range


def weights_of(folder: Folder, assembled: Assembled) -> Weights:
    """Find the model's weights in a folder; nothing but headers is read."""
    leaves = assembled.traced.layout.leaves
    own = [leaf for leaf in leaves if leaf.is_weight and not leaf.path.startswith(PREFIX)]
    return find_weights(folder, {leaf.path: leaf.shape for leaf in own})


def load_state(weights: Weights, assembled: Assembled, seed: int) -> TrainState:
    """Return the initial state with these weights; the seed is that of dropout and the like."""
    layout, decision = assembled.traced.layout, assembled.decision
    arrays: dict[int, Any] = {}
    for number, step in enumerate(layout.step_leaves):
        if step.leaf.is_weight and not step.leaf.path.startswith(PREFIX):
            sharding = NamedSharding(assembled.mesh, decision.at_rest[number].spec)
            paths = [layout.leaves[source].path for source in step.sources]
            read = partial(_read_piece, weights, step, paths)
            arrays[number] = _load(step.leaf.shape, sharding, read)
    return assembled.init(seed, given=arrays)


def load_array(weights: Weights, path: str, struct: jax.ShapeDtypeStruct) -> jax.Array:
    """Return one of the model's arrays with the format and the sharding of ``struct``."""
    sharding: Any = struct.sharding
    return _load(struct.shape, sharding, lambda ranges: weights.read(path, ranges, struct.dtype))


def _load(
    shape: tuple[int, ...],
    sharding: NamedSharding,
    read: Callable[[tuple[Range, ...]], NDArray[Any]],
) -> jax.Array:
    """Return an array of which only this process's slices are read."""
    devices: dict[tuple[Range, ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        ranges = tuple(
            each.indices(size)[:2] for each, size in zip(index or (), shape, strict=True)
        )
        devices.setdefault(ranges, []).append(device)
    pieces: list[jax.Array] = []
    for ranges, holders in devices.items():
        piece = read(ranges)
        # A copy: a step cannot donate memory that belongs to NumPy.
        pieces += [jax.device_put(piece, holder, may_alias=False) for holder in holders]
        jax.block_until_ready(pieces[-len(holders) :])
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def _read_piece(
    weights: Weights, step: StepLeaf, paths: Sequence[str], ranges: Sequence[Range]
) -> NDArray[Any]:
    if not step.stacked:
        return weights.read(paths[0], ranges, step.leaf.dtype)
    rows = step.rows or tuple(range(len(paths)))
    wanted = rows[slice(*ranges[0])]
    piece = np.empty([stop - start for start, stop in ranges], step.leaf.dtype)
    for row, source in enumerate(wanted):
        piece[row] = weights.read(paths[source], ranges[1:], step.leaf.dtype)
    return piece
