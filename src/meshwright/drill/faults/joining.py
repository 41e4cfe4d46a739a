"""Processes that do not find each other, or are not about to do the same."""

from __future__ import annotations

import os
import re
import socket
import sys

from meshwright.drill.fault import Fault, several_processes
from meshwright.drill.hooks import Hooks
from meshwright.drill.scene import Scene
from meshwright.launch.whole_run import free_port

_JOIN_SECONDS = 3


def _differ(hooks: Hooks) -> None:
    if hooks.is_last:
        sys.argv.append("run.seed=97531")


def _play_missing(scene: Scene) -> str:
    nprocs = scene.nprocs
    launched = scene.train(
        "--nodes=2",
        "--node-rank=0",
        f"--coordinator=127.0.0.1:{free_port()}",
        f"--join-timeout={_JOIN_SECONDS}",
    )
    launched.check_code(1)
    found = launched.find(rf"{nprocs} of {2 * nprocs} processes joined, missing (.+) after")
    return f"exit code 1 after {_JOIN_SECONDS} s, missing {found[1]} named"


def _play_taken(scene: Scene) -> str:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        launched = scene.train(f"--coordinator=127.0.0.1:{port}")
    launched.check_code(2)
    launched.find(rf"error: .*\b{port}\b")
    text = "\n".join(line.text for line in launched.lines)
    who = f", process {os.getpid()} named" if re.search(rf"\b{os.getpid()}\b", text) else ""
    return f"exit code 2, port {port}{who}"


def _play_devices(scene: Scene) -> str:
    mesh = scene.undisturbed.plan["mesh"]
    size = mesh.get("data", 1) + 1
    launched = scene.train(settings=["model.mesh_shape=null", f"mesh.data={size}"])
    launched.check_code(2)
    launched.find(r"error: ")
    return f"exit code 2: {launched.problem().partition('error: ')[2]}"


def _play_differing(scene: Scene) -> str:
    launched = scene.train(inject=True)
    launched.check_code(2)
    found = launched.find(rf"run\.seed is (\d+) in process 0 and 97531 in process {scene.last}")
    return f"exit code 2 before compiling: {found[0]}"


FAULTS = (
    Fault(
        "missing-peer",
        "as many processes again are expected and never come",
        "exit code 1 after --join-timeout with the missing processes",
        _play_missing,
        starts=0.5,
    ),
    Fault(
        "taken-port",
        "another program listens on the port of process 0",
        "exit code 2 with the port and who holds it",
        _play_taken,
        why_not=several_processes,
        starts=0.5,
    ),
    Fault(
        "devices",
        "a mesh for more devices than there are",
        "exit code 2 with the numbers, before anything is compiled",
        _play_devices,
        starts=0.5,
    ),
    Fault(
        "differing",
        "the last process has another seed",
        "exit code 2 with both values, before anything is compiled",
        _play_differing,
        inject=_differ,
        why_not=several_processes,
        starts=0.5,
    ),
)
