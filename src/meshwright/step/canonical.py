"""The canonical form of a training state: arrays by path, independent of mesh and layout."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.compiled.memory import memory_stats
from meshwright.processes import agree
from meshwright.step.assemble import Assembled, piece_sharding
from meshwright.step.state import LossScale, TrainState, all_finite
from meshwright.trees import from_key_data, is_key, key_data, placed_struct

SPARE_SHARE = 0.05
"""Of a device's memory, what a copy of the state leaves free: free memory may be in pieces."""

CanonicalState = dict[str, dict[str, Any]]
"""Arrays by group (params, state, optimizer, counters) and canonical path, as on disk."""


@dataclass(frozen=True)
class Snapshot:
    """A copy of a state in canonical form.

    It is finite if the trained parameters are, and nothing else is NaN. Infinities are allowed
    there: masks and optimizers have them.
    """

    arrays: CanonicalState
    finite: Array


_Split = Callable[[Any], list[Any]]
_Join = Callable[[list[Any]], Any]


class CanonicalForm:
    """Converts between a step's state and its canonical form.

    ``base`` are the paths of the weights that training does not change, which are saved apart.
    """

    def __init__(self, assembled: Assembled) -> None:
        self.base = assembled.unchanged
        self._step = assembled.step
        self._layout = assembled.traced.layout
        self._mesh = assembled.mesh
        self._optimizer = [
            self._optimizer_pieces(n) for n in range(len(self._step.optimizer.leaves))
        ]
        abstract = jax.eval_shape(self._from_state, self._step.abstract_state)
        whole = jax.eval_shape(self._all_leaves, self._step.abstract_state)
        self._shardings = shardings = self._make_shardings(whole)
        self.base_structs: dict[str, Any] = {
            path: placed_struct(whole["state"][path], shardings["state"].pop(path))
            for path in self.base
        }
        self.structs: CanonicalState = jax.tree.map(placed_struct, abstract, shardings)
        self._copy_programs: dict[bool, Any] = {}
        self._beside: float = math.inf
        self._here: bool | None = None
        self._place = jax.jit(
            self._to_state, donate_argnums=0, out_shardings=self._step.shardings.state
        )

    def copy(self, state: TrainState) -> CanonicalState:
        """Return a copy of the state in canonical form; see `snapshot`."""
        return self.snapshot(state).arrays

    def snapshot(self, state: TrainState) -> Snapshot:
        """Return a copy of the state in canonical form, so that the next step may donate it.

        On accelerators the copy is in host memory unless they have room for it. The next step waits
        for the copy: milliseconds on the device, and to the host as long as the link takes.
        """
        if self._here is None:
            # By now a step has run, and shown what it needs.
            self._here = self._has_room()
        return Snapshot(*self._copy_program(here=self._here)(state))

    def prepare(self, beside: int | None) -> None:
        """Compile the program of `snapshot` ahead, so that the first is as fast as the others.

        ``beside`` are the bytes that a step needs on a device besides its state, if that is known.
        """
        self._beside = math.inf if beside is None else beside
        self._copy_program(here=self._has_room())

    def _copy_program(self, *, here: bool) -> Any:
        if here not in self._copy_programs:
            shardings = self._shardings
            if not here:
                shardings = jax.tree.map(lambda s: s.with_memory_kind("pinned_host"), shardings)
            copy = jax.jit(
                lambda state: (self._from_state(state), _is_finite(state)),
                out_shardings=(shardings, NamedSharding(self._mesh, PartitionSpec())),
            )
            self._copy_programs[here] = copy.lower(self._step.abstract_state).compile()
        return self._copy_programs[here]

    def _has_room(self) -> bool:
        """Whether every device can hold a copy of the state beside whatever has run so far."""
        devices = [d for d in self._mesh.devices.flat if d.process_index == jax.process_index()]
        if devices[0].platform == "cpu":
            return True
        leaves = jax.tree.leaves(self.structs)
        copy = sum(math.prod(s.sharding.shard_shape(s.shape)) * s.dtype.itemsize for s in leaves)
        free = (_free_bytes(device, self._beside) for device in devices)
        return agree(all(size >= copy for size in free), "all")

    def base_arrays(self, state: TrainState) -> dict[str, Any]:
        """Return copies of the weights that are saved apart, by path."""
        if not self.base:
            return {}
        shardings = {path: struct.sharding for path, struct in self.base_structs.items()}

        def copy(state: TrainState) -> dict[str, Any]:
            whole = self._all_leaves(state)["state"]
            return {path: jnp.copy(whole[path]) for path in self.base}

        return jax.jit(copy, out_shardings=shardings)(state)

    def state(self, canonical: CanonicalState, base: Mapping[str, Any] | None = None) -> TrainState:
        """Return the state of a canonical form, which is donated, and of the base saved apart."""
        if base:
            canonical = {**canonical, "state": {**canonical["state"], **base}}
        with warnings.catch_warnings():
            # The rows of a stack are donated, but their buffers are too small for the stack.
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return self._place(canonical)

    def _from_state(self, state: TrainState) -> CanonicalState:
        groups = self._all_leaves(state)
        for path in self.base:
            del groups["state"][path]
        # Without a copy, the compiled program could return the buffers of the state itself.
        return jax.tree.map(jnp.copy, groups)

    def _all_leaves(self, state: TrainState) -> CanonicalState:
        values = self._layout.to_canonical(self._step.leaf_values(state))
        groups: CanonicalState = {"params": {}, "state": {}, "optimizer": {}, "counters": {}}
        for leaf, value in zip(self._layout.leaves, values, strict=True):
            groups["params" if leaf.role == "param" else "state"][leaf.path] = key_data(value)
        for (paths, split, _), value in zip(self._optimizer, state.optimizer, strict=True):
            groups["optimizer"].update(zip(paths, map(key_data, split(value)), strict=True))
        groups["counters"]["step"] = state.step
        if state.loss_scale is not None:
            groups["counters"] |= vars(state.loss_scale)
        return groups

    def _to_state(self, groups: CanonicalState) -> TrainState:
        own = {**groups["params"], **groups["state"]}
        values = [from_key_data(own[leaf.path], leaf.dtype) for leaf in self._layout.leaves]
        fresh = self._step.fresh_state(self._layout.from_canonical(values))
        counters = dict(groups["counters"])
        step = counters.pop("step")
        return TrainState(
            params=fresh.params,
            model_state=fresh.model_state,
            optimizer=[
                from_key_data(join([groups["optimizer"][path] for path in paths]), described.dtype)
                for (paths, _, join), described in zip(
                    self._optimizer, self._step.optimizer.leaves, strict=True
                )
            ],
            step=step,
            loss_scale=LossScale(**counters) if fresh.loss_scale is not None else None,
            halted=fresh.halted,
        )

    def _optimizer_pieces(self, number: int) -> tuple[list[str], _Split, _Join]:
        """Return the canonical paths of an optimizer leaf, and how to split and join it."""
        leaf = self._step.optimizer.leaves[number]
        if not math.prod(leaf.shape):
            # Orbax saves no empty arrays, such as GaLore's projections of biases.
            return [], lambda value: [], lambda pieces: jnp.zeros(leaf.shape, leaf.dtype)
        step = None if leaf.param is None else self._layout.select("param")[leaf.param]
        if step is None or not step.stacked or not leaf.path.endswith(step.leaf.path):
            return [leaf.path], lambda value: [value], lambda pieces: pieces[0]
        before = leaf.path.removesuffix(step.leaf.path)
        paths = [before + self._layout.leaves[source].path for source in step.sources]
        return paths, step.split, step.join

    def _make_shardings(self, abstract: CanonicalState) -> Any:
        replicated = NamedSharding(self._mesh, PartitionSpec())
        shardings: Any = jax.tree.map(lambda _: replicated, abstract)
        decision = self._step.decision
        for step, placement in zip(self._layout.step_leaves, decision.at_rest, strict=True):
            for source in step.sources:
                leaf = self._layout.leaves[source]
                group = "params" if leaf.role == "param" else "state"
                if is_key(leaf.dtype):
                    continue
                shardings[group][leaf.path] = piece_sharding(self._mesh, placement, step)
        for (paths, _, _), leaf in zip(self._optimizer, self._step.optimizer.leaves, strict=True):
            owner = None if leaf.param is None else self._layout.select("param")[leaf.param]
            split = owner if owner is not None and len(paths) > 1 else None
            sharding = piece_sharding(self._mesh, leaf.placement, split)
            shardings["optimizer"] |= dict.fromkeys(paths, sharding)
        return shardings


def _free_bytes(device: Any, beside: float) -> float:
    """Return what is left of a device's memory when as much is used as ever before."""
    stats = memory_stats(device)
    used = max(stats.get("bytes_in_use", 0) + beside, stats.get("peak_bytes_in_use", 0))
    return stats.get("bytes_limit", 0) * (1 - SPARE_SHARE) - used


def _is_finite(state: TrainState) -> Array:
    others = jax.tree.leaves((state.model_state, state.optimizer))
    floats = [x for x in others if jnp.issubdtype(x.dtype, jnp.floating)]
    numbers = jnp.array([~jnp.isnan(leaf).any() for leaf in floats], bool)
    return all_finite(state.params) & numbers.all()
