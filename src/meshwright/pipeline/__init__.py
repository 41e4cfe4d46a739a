"""Pipeline parallelism: schedules, simulation, stages and the programs that run them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.distributed.gpipe import GPipePipeline, PipelineStage, pipeline_forward
    from meshwright.pipeline.pipeline import Pipeline
    from meshwright.pipeline.schedules import get_schedule

_HOMES = {
    "GPipePipeline": "meshwright.distributed.gpipe",
    "Pipeline": "meshwright.pipeline.pipeline",
    "PipelineStage": "meshwright.distributed.gpipe",
    "get_schedule": "meshwright.pipeline.schedules",
    "pipeline_forward": "meshwright.distributed.gpipe",
}

__all__ = ["GPipePipeline", "Pipeline", "PipelineStage", "get_schedule", "pipeline_forward"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    # Schedules are pure Python; only what needs JAX loads it.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
