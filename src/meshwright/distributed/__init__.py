"""The class-based interface to meshes, data parallelism, placement and metrics."""

from meshwright.distributed.data_parallel import DataParallel
from meshwright.distributed.device_placement import DevicePlacement
from meshwright.distributed.hardware_type import HardwareType
from meshwright.distributed.mesh_manager import DeviceMeshManager
from meshwright.distributed.metrics import DistributedMetrics
from meshwright.distributed.multinode import setup_multinode
from meshwright.hardware import BatchSizeRecommendation

__all__ = [
    "BatchSizeRecommendation",
    "DataParallel",
    "DeviceMeshManager",
    "DevicePlacement",
    "DistributedMetrics",
    "HardwareType",
    "setup_multinode",
]
