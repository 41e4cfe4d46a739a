"""The config of a run: its schema, composition with Hydra, and the origin of each value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.config.distributed_config import DistributedBackend, DistributedConfig
    from meshwright.config.schema import Config

__all__ = ["Config", "DistributedBackend", "DistributedConfig"]

__getattr__, __dir__ = lazy_names(__name__)
