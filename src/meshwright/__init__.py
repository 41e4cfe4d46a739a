"""Meshwright trains Flax NNX models on any mesh of devices."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.config.schema import Config, ShardingConfig
    from meshwright.mesh.build import abstract_mesh, build_mesh
    from meshwright.mesh.inspect import inspect_sharding, visualize_mesh
    from meshwright.mesh.simulate import simulate_devices
    from meshwright.plan import Plan
    from meshwright.sharding.shard import shard_fsdp
    from meshwright.trainer import Trainer
    from meshwright.verify import verify
    from meshwright.weighted import Weighted

_HOMES = {
    "Config": "meshwright.config.schema",
    "Plan": "meshwright.plan",
    "ShardingConfig": "meshwright.config.schema",
    "Trainer": "meshwright.trainer",
    "Weighted": "meshwright.weighted",
    "abstract_mesh": "meshwright.mesh.build",
    "build_mesh": "meshwright.mesh.build",
    "inspect_sharding": "meshwright.mesh.inspect",
    "shard_fsdp": "meshwright.sharding.shard",
    "simulate_devices": "meshwright.mesh.simulate",
    "visualize_mesh": "meshwright.mesh.inspect",
}

__all__ = [
    "Config",
    "Plan",
    "ShardingConfig",
    "Trainer",
    "Weighted",
    "abstract_mesh",
    "build_mesh",
    "inspect_sharding",
    "shard_fsdp",
    "simulate_devices",
    "verify",
    "visualize_mesh",
]


def __getattr__(name: str) -> Any:
    # Names load when first used, so that `import meshwright` and help texts stay instant.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "verify":
        return importlib.import_module("meshwright.verify")
    raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
