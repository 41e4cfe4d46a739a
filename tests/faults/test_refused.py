"""Rows 14 and 16 to 19: what cannot work is refused before anything is compiled."""

import os
import socket
import sys

import pytest
from faults.harness import launch, start
from real_processes import free_port

from meshwright.drill.fault_makers import missing_peers, taken_port


def check_refused(done, code: int, *texts: str) -> None:
    """Check that a launch ended early with one plain message, and that it wrote nothing."""
    assert done.code == code, done.err
    for text in texts:
        assert text in done.err
    assert "Traceback" not in done.err
    assert "train  1/" not in done.err
    assert not done.run.exists()


@pytest.mark.full
@pytest.mark.faults
def test_an_output_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    compiled = 'raise SystemExit("the loss was compiled")'
    done = launch(tmp_path, words=("hydra.run.dir=file/run",), code=compiled).finish()
    check_refused(
        done,
        2,
        f"error: cannot write the output directory {tmp_path}/file/run",
        "Not a directory",
        "write hydra.run.dir=… with a directory you can write to",
    )
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.full
@pytest.mark.faults
def test_a_read_only_output_directory_is_refused(tmp_path):
    # Not even root can write there.
    done = launch(tmp_path, words=("hydra.run.dir=/proc/1/run",)).finish()
    check_refused(done, 2, "error: cannot write the output directory /proc/1/run")


WRAPPER = """
import os, sys
RANK = int(os.environ["RANK"])
if {what!r} == "versions" and RANK == 1:
    import importlib.metadata as metadata
    real = metadata.version
    metadata.version = lambda name: "9.9.9" if name == "optax" else real(name)
if {what!r} == "code":
    with open(f"code{{RANK}}/helper.py", "w") as file:
        file.write(f"SCALE = {{RANK}}")
    sys.path.insert(0, f"code{{RANK}}")
sys.argv[0] = "meshwright"
if {what!r} == "config":
    sys.argv.append(f"optimizer.learning_rate={{0.1 * (RANK + 1)}}")
from meshwright.cli.main import entry
entry()
"""


@pytest.mark.full
@pytest.mark.faults
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("config", "optimizer.learning_rate is 0.1 in process 0 and 0.2 in process 1"),
        ("versions", "version.optax is "),
        ("code", "code.helper is "),
    ],
)
def test_processes_that_differ_are_refused_with_the_difference(tmp_path, what, expected):
    (tmp_path / "wrapper.py").write_text(WRAPPER.format(what=what))
    for rank in (0, 1):
        (tmp_path / f"code{rank}").mkdir()
    (tmp_path / "own.py").write_text(
        ("import helper\n" if what == "code" else "") + "def loss(model, batch):\n    return 0\n"
    )
    words = ("model=mlp", "optimizer=sgd", "mesh.data=2", "hydra.run.dir=run")
    task = ("task.kind=own:loss",) if what == "code" else ()
    done = start(tmp_path, "--nprocs=2", "wrapper.py", "train", *words, *task).finish()
    check_refused(done, 2, "error: the 2 processes differ", expected)
    assert done.err.count("error: the 2 processes differ") == 1


@pytest.mark.full
@pytest.mark.faults
def test_a_mesh_that_is_not_the_number_of_devices_is_refused_with_meshes_that_fit(tmp_path):
    flags = ("--devices-per-process=2",)
    done = launch(tmp_path, *flags, words=("mesh.fsdp=3", "mesh.data=1")).finish()
    check_refused(
        done,
        2,
        "error: the mesh does not match the 4 devices",
        "fsdp=3, not 4",
        "nearest meshes that work: mesh.fsdp=4; mesh.data=2 mesh.fsdp=2; mesh.data=4",
    )


@pytest.mark.full
def test_a_peer_that_never_joins_is_named(tmp_path):
    done = launch(tmp_path, *missing_peers(seconds=2)).finish()
    check_refused(done, 1, "error: 2 of 4 processes joined, missing processes 2, 3 after 2 s")


@pytest.mark.full
@pytest.mark.faults
def test_a_wrong_address_is_named(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    flags = ("--nodes=2", "--node-rank=1", f"--coordinator={address}", "--join-timeout=5")
    done = launch(tmp_path, *flags).finish()
    check_refused(
        done, 1, f"of 4 cannot join process 0 at {address} within 5 s", "nothing listens on"
    )


@pytest.mark.full
@pytest.mark.faults
def test_a_fixed_port_that_is_taken_names_its_holder(tmp_path):
    with taken_port() as port:
        flags = (f"--coordinator=127.0.0.1:{port}", "--join-timeout=30")
        done = launch(tmp_path, *flags).finish()
    check_refused(
        done,
        2,
        f"port {port}, on which process 0 is to listen, is taken",
        f"process {os.getpid()} listens there: {sys.executable}",
    )


@pytest.mark.full
@pytest.mark.faults
def test_without_a_fixed_port_a_free_one_is_chosen(tmp_path):
    # The default port of other launchers; whoever holds it does not matter.
    with socket.socket() as usual:
        usual.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            usual.bind(("127.0.0.1", 29500))
            usual.listen()
        except OSError:
            pass
        done = launch(tmp_path, steps=1).finish()
    assert done.code == 0, done.err
