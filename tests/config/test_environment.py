"""Who this process is, as launchers say it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config import DistributedConfig
from meshwright.config.environment import read_environment
from meshwright.config.launchers import first_host
from meshwright.errors import UserError

pytestmark = pytest.mark.quick

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "gpu[003-004]",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


def who(environ: dict[str, str], **values: object) -> tuple[int, int, int, int, int]:
    config = DistributedConfig.from_environment(environ, **values)
    return (
        config.world_size,
        config.rank,
        config.local_rank,
        config.num_nodes,
        config.num_processes_per_node,
    )


def test_an_empty_environment_is_one_process_on_localhost():
    config = DistributedConfig.from_environment({})
    assert (config.master_addr, config.master_port) == ("localhost", 29500)
    assert (config.world_size, config.rank, config.local_rank) == (1, 0, 0)


def test_plain_variables_are_read():
    environ = {
        "MASTER_ADDR": " 192.168.1.10 ",
        "MASTER_PORT": "29501",
        "WORLD_SIZE": "8",
        "RANK": "4",
        "LOCAL_RANK": "3",
    }
    config = DistributedConfig.from_environment(environ)
    assert (config.master_addr, config.master_port) == ("192.168.1.10", 29501)
    assert (config.world_size, config.rank, config.local_rank) == (8, 4, 3)


def test_the_process_environment_is_the_default(monkeypatch):
    for variable in [*SLURM, *OPEN_MPI, *JAX, "MASTER_ADDR", "LOCAL_WORLD_SIZE"]:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert DistributedConfig.from_environment().rank == 1


def test_local_rank_defaults_to_zero_when_only_rank_is_given():
    assert who({"WORLD_SIZE": "8", "RANK": "4"}) == (8, 4, 0, 1, 8)


def test_local_world_size_gives_the_nodes():
    environ = {"WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert who(environ) == (8, 5, 1, 2, 4)


def test_empty_variables_count_as_unset():
    assert who({"WORLD_SIZE": "", "RANK": " ", "MASTER_ADDR": ""}) == (1, 0, 0, 1, 1)


def test_values_override_the_environment():
    environ = {"WORLD_SIZE": "8", "RANK": "4"}
    config = DistributedConfig.from_environment(environ, rank=2, tensor_parallel_size=2)
    assert (config.rank, config.mesh_shape) == (2, (4, 2))


def test_slurm_variables_are_read():
    config = DistributedConfig.from_environment(SLURM)
    assert who(SLURM) == (8, 5, 1, 2, 4)
    assert config.master_addr == "gpu003"


def test_a_slurm_step_may_be_smaller_than_its_job():
    step = {
        **SLURM,
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "gpu[007-008]",
        "SLURM_LOCALID": "3",
    }
    assert who(step) == (8, 5, 3, 2, 4)
    assert DistributedConfig.from_environment(step).master_addr == "gpu007"


@pytest.mark.parametrize(
    "uneven",
    [
        {"SLURM_NTASKS": "7", "SLURM_PROCID": "6", "SLURM_TASKS_PER_NODE": "4,3"},
        {"SLURM_LOCALID": "4", "SLURM_TASKS_PER_NODE": "5,3"},
        {"SLURM_NTASKS": "7", "SLURM_PROCID": "6", "SLURM_TASKS_PER_NODE": ""},
    ],
)
def test_uneven_slurm_allocations_are_accepted(uneven):
    config = DistributedConfig.from_environment({**SLURM, **uneven})
    assert config.num_nodes == 1
    assert config.rank < config.world_size == config.num_processes_per_node


def test_a_slurm_batch_script_is_not_a_task():
    script = {k: v for k, v in SLURM.items() if k not in ("SLURM_PROCID", "SLURM_LOCALID")}
    assert who(script) == (1, 0, 0, 1, 1)
    # SLURM gives the only process of the batch step the rank 0, and none of the step's variables.
    assert who({**script, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}) == (1, 0, 0, 1, 1)
    step = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"}
    assert who({**script, **step}) == (8, 0, 0, 2, 4)


JAX = {
    "JAX_COORDINATOR_ADDRESS": "node0:1234",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}


def test_the_variables_of_jax_are_read():
    config = DistributedConfig.from_environment(JAX)
    assert who(JAX) == (4, 3, 0, 4, 1)
    assert (config.master_addr, config.master_port) == ("node0", 1234)
    # Where SLURM says the same, it also knows the machines.
    own = {"JAX_NUM_PROCESSES": "8", "JAX_PROCESS_ID": "5"}
    assert who({**SLURM, **JAX, **own}) == (8, 5, 1, 2, 4)
    assert who({**JAX, "WORLD_SIZE": "4", "RANK": "3"})[:2] == (4, 3)
    assert who({"JAX_COORDINATOR_ADDRESS": "node0:1234", "JAX_NUM_PROCESSES": "1"})[0] == 1


@pytest.mark.parametrize("missing", ["JAX_NUM_PROCESSES", "JAX_PROCESS_ID"])
def test_half_of_the_variables_of_jax_are_refused(missing):
    with pytest.raises(UserError, match=f"{missing} is not set") as caught:
        DistributedConfig.from_environment({k: v for k, v in JAX.items() if k != missing})
    assert f"export {missing}=…" in caught.value.fix


@pytest.mark.parametrize("address", ["node0", ":1234", "node0:http"])
def test_an_address_without_a_port_is_refused(address):
    with pytest.raises(UserError, match="host and a port"):
        DistributedConfig.from_environment({**JAX, "JAX_COORDINATOR_ADDRESS": address})


def test_a_world_size_exported_in_a_slurm_script_leaves_each_task_its_rank():
    environ = {**SLURM, "WORLD_SIZE": "8", "MASTER_ADDR": "head", "MASTER_PORT": "12345"}
    assert who(environ) == (8, 5, 1, 2, 4)
    config = DistributedConfig.from_environment(environ)
    assert (config.master_addr, config.master_port) == ("head", 12345)


def test_processes_that_torchrun_starts_inside_of_a_task_are_those_of_torchrun():
    inner = {"WORLD_SIZE": "16", "RANK": "11", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert who({**SLURM, **inner}) == (16, 11, 1, 8, 2)


def test_open_mpi_variables_are_read():
    assert who(OPEN_MPI) == (8, 6, 2, 2, 4)


def test_uneven_open_mpi_runs_are_accepted():
    assert who({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "7"}) == (7, 6, 2, 1, 7)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu[003-007,12],login", "gpu003"),
        ("gpu[12,003-007],login", "gpu12"),
        ("n1,n2", "n1"),
        ("single", "single"),
        ("node-a.cluster,node-b", "node-a.cluster"),
        ("rack[1-2]-ib,other", "rack1-ib"),
        ("rack[1-2]node[03-04]", "rack1node03"),
    ],
)
def test_first_host_of_a_slurm_node_list(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", ",n1", "gpu[", "gpu[]", "]x", "gpu[1-2", "a b"])
def test_an_unreadable_node_list_says_to_set_the_address(nodelist):
    with pytest.raises(UserError, match="MASTER_ADDR"):
        first_host(nodelist)


@pytest.mark.parametrize("garbage", ["eight", "3.5", "0x10", "9" * 5000])
def test_garbage_names_the_variable(garbage):
    with pytest.raises(UserError, match="environment variable WORLD_SIZE") as caught:
        DistributedConfig.from_environment({"WORLD_SIZE": garbage})
    assert "export WORLD_SIZE" in caught.value.fix
    assert len(str(caught.value)) < 300


numbers = st.integers(-2, 16).map(str) | st.text(max_size=4)
environments = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys([*SLURM, *OPEN_MPI, *JAX], numbers),
        **dict.fromkeys(["WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"], numbers),
        "SLURM_JOB_NODELIST": st.text("gn01[]-, ", max_size=8),
        "MASTER_ADDR": st.text(max_size=4),
        "MASTER_PORT": st.integers(0, 70000).map(str) | st.text(max_size=4),
    },
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(environ=environments)
def test_any_environment_is_read_or_refused_politely(environ):
    try:
        config = DistributedConfig.from_environment(environ)
    except UserError:
        return
    assert config.world_size == config.num_nodes * config.num_processes_per_node
    assert config.rank < config.world_size
    if "master_addr" in read_environment(environ):
        assert config.master_addr.strip()


@pytest.mark.parametrize(
    ("listens", "port", "expected"),
    [("True", "29500", 29501), ("True", "65535", 65534), ("False", "29500", 29500)],
)
def test_torchrun_may_listen_on_the_port_itself(listens, port, expected):
    environ = {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1", "MASTER_PORT": port}
    found = read_environment({**environ, "TORCHELASTIC_USE_AGENT_STORE": listens})
    assert found["master_port"] == expected
