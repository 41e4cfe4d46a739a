"""Pipeline parallelism: schedules, simulation, stages and the programs that run them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.pipeline.by_hand.gpipe import GPipePipeline, PipelineStage, pipeline_forward
    from meshwright.pipeline.by_hand.staged_pipeline import Pipeline
    from meshwright.pipeline.schedule.schedules import get_schedule

_NAMES = {
    "GPipePipeline": "meshwright.pipeline.by_hand.gpipe",
    "Pipeline": "meshwright.pipeline.by_hand.staged_pipeline",
    "PipelineStage": "meshwright.pipeline.by_hand.gpipe",
    "get_schedule": "meshwright.pipeline.schedule.schedules",
    "pipeline_forward": "meshwright.pipeline.by_hand.gpipe",
}

__all__ = ["GPipePipeline", "Pipeline", "PipelineStage", "get_schedule", "pipeline_forward"]


__getattr__, __dir__ = lazy_names(__name__, _NAMES)
