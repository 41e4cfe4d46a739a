"""A launch on each of several machines starts the processes of one run."""

import os
import subprocess
import sys

import pytest
from real_processes import HARD_LIMIT_SECONDS, free_port

from meshwright.config.distributed_config import DistributedConfig
from meshwright.errors import UserError
from meshwright.launch.environments import environments
from meshwright.launch.options import LaunchOptions
from meshwright.launch.whole_run import find_run

MACHINES = {"MASTER_ADDR": "192.168.1.10", "MASTER_PORT": "29500", "WORLD_SIZE": "8"}
PROGRAM = """
from meshwright import processes
from meshwright.distributed import setup_multinode
info = setup_multinode()
print([info["rank"], info["local_rank"], info["world_size"], processes.gather(info["rank"])])
"""


@pytest.mark.parametrize("first", [0, 4])
def test_each_machine_starts_its_own_ranks(first):
    environ = {**MACHINES, "RANK": str(first), "JAX_PLATFORMS": "cpu"}
    places = environments(LaunchOptions(("train",), 4), environ)
    configs = [DistributedConfig.from_environment(place) for place in places]
    assert [c.rank for c in configs] == [first, first + 1, first + 2, first + 3]
    assert [c.local_rank for c in configs] == [0, 1, 2, 3]
    found = {(c.world_size, c.num_nodes, c.master_addr, c.master_port) for c in configs}
    assert found == {(8, 2, "192.168.1.10", 29500)}
    # Process 0 must be reachable from other machines.
    assert all("JAX_COORDINATOR_BIND_ADDRESS" not in place for place in places)


@pytest.mark.parametrize(
    ("rank", "world_size", "fix"),
    [
        ("1", "8", "one of RANK=0, RANK=4: RANK counts processes, not machines"),
        ("8", "8", "one of RANK=0, RANK=4"),
        ("2", "64", "one of RANK=0, RANK=4, …, RANK=60"),
        ("0", "6", "WORLD_SIZE=4 times the number of machines"),
    ],
)
def test_ranks_that_no_machine_starts_with_are_refused(rank, world_size, fix):
    with pytest.raises(UserError, match="do not fit together") as caught:
        find_run(4, {**MACHINES, "RANK": rank, "WORLD_SIZE": world_size})
    assert fix in caught.value.fix


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "RANK", "WORLD_SIZE"])
def test_without_all_three_variables_a_launch_is_a_run_of_its_own(missing):
    environ = {**MACHINES, "RANK": "0"}
    del environ[missing]
    run = find_run(2, environ)
    assert (run.address, run.first_rank, run.world_size, run.is_shared) == (
        "127.0.0.1",
        0,
        2,
        False,
    )


def test_two_launches_join_one_run(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(PROGRAM)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "4"}
    command = [sys.executable, "-m", "meshwright.launch", "--nprocs=2", str(script)]
    launches = [
        subprocess.Popen(
            command,
            env={**os.environ, **common, "RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "2")
    ]
    try:
        printed = [launch.communicate(timeout=HARD_LIMIT_SECONDS) for launch in launches]
    finally:
        for launch in launches:
            launch.kill()
    assert [launch.returncode for launch in launches] == [0, 0], printed
    assert printed[0][0] == "[0, 0, 4, [0, 1, 2, 3]]\n"
    others = sorted(line for _, err in printed for line in err.splitlines() if "[0, 1," in line)
    assert others == [f"[{n}] [{n}, {n % 2}, 4, [0, 1, 2, 3]]" for n in (1, 2, 3)]
