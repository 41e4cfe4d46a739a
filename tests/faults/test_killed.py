"""Rows 1 to 3: a worker, process 0 or the launcher is killed while a run trains."""

import os
import re
import signal
import socket
import time

import pytest
from faults.harness import environ_of, launch, metrics

pytestmark = [pytest.mark.full, pytest.mark.faults]

RPC = re.compile(r"RPC|GRPC|Check failure|coordination_service|0x[0-9a-f]{6}|Traceback")
"""What JAX and gRPC print about a lost peer."""


@pytest.mark.parametrize("rank", [1, 0], ids=["one_worker", "process_0"])
def test_sigkill_of(tmp_path, undisturbed, rank):
    fault = "sigkill" if rank else "sigkill-first"
    done = launch(tmp_path, "--restarts=3", fault=fault, at=8).finish()
    assert done.code == 0, done.err
    pattern = (
        rf"error: process {rank} was killed by SIGKILL at step \d+; all processes are restarted"
    )
    assert re.match(pattern, done.first_error), done.err
    assert "restart 1 of 3 in 1 s, from the checkpoint of step 6" in done.err
    assert "continuing after step 6" in done.err
    # The others are stopped within 10 s, and say no more than that a connection is lost.
    assert done.seconds_between("^error: ", "launch: process .*; restart 1") < 10 + 5
    assert not RPC.search(done.err), done.err
    assert re.search(r"launch: goodput \d+%: .* in 2 attempts", done.err)
    killed = re.search(r"process \d was killed by SIGKILL at step \d+", done.first_error)[0]
    assert f"{killed}; restart 1 of 3" in done.err
    assert f"{killed}; restart 1 of 3" in (done.run / "launch.log").read_text()
    for file in ("events.jsonl", "train.log"):
        assert f"attempt 2, after {killed}" in (done.run / file).read_text()
    undisturbed().check_same(done)


def wait_until_free(port: int, seconds: float = 30) -> None:
    """Wait until a port can be listened on: the kernel closes it when a process has ended."""
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_server(("127.0.0.1", port)).close()
            return
        except OSError:
            assert time.monotonic() < until, f"port {port} is still taken"
            time.sleep(0.1)


def test_sigkill_of_the_launcher(tmp_path, undisturbed):
    killed = launch(tmp_path, "--restarts=3", steps=1000, code="time.sleep(0.05)")
    killed.wait_for(r"saved step 6 ")
    workers = killed.workers()
    assert sorted(workers) == [0, 1]
    port = int(environ_of(workers[0])["MASTER_PORT"])
    os.kill(killed.process.pid, signal.SIGKILL)
    # Nobody is left to print anything; the workers end with the launcher, and free the port.
    killed.check_nothing_left(seconds=30)
    wait_until_free(port)
    again = launch(tmp_path).finish()
    assert again.code == 0, again.err
    assert "continuing after step" in again.err
    assert undisturbed().metrics.items() <= metrics(again.run).items()
