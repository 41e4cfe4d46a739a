"""Classes for custom training loops: meshes, data parallelism, placement, gradients, metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.runtime.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.config.distributed_config import DistributedBackend, DistributedConfig
    from meshwright.distributed.data_parallel import DataParallel
    from meshwright.distributed.device_placement import (
        DevicePlacement,
        HardwareType,
        distribute_batch,
        get_batch_size_recommendation,
        place_on_device,
    )
    from meshwright.distributed.distributed_trainer import Trainer
    from meshwright.distributed.gradient_accumulator import (
        GradientAccumulator,
        GradientAccumulatorConfig,
    )
    from meshwright.distributed.loss_scaler import DynamicLossScaler, DynamicLossScalerConfig
    from meshwright.distributed.mesh_manager import DeviceMeshManager
    from meshwright.distributed.metrics import DistributedMetrics
    from meshwright.distributed.multinode import setup_multinode
    from meshwright.hardware import BatchSizeRecommendation

_NAMES = {
    "BatchSizeRecommendation": "meshwright.hardware",
    "DataParallel": "meshwright.distributed.data_parallel",
    "DeviceMeshManager": "meshwright.distributed.mesh_manager",
    "DevicePlacement": "meshwright.distributed.device_placement",
    "DistributedBackend": "meshwright.config.distributed_config",
    "DistributedConfig": "meshwright.config.distributed_config",
    "DistributedMetrics": "meshwright.distributed.metrics",
    "DynamicLossScaler": "meshwright.distributed.loss_scaler",
    "DynamicLossScalerConfig": "meshwright.distributed.loss_scaler",
    "GradientAccumulator": "meshwright.distributed.gradient_accumulator",
    "GradientAccumulatorConfig": "meshwright.distributed.gradient_accumulator",
    "HardwareType": "meshwright.distributed.device_placement",
    "Trainer": "meshwright.distributed.distributed_trainer",
    "distribute_batch": "meshwright.distributed.device_placement",
    "get_batch_size_recommendation": "meshwright.distributed.device_placement",
    "place_on_device": "meshwright.distributed.device_placement",
    "setup_multinode": "meshwright.distributed.multinode",
}

__all__ = [
    "BatchSizeRecommendation", "DataParallel", "DeviceMeshManager", "DevicePlacement",
    "DistributedBackend", "DistributedConfig", "DistributedMetrics", "DynamicLossScaler",
    "DynamicLossScalerConfig", "GradientAccumulator", "GradientAccumulatorConfig", "HardwareType",
    "Trainer", "distribute_batch", "get_batch_size_recommendation", "place_on_device",
    "setup_multinode"
]  # fmt: skip


__getattr__, __dir__ = lazy_names(__name__, _NAMES)
