"""Checkpoints: training states on disk by canonical path, restored on any mesh."""

from meshwright.checkpoint.export import export_safetensors, read_params
from meshwright.checkpoint.metadata import CheckpointMetadata
from meshwright.checkpoint.reader import FOLDER, CheckpointReader, find_store
from meshwright.checkpoint.store import CheckpointStore

__all__ = [
    "FOLDER",
    "CheckpointMetadata",
    "CheckpointReader",
    "CheckpointStore",
    "export_safetensors",
    "find_store",
    "read_params",
]
