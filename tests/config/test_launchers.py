"""Every launcher is recognized by the variables it sets, and two that disagree are refused."""

import pytest

from meshwright.config import DistributedConfig
from meshwright.config.environment import read_environment, run_name
from meshwright.config.launchers import LAUNCHERS, detect, process_variables
from meshwright.errors import UserError

TORCHRUN = {
    **{"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400", "RANK": "9", "WORLD_SIZE": "16"},
    **{"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1"},
}
JAX = {
    **{"JAX_COORDINATOR_ADDRESS": "job-0.svc:6666", "JAX_NUM_PROCESSES": "4"},
    "JAX_PROCESS_ID": "3",
}
SLURM = {
    **{"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "16"},
    **{"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_NODEID": "1"},
    **{"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_JOB_ID": "70001", "SLURM_STEP_ID": "0"},
}
OPEN_MPI = {
    **{"OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_SIZE": "16"},
    **{"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"},
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
KUBERNETES = {
    **{"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "train-2", "MESHWRIGHT_NUM_PROCESSES": "4"},
    "MESHWRIGHT_SERVICE": "workers",
}
SKYPILOT = {
    **{"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"},
    "SKYPILOT_NODE_IPS": "10.1.0.4\n10.1.0.5",
}


@pytest.mark.parametrize(
    ("environ", "launcher", "expected", "address"),
    [
        (TORCHRUN, "environment", (16, 9, 1, 2, 8), ("10.0.0.1", 29400)),
        (JAX, "JAX", (4, 3, 0, 4, 1), ("job-0.svc", 6666)),
        (SLURM, "SLURM", (16, 9, 1, 2, 8), ("gpu03", 70001 % 4096 + 61440)),
        (OPEN_MPI, "Open MPI", (16, 9, 1, 2, 8), ("10.96.0.1", 29500)),
        (PMI, "PMI", (4, 3, 1, 2, 2), ("localhost", 29500)),
        (KUBERNETES, "Kubernetes", (4, 2, 0, 4, 1), ("train-0.workers", 29500)),
        (SKYPILOT, "SkyPilot", (2, 1, 0, 2, 1), ("10.1.0.4", 29500)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_launcher_says_who_this_process_is(environ, launcher, expected, address):
    assert [found.launcher.name for found in detect(environ) if found.is_complete] == [launcher]
    c = DistributedConfig.from_environment(environ)
    assert (c.world_size, c.rank, c.local_rank, c.num_nodes, c.num_processes_per_node) == expected
    assert (c.master_addr, c.master_port) == address


def test_the_first_pod_is_named_by_its_job_unless_the_manifest_names_it():
    without = {k: v for k, v in KUBERNETES.items() if k != "MESHWRIGHT_SERVICE"}
    assert read_environment(without)["master_addr"] == "train-0.train"
    named = read_environment({**KUBERNETES, "MESHWRIGHT_COORDINATOR": "other-0.svc:7000"})
    assert (named["master_addr"], named["master_port"]) == ("other-0.svc", 7000)
    # Without a number of processes, an indexed Job is a list of separate runs.
    alone = {k: v for k, v in KUBERNETES.items() if not k.startswith("MESHWRIGHT")}
    assert "world_size" not in read_environment(alone)


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        (SLURM, {"RANK": "3", "WORLD_SIZE": "4"}, ["SLURM_PROCID=9", "RANK=3", "WORLD_SIZE=4"]),
        (SLURM, {"WORLD_SIZE": "8"}, ["SLURM_STEP_NUM_TASKS=16", "WORLD_SIZE=8"]),
        (JAX, {"RANK": "2", "WORLD_SIZE": "4"}, ["JAX_PROCESS_ID=3", "RANK=2"]),
        (OPEN_MPI, {**JAX}, ["OMPI_COMM_WORLD_RANK=9", "JAX_PROCESS_ID=3"]),
        (JAX, {"MASTER_ADDR": "head"}, ["JAX_COORDINATOR_ADDRESS=job-0.svc:6666", "=head"]),
        # Inside of SLURM's tasks, but of another one.
        ({**SLURM, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, {**TORCHRUN, "RANK": "3"},
         ["SLURM_PROCID=1", "RANK=3"]),
    ],
)  # fmt: skip
def test_two_engines_that_disagree_are_both_named(one, other, named):
    with pytest.raises(UserError, match="disagree about") as caught:
        DistributedConfig.from_environment({**one, **other})
    assert all(text in caught.value.why for text in named)
    assert "unset" in caught.value.fix


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        (SLURM, {"RANK": "9", "WORLD_SIZE": "16"}, (16, 9, 1, 2, 8)),
        (SLURM, {"PMI_RANK": "9", "PMI_SIZE": "16"}, (16, 9, 1, 2, 8)),
        ({**SLURM, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, TORCHRUN, (16, 9, 1, 2, 8)),
        (SKYPILOT, TORCHRUN, (16, 9, 1, 2, 8)),
        # srun has started the daemons of Open MPI, not its processes.
        ({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, OPEN_MPI, (16, 9, 1, 2, 8)),
        # An interactive shell in an allocation.
        ({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, JAX, (4, 3, 0, 4, 1)),
        (KUBERNETES | {"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "train-3"}, JAX, (4, 3, 0, 4, 1)),
    ],
)
def test_engines_that_agree_or_run_inside_of_each_other_are_fine(outer, inner, expected):
    c = DistributedConfig.from_environment({**outer, **inner})
    assert (c.world_size, c.rank, c.local_rank) == expected[:3]
    if inner is not JAX:
        assert (c.num_nodes, c.num_processes_per_node) == expected[3:]


def test_a_number_of_processes_without_a_rank_never_trains_alone():
    with pytest.raises(UserError, match=r"WORLD_SIZE=2 means .* other processes, but RANK is not"):
        DistributedConfig.from_environment({"WORLD_SIZE": "2"})
    assert DistributedConfig.from_environment({"WORLD_SIZE": "2"}, rank=1).rank == 1


def test_jobs_have_names_that_their_processes_share():
    assert run_name(SLURM) == "SLURM 70001.0"
    assert run_name({**SLURM, "MESHWRIGHT_LAUNCH_ID": "abc"}) == "abc"
    assert run_name(JAX) == ""


def test_a_launcher_replaces_all_variables_that_describe_a_process():
    names = process_variables()
    for environ in (TORCHRUN, JAX, OPEN_MPI, PMI, SLURM, KUBERNETES, SKYPILOT):
        left = {k: v for k, v in environ.items() if k not in names}
        assert not [found for found in detect(left) if found.numbers]
    assert len({launcher.name for launcher in LAUNCHERS}) == len(LAUNCHERS)
