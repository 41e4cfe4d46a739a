"""A launch on each of several machines starts the processes of one run."""

import os
import subprocess
import sys

import pytest
from real_processes import HARD_LIMIT_SECONDS, free_port

from meshwright.config.distributed_config import DistributedConfig
from meshwright.errors import UserError
from meshwright.launch.environments import environments
from meshwright.launch.options import LaunchOptions, parse_launch
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
        find_run(LaunchOptions(("train",), 4), {**MACHINES, "RANK": rank, "WORLD_SIZE": world_size})
    assert fix in caught.value.fix


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "RANK", "WORLD_SIZE"])
def test_without_all_three_variables_a_launch_is_a_run_of_its_own(missing):
    environ = {**MACHINES, "RANK": "0"}
    del environ[missing]
    run = find_run(LaunchOptions(("train",), 2), environ)
    assert (run.address, run.first_rank, run.world_size, run.is_shared) == (
        "127.0.0.1",
        0,
        2,
        False,
    )


@pytest.mark.full
def test_two_launches_join_one_run_by_variables(tmp_path):
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "4"}
    printed = launch_both(tmp_path, 2, [], [{**common, "RANK": "0"}, {**common, "RANK": "2"}])
    assert printed[0][0] == "[0, 0, 4, [0, 1, 2, 3]]\n"
    others = sorted(line for _, err in printed for line in err.splitlines() if "[0, 1," in line)
    assert others == [f"[{n}] [{n}, {n % 2}, 4, [0, 1, 2, 3]]" for n in (1, 2, 3)]


@pytest.mark.full
def test_two_launches_join_one_run_by_flags(tmp_path):
    flags = ["--nodes=2", "--coordinator", f"127.0.0.1:{free_port()}"]
    # The second machine knows its number from SkyPilot.
    sky = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1"}
    printed = launch_both(tmp_path, 1, [[*flags, "--node-rank=0"], flags], [{}, sky])
    assert printed[0][0] == "[0, 0, 2, [0, 1]]\n"
    assert "[1] [1, 0, 2, [0, 1]]" in printed[1][1].splitlines()


def launch_both(folder, nprocs, flags, environs) -> list[tuple[str, str]]:
    """Launch on two machines that are both this one; return what each prints."""
    script = folder / "ranks.py"
    script.write_text(PROGRAM)
    launches = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "meshwright.launch", f"--nprocs={nprocs}"),
                *(flags[number] if flags else ()),
                str(script),
            ],
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, environ in enumerate(environs)
    ]
    try:
        printed = [launch.communicate(timeout=HARD_LIMIT_SECONDS) for launch in launches]
    finally:
        for launch in launches:
            launch.kill()
    assert [launch.returncode for launch in launches] == [0, 0], printed
    return printed


SKYPILOT = {
    **{"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"},
    "SKYPILOT_NODE_IPS": "10.1.0.4\n10.1.0.5",
}
SLURM = {
    **{"SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "2"},
    **{"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0"},
}


@pytest.mark.parametrize(
    ("flags", "environ", "expected"),
    [
        ("--nodes 2 --node-rank 1 --coordinator n1:7000", {}, ("n1", 7000, 4, 8)),
        ("--nodes 2 --node-rank 1 --coordinator [::1]:29500", {}, ("[::1]", 29500, 4, 8)),
        ("--nodes 2", SKYPILOT, ("10.1.0.4", 29500, 4, 8)),
        ("--nodes 2 --node-rank 1", SKYPILOT, ("10.1.0.4", 29500, 4, 8)),
        ("--nodes 2", SLURM, ("n1", 61445, 4, 8)),
        ("--nodes 2 --coordinator n1:7000", SLURM, ("n1", 7000, 4, 8)),
        ("--nodes 2", {**MACHINES, "RANK": "4"}, ("192.168.1.10", 29500, 4, 8)),
        ("--nodes 8", {**MACHINES, "RANK": "3"}, ("192.168.1.10", 29500, 12, 32)),
        ("--nodes 1 --coordinator 127.0.0.1:7000", {}, ("127.0.0.1", 7000, 0, 4)),
    ],
)
def test_flags_and_the_environment_say_which_machine_this_is(flags, environ, expected):
    launch = parse_launch(["--nprocs=4", *flags.split(), "--", "train"])
    run = find_run(launch, environ)
    assert (run.address, run.port, run.first_rank, run.world_size) == expected
    places = environments(launch, {**environ, "JAX_PLATFORMS": "cpu"}, run=run)
    found = [DistributedConfig.from_environment(place) for place in places]
    assert [c.rank for c in found] == list(range(expected[2], expected[2] + 4))


@pytest.mark.parametrize(
    ("flags", "environ", "named"),
    [
        ("--nodes 2 --coordinator n1:7000", {}, ["needs the number of this machine"]),
        ("--nodes 2 --node-rank 0", {}, ["needs the address of the first machine"]),
        ("--nodes 2 --node-rank 0", SKYPILOT, ["--node-rank 0", "SKYPILOT_NODE_RANK=1"]),
        ("--nodes 4", SKYPILOT, ["--nodes 4", "SKYPILOT_NUM_NODES=2"]),
        ("--nodes 4 --node-rank 0", SLURM, ["--nodes 4", "SLURM_STEP_NUM_TASKS=2"]),
        (
            "--nodes 2 --node-rank 1 --coordinator n1:7000",
            {**MACHINES, "RANK": "4"},
            ["--coordinator n1:7000", "MASTER_ADDR=192.168.1.10"],
        ),
    ],
)
def test_flags_that_are_missing_or_contradict_the_environment_are_named(flags, environ, named):
    launch = parse_launch(["--nprocs=4", *flags.split(), "--", "train"])
    with pytest.raises(UserError) as caught:
        find_run(launch, environ)
    assert all(text in str(caught.value) for text in named)
