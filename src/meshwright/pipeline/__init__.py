"""Pipeline parallelism: schedules, simulation, stages and the programs that run them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.pipeline.by_hand.gpipe import GPipePipeline, PipelineStage, pipeline_forward
    from meshwright.pipeline.by_hand.staged_pipeline import Pipeline
    from meshwright.pipeline.schedule.schedules import get_schedule

__all__ = ["GPipePipeline", "Pipeline", "PipelineStage", "get_schedule", "pipeline_forward"]

__getattr__, __dir__ = lazy_names(__name__)
