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

__all__ = [
    "BatchSizeRecommendation", "DataParallel", "DeviceMeshManager", "DevicePlacement",
    "DistributedBackend", "DistributedConfig", "DistributedMetrics", "DynamicLossScaler",
    "DynamicLossScalerConfig", "GradientAccumulator", "GradientAccumulatorConfig", "HardwareType",
    "Trainer", "distribute_batch", "get_batch_size_recommendation", "place_on_device",
    "setup_multinode"
]  # fmt: skip

__getattr__, __dir__ = lazy_names(__name__)
