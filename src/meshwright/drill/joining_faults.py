"""Faults of starting together: processes that are missing, or differ, or are more or fewer."""

import os
import re

from meshwright.drill.fault_makers import SEED, missing_peers, taken_port
from meshwright.drill.launched import NotSurvived
from meshwright.drill.trial import Fault, Trial, several_processes
from meshwright.text.units import counted

ROUNDING = {"no": 1e-4, "bf16": 3e-2, "fp16": 3e-3}
"""By precision, how much losses may differ: other numbers of processes add up in other orders."""
_JOIN_SECONDS = 3


def _check_missing(trial: Trial) -> str:
    nprocs = trial.nprocs
    launched = trial.train(*missing_peers(_JOIN_SECONDS), code=1)
    found = launched.find(rf"{nprocs} of {2 * nprocs} processes joined, missing (.+) after")
    return f"exit code 1 after {_JOIN_SECONDS} s, missing {found[1]} named"


def _check_taken(trial: Trial) -> str:
    with taken_port() as port:
        launched = trial.train(f"--coordinator=127.0.0.1:{port}", code=2)
    launched.find(rf"error: .*\b{port}\b")
    text = "\n".join(line.text for line in launched.lines)
    who = f", process {os.getpid()} named" if re.search(rf"\b{os.getpid()}\b", text) else ""
    return f"exit code 2, port {port}{who}"


def _check_devices(trial: Trial) -> str:
    size = trial.reference.plan["mesh"].get("data", 1) + 1
    launched = trial.train(settings=["model.mesh_shape=null", f"mesh.data={size}"], code=2)
    launched.find(r"error: ")
    return f"exit code 2: {launched.problem().partition('error: ')[2]}"


def _check_differing(trial: Trial) -> str:
    launched = trial.train(inject=True, code=2)
    found = launched.find(rf"run\.seed is (\d+) in process 0 and {SEED} in process {trial.last}")
    return f"exit code 2 before compiling: {found[0]}"


def _other_layout(trial: Trial) -> tuple[int, int] | None:
    """Return another number of processes and the devices of each; None if there is none."""
    total = trial.num_devices
    if trial.nprocs > 1:
        return 1, total
    return (2, total // 2) if total % 2 == 0 else None


def _cannot_resize(trial: Trial) -> str:
    if _other_layout(trial) is not None:
        return ""
    return f"{counted(trial.num_devices, 'device')} cannot be divided over 2 processes"


def _check_resized(trial: Trial) -> str:
    layout = _other_layout(trial)
    assert layout is not None
    step = trial.prepare(checkpoints=2)
    launched = trial.train(layout=trial.configuration.layout(*layout), code=0)
    launched.find(rf"continuing after step {step}\b")
    most = ROUNDING[trial.reference.plan["precision"]]
    difference = trial.run.difference(trial.reference)
    if difference > most:
        raise NotSurvived(f"losses differ by {difference:.1e}, more than {most:g}")
    found = f"within {difference:.1e}" if difference else "equal"
    return f"{trial.nprocs} → {layout[0]} processes from step {step}, losses {found}"


FAULTS = (
    Fault(
        "missing-peer",
        "twice as many processes are expected, and the others never come",
        "exit code 1 after --join-timeout with the missing processes",
        _check_missing,
        starts=0.5,
    ),
    Fault(
        "taken-port",
        "another program listens on the port of process 0",
        "exit code 2 with the port and who holds it",
        _check_taken,
        why_not=several_processes,
        starts=0.5,
    ),
    Fault(
        "devices",
        "a mesh for more devices than there are",
        "exit code 2 with the numbers, before anything is compiled",
        _check_devices,
        starts=0.5,
    ),
    Fault(
        "differing",
        "the last process has another seed",
        "exit code 2 with both values, before anything is compiled",
        _check_differing,
        why_not=several_processes,
        starts=0.5,
    ),
    Fault(
        "resize",
        "the run resumes with another number of processes",
        "the same samples, and losses that differ by rounding",
        _check_resized,
        why_not=_cannot_resize,
        starts=1,
    ),
)
