"""Meshwright trains Flax NNX models on any mesh of devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright import pipeline
    from meshwright.checkpoint import export_safetensors, read_params
    from meshwright.config.lora_section import LoRA
    from meshwright.config.schema import (
        CheckpointConfig,
        Config,
        PipelineConfig,
        ShardingConfig,
        TrackingConfig,
    )
    from meshwright.data.arrays import ArraySource
    from meshwright.data.chat_source import ChatData
    from meshwright.data.mixture import mix
    from meshwright.data.preference import PreferenceData
    from meshwright.data.samples import Samples
    from meshwright.data.text_source import TextData
    from meshwright.errors import UserError
    from meshwright.generation.generate import generate
    from meshwright.ledgers import ledger
    from meshwright.mesh.build import abstract_mesh, build_mesh
    from meshwright.mesh.inspect import inspect_sharding, visualize_mesh
    from meshwright.mesh.simulate import simulate_devices
    from meshwright.plan import Plan
    from meshwright.program.trace.adapters import reference
    from meshwright.proof import verify
    from meshwright.sharding.shard import shard_fsdp
    from meshwright.tasks.dpo import DPO
    from meshwright.tasks.grpo import GRPO
    from meshwright.trainer import Callback, EarlyStopping, StopReason, Trainer
    from meshwright.trainer.incidents.replay import replay
    from meshwright.trainer.trained.export_hf import export_hf
    from meshwright.trainer.trained.export_peft import export_peft
    from meshwright.trainer.trained.load_model import load_model
    from meshwright.weighted import Weighted
    from meshwright.weights.hf_model import hf_model

__all__ = [
    "DPO",
    "GRPO",
    "ArraySource",
    "Callback",
    "ChatData",
    "CheckpointConfig",
    "Config",
    "EarlyStopping",
    "LoRA",
    "PipelineConfig",
    "Plan",
    "PreferenceData",
    "Samples",
    "ShardingConfig",
    "StopReason",
    "TextData",
    "TrackingConfig",
    "Trainer",
    "UserError",
    "Weighted",
    "abstract_mesh",
    "build_mesh",
    "export_hf",
    "export_peft",
    "export_safetensors",
    "generate",
    "hf_model",
    "inspect_sharding",
    "ledger",
    "load_model",
    "mix",
    "pipeline",
    "read_params",
    "reference",
    "replay",
    "shard_fsdp",
    "simulate_devices",
    "verify",
    "visualize_mesh",
]

__getattr__, __dir__ = lazy_names(__name__)
