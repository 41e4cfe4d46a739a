"""What a config asks the planner: the hardware, the batch, and what the user has set."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.config.batch import DEFAULT_MICRO_BATCH_SIZE
from meshwright.config.compose import Composed, parse_overrides
from meshwright.config.groups import GROUPS
from meshwright.config.origins import chosen_keys, trace_origins
from meshwright.config.schema import Config
from meshwright.errors import Setting
from meshwright.hardware import MEMORY_SHARE, Hardware
from meshwright.mesh.axes import AXES, BATCH_AXES, INFER
from meshwright.plan import mesh_sizes, precision, resolve_mesh
from meshwright.planner.search.candidates import Pins, PlanTask
from meshwright.text.units import counted


@dataclass(frozen=True)
class ConfigTask:
    """A task that follows from a config.

    Attributes:
        task: the task.
        remarks: what was assumed.
    """

    task: PlanTask
    remarks: tuple[str, ...] = ()


def set_by_user(config: Config, composed: Composed) -> set[str]:
    """Return the keys that the user has decided: by an override, a file, or a chosen group."""
    groups = {o.key_or_group for o in parse_overrides(composed.overrides)} & set(GROUPS)
    files = {f"{group}/{composed.choices[group]}.yaml" for group in groups & set(composed.choices)}
    of_groups = {o.key for o in trace_origins(config, composed) if o.detail in files}
    return chosen_keys(config, composed) | of_groups


def config_task(
    config: Config,
    decided: Collection[str],
    hardware: Hardware,
    *,
    memory_share: float = MEMORY_SHARE,
) -> ConfigTask:
    """Return what to plan for a config.

    Args:
        config: the config.
        decided: keys whose values are not to be changed.
        hardware: the devices.
        memory_share: the share of a device's memory that a plan may take.
    """
    pins = _pins(config, decided, hardware.count)
    batch, remarks = _global_batch(config, pins, hardware.count)
    return ConfigTask(
        PlanTask(
            hardware=hardware,
            global_batch_size=batch,
            pins=pins,
            sharding=config.sharding,
            precision=precision(config),
            matmul=config.precision.matmul,
            kernels=config.kernels,
            memory_share=memory_share,
        ),
        tuple(remarks),
    )


def _pins(config: Config, decided: Collection[str], num_devices: int) -> Pins:
    training, sharding, pipeline = config.training, config.sharding, config.pipeline

    def decided_value(key: str, value: Any) -> Any:
        return value if key in decided else None

    return Pins(
        mesh=_pinned_mesh(config, decided, num_devices),
        remat=decided_value("sharding.remat", sharding.remat),
        blocks=decided_value("sharding.blocks", sharding.blocks),
        micro_batch_size=None if training.micro_batch_size == "auto" else training.micro_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        sync_gradients_every=decided_value(
            "training.sync_gradients_every", training.sync_gradients_every
        ),
        schedule=decided_value("pipeline.schedule", pipeline.schedule),
        num_microbatches=pipeline.num_microbatches,
        num_chunks=decided_value("pipeline.num_chunks", pipeline.num_chunks),
    )


def _pinned_mesh(config: Config, decided: Collection[str], num_devices: int) -> Mapping[str, int]:
    """Return the sizes of axes that are given; a size of -1 says that the whole mesh is."""
    asked = mesh_sizes(config)
    given = {axis: asked[axis] for axis in AXES if f"mesh.{axis}" in decided}
    if config.model.mesh_shape is not None:
        given = asked
    if INFER not in given.values():
        return given
    return dict.fromkeys(AXES, 1) | resolve_mesh(asked, num_devices)


def _global_batch(config: Config, pins: Pins, num_devices: int) -> tuple[int, list[str]]:
    """Return the samples of an update: given, or as many as plain data parallelism would take."""
    given = config.training.global_batch_size
    if given is not None:
        return given, []
    fixed = math.prod(pins.mesh.get(axis, 1) for axis in AXES if axis not in BATCH_AXES)
    replicas = max(1, num_devices // fixed)
    micro = pins.micro_batch_size or DEFAULT_MICRO_BATCH_SIZE
    batch = micro * replicas * (pins.gradient_accumulation_steps or 1)
    each = counted(micro, "sample")
    setting = Setting("training.global_batch_size")
    return batch, [f"{setting} is not set; this is for {batch} samples, {each} per device"]
