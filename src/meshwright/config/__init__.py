"""Config: the schema of a run, its composition with Hydra, and where each value comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.config.distributed import DistributedConfig
    from meshwright.config.schema import Config

__all__ = ["Config", "DistributedConfig"]

_HOMES = {
    "Config": "meshwright.config.schema",
    "DistributedConfig": "meshwright.config.distributed",
}


def __getattr__(name: str) -> Any:
    # Loaded when first used, so that help texts do not wait for pydantic.
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(name)
