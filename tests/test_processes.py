"""What processes agree on: alone, and as two real processes on this machine."""

import subprocess
import sys

import pytest
from real_processes import run_processes

from meshwright import processes
from meshwright.errors import UserError

WORKER = """
import json, pathlib, sys, time

from meshwright import processes
from meshwright.errors import EnvironmentProblem
from meshwright.runtime.jax_internals import jax_has_started
from meshwright.mesh.build import build_mesh
from meshwright.mesh.simulate import simulate_devices

address, me, folder = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
simulate_devices(2)
processes.connect(address, 2, me, timeout_seconds=60)
out = {"index": processes.process_index(), "count": processes.process_count()}
out["main"] = processes.is_main()

import jax

out["started_by_asking"] = jax_has_started()
if me == 0:
    import socket

    def answers(host):
        with socket.socket() as probe:
            return probe.connect_ex((host, int(address.rpartition(":")[2]))) == 0

    out["answers"] = [answers("127.0.0.1"), answers("127.0.0.2")]
out["broadcast"] = processes.broadcast({"step": 7, "from": me})
out["gather"] = processes.gather({"from": me})
out["any"] = [processes.agree(me == 1), processes.agree(False)]
out["all"] = [processes.agree(me == 1, "all"), processes.agree(True, "all")]
out["decided_by_main"] = [processes.agree(me == 1, "main"), processes.agree(me == 0, "main")]
processes.barrier("ready", timeout_seconds=60)

from jax.sharding import NamedSharding, PartitionSpec as P

mesh = build_mesh({"fsdp": 2, "tensor": 2})
out["owners"] = [[d.process_index for d in row] for row in mesh.devices]
sharding = NamedSharding(mesh, P(("fsdp", "tensor")))
ones_to_four = jax.make_array_from_callback(
    (4,), sharding, lambda index: jax.numpy.arange(1.0, 5.0)[index]
)
total = jax.jit(jax.numpy.sum, out_shardings=NamedSharding(mesh, P()))(ones_to_four)
out["sums"] = [float(shard.data) for shard in total.addressable_shards]

gave_up = folder / "gave_up"
if me == 1:
    while not gave_up.exists():
        time.sleep(0.05)
try:
    processes.barrier("lonely", timeout_seconds=1)
except EnvironmentProblem as problem:
    out["lonely"] = str(problem)
gave_up.touch()

try:
    out["mixed_up"] = processes.broadcast("value") if me == 0 else processes.gather("value")
except EnvironmentProblem as problem:
    out["mixed_up"] = str(problem)

out["afterwards"] = processes.gather(me)
client = processes._client()
processes.barrier("tidy")
kept = client.key_value_dir_get("meshwright")
out["oldest_kept"] = min(int(key.split("/")[1]) for key, _ in kept)
out["calls"] = processes._calls.made
processes.barrier("end")
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each of two connected processes with two devices each reports."""
    return run_processes(WORKER, [str(tmp_path_factory.mktemp("processes"))], count=2)


def test_two_processes_know_their_numbers_without_starting_devices(two):
    assert [(p["index"], p["count"], p["main"]) for p in two] == [(0, 2, True), (1, 2, False)]
    assert not any(p["started_by_asking"] for p in two)


def test_the_coordinator_of_one_machine_listens_on_the_loopback_address_alone(two):
    assert two[0]["answers"] == [True, False]


def test_broadcast_gives_every_process_the_value_of_process_0(two):
    assert [p["broadcast"] for p in two] == [{"step": 7, "from": 0}] * 2


def test_gather_lists_values_in_process_order(two):
    assert [p["gather"] for p in two] == [[{"from": 0}, {"from": 1}]] * 2


def test_processes_reach_common_decisions(two):
    for process in two:
        assert process["any"] == [True, False]
        assert process["all"] == [False, True]
        assert process["decided_by_main"] == [False, True]


def test_gloo_reduces_over_two_processes_of_two_devices(two):
    assert [p["owners"] for p in two] == [[[0, 0], [1, 1]]] * 2
    assert [p["sums"] for p in two] == [[10.0, 10.0]] * 2


def test_barrier_names_the_process_that_did_not_arrive(two):
    assert "process 1 did not arrive at `barrier lonely` within 1 s" in two[0]["lonely"]
    assert "1 of 2 processes arrived: 0" in two[0]["lonely"]
    assert "process 1 arrived too late at `barrier lonely`" in two[1]["lonely"]


def test_calls_in_different_order_are_named(two):
    assert two[0]["mixed_up"] == "value"
    assert "process 1 is at `gather` while process 0 is at `broadcast`" in two[1]["mixed_up"]


def test_processes_go_on_after_a_failed_call_and_leave_nothing_behind(two):
    assert [p["afterwards"] for p in two] == [[0, 1]] * 2
    assert two[0]["oldest_kept"] == two[0]["calls"] - 1  # only the latest call's texts


def test_one_process_agrees_with_itself():
    assert processes.is_main()
    assert (processes.process_index(), processes.process_count()) == (0, 1)
    assert processes.gather({"a": 1}) == [{"a": 1}]
    assert [processes.agree(True, how) for how in ("any", "all", "main")] == [True] * 3
    assert [processes.agree(False, how) for how in ("any", "all", "main")] == [False] * 3
    assert processes.barrier("alone", timeout_seconds=0.001) is None


def test_one_process_gets_values_back_as_several_would():
    assert processes.broadcast({"shape": (2, 3), 5: None}) == {"shape": [2, 3], "5": None}


@pytest.mark.parametrize("send", [processes.broadcast, processes.gather])
def test_values_that_are_not_json_are_refused(send):
    with pytest.raises(UserError, match="a value of type set cannot be sent"):
        send({1, 2})


def test_connecting_as_a_process_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match=r"process 2 of 2 does not exist\nnumber .* from 0 to 1"):
        processes.connect("127.0.0.1:1", num_processes=2, process_id=2)


def test_importing_does_not_import_jax():
    code = "import meshwright.processes as p, sys; assert p.is_main(); print('jax' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "False", run.stderr
