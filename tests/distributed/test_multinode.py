"""setup_multinode: one process, two real processes, and mistakes."""

import json
import os
import socket
import subprocess
import sys

import jax
import pytest

from meshwright.distributed import setup_multinode
from meshwright.errors import EnvironmentProblem
from meshwright.launch.connect import own_device_ids

VARIABLES = (
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
)

WORKER = """
import json
from meshwright.mesh.simulate import simulate_devices
simulate_devices(2)
from meshwright.distributed import DataParallel, DeviceMeshManager, DistributedMetrics
from meshwright.distributed import setup_multinode

info = setup_multinode()
assert setup_multinode() == info
import jax, numpy as np
from meshwright.errors import UserError

dp, mesh = DataParallel(), DeviceMeshManager().create_data_parallel_mesh()
sharding = dp.create_data_parallel_sharding(mesh)
rank = info["rank"]
local = {
    "x": np.arange(4, dtype=np.int64) + 4 * rank,
    "scale": 3,
    "key": jax.random.key(7),
}
batch = dp.shard_batch(local, sharding)
state = dp.shard_model_state({"w": np.arange(8.0), "step": 5}, mesh, "shard")
info["shape"] = list(batch["x"].shape)
info["sum"] = int(jax.jit(lambda b: (b["x"] * b["scale"]).sum())(batch))
info["resharded"] = int(jax.jit(lambda b: b.sum())(dp.shard_batch(batch["x"], sharding)))
info["random"] = float(jax.jit(jax.random.uniform)(batch["key"]))
info["state"] = float(jax.jit(lambda s: s["w"].sum() + s["step"])(state))
info["own"] = [shard.data.tolist() for shard in state["w"].addressable_shards]
info["copies"] = dp.replicate_params(np.arange(3.0), mesh).addressable_data(1).tolist()
info["collected"] = [int(v) for v in DistributedMetrics().collect_from_devices(batch["x"])]
try:
    dp.shard_batch({"odd": np.zeros(3)}, sharding)
except UserError as error:
    info["error"] = str(error)
print("RESULT" + json.dumps(info), flush=True)
"""


@pytest.fixture
def clean_environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_one_process_only_reports(clean_environment):
    assert setup_multinode() == {
        "world_size": 1,
        "rank": 0,
        "local_rank": 0,
        "is_master": True,
        "process_index": 0,
        "process_count": 1,
        "local_devices": 8,
        "global_devices": 8,
    }


def test_too_late_is_said_plainly(clean_environment):
    jax.devices()
    clean_environment.setenv("WORLD_SIZE", "2")
    clean_environment.setenv("RANK", "1")
    with pytest.raises(EnvironmentProblem, match="too late to connect"):
        setup_multinode()


@pytest.mark.parametrize(
    ("per_node", "local_rank", "environ", "expected"),
    [
        (1, 0, {}, None),
        (4, 2, {}, [2]),
        (4, 2, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, [2]),
        (4, 2, {"CUDA_VISIBLE_DEVICES": "6"}, None),
        (4, 2, {"ROCR_VISIBLE_DEVICES": "6"}, None),
    ],
)
def test_processes_of_a_node_take_one_gpu_each(per_node, local_rank, environ, expected):
    assert own_device_ids(per_node, local_rank, environ) == expected


# tests/launch/test_connect.py joins processes every day, and tests/trainer trains in two.
@pytest.mark.full
def test_two_processes_connect_and_share_a_batch():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    common = {**clean, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for rank, (stdout, stderr) in enumerate(outputs):
        assert "RESULT" in stdout, stderr
        info = json.loads(stdout.split("RESULT")[1].splitlines()[0])
        assert info == {
            "world_size": 2,
            "rank": rank,
            "local_rank": rank,
            "is_master": rank == 0,
            "process_index": rank,
            "process_count": 2,
            "local_devices": 2,
            "global_devices": 4,
            "shape": [8],
            "sum": 3 * sum(range(8)),
            "resharded": sum(range(8)),
            "random": pytest.approx(float(jax.random.uniform(jax.random.key(7)))),
            "state": float(sum(range(8)) + 5),
            "own": [[4.0 * rank, 4.0 * rank + 1], [4.0 * rank + 2, 4.0 * rank + 3]],
            "copies": [0.0, 1.0, 2.0],
            "collected": list(range(8)),
            "error": info["error"],
        }
        assert "['odd'] cannot be split evenly" in info["error"]
        assert "2 devices of this process" in info["error"]
