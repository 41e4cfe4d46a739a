"""Checkpoints: a training state on disk by canonical path, read back on any mesh."""

from meshwright.checkpoint.export import export_safetensors, read_params
from meshwright.checkpoint.store import CheckpointStore, Passport, find_store

__all__ = ["CheckpointStore", "Passport", "export_safetensors", "find_store", "read_params"]
