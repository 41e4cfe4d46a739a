"""Faults of processes that train: killed, asked to stop, hanging, or failing by themselves."""

import re
import signal

from meshwright.drill.fault_makers import CRASH_CODE, EXCEPTION_TEXT
from meshwright.drill.launched import NotSurvived
from meshwright.drill.trial import SAME, STOP_SECONDS, Fault, Trial, several_processes
from meshwright.errors import ExitCode
from meshwright.launch.watch import STEPS

_CALL_DUMP = r"RPC: /|GRPC error|\*\*\* Check failure|:UNKNOWN:"
_HANG_SECONDS = 3.0
_GIVEN_UP = "given up after 3 restarts without a new checkpoint"
_RESTARTED = "noticed in 10 s, all processes restart from the last checkpoint"
_SAVED = "all stop after the same step, save it and exit with 75; the same command resumes"


def _check_killed(trial: Trial, rank: int) -> str:
    killed = rf"^error: process {rank} was killed by SIGKILL at step \d+"
    return trial.restarted(f"{killed}; all processes are restarted")


def _check_launcher_killed(trial: Trial) -> str:
    launched = trial.train(inject=True, code=128 + signal.SIGKILL)
    launched.stopped(STOP_SECONDS)
    launched.check_silent_about(_CALL_DUMP)
    return trial.resumed(launched, "no process left, the port is free")


def _check_killed_saving(trial: Trial) -> str:
    launched = trial.train("--restarts=6", inject=True, code=0)
    kills = len(launched.injected)
    if kills < 2:
        raise NotSurvived(f"{kills} saves were interrupted")
    trial.check_same()
    return f"{kills} saves interrupted, every checkpoint that is listed is whole, {SAME}"


def _check_stopped(trial: Trial, name: str) -> str:
    launched = trial.train("--restarts=3", inject=True, code=ExitCode.PREEMPTED)
    # The step, which may be one that all agreed on, and the save before the end.
    run = trial.reference
    limit = STOP_SECONDS + 3 * run.step_seconds() + 5 * run.save_seconds()
    seconds = launched.stopped(limit)
    step = int(launched.find(rf"stop: {name} asked to stop \(step (\d+)\)")[1])
    return trial.resumed(launched, f"saved step {step} and exited with 75 in {seconds:.1f} s")


def _check_stopped_twice(trial: Trial) -> str:
    launched = trial.train("--restarts=3", inject=True)
    launched.check_code(128 + signal.SIGKILL, ExitCode.PREEMPTED)
    seconds = launched.stopped(STOP_SECONDS)
    return trial.resumed(launched, f"ended {seconds:.1f} s after the first Ctrl-C")


def _check_hanging(trial: Trial) -> str:
    usual = max(_HANG_SECONDS, STEPS * trial.reference.step_seconds())
    return trial.restarted(
        rf"^error: process {trial.last} hangs at step \d+: no progress for",
        f"--hang-timeout={_HANG_SECONDS:g}",
        # The usual time of a step varies, and so does the limit that follows from it.
        within=2 * usual + STOP_SECONDS,
    )


def _check_exception(trial: Trial) -> str:
    launched = trial.train(inject=True)
    if launched.code == 0:
        raise NotSurvived("exit code 0 after an exception")
    launched.stopped(STOP_SECONDS)
    if EXCEPTION_TEXT not in launched.problem():
        raise NotSurvived(f"the first error is {launched.problem()!r}")
    raised = re.compile(rf"\[\d+\] .*: {EXCEPTION_TEXT}")
    shown = [line for line in launched.lines if raised.match(line.text)]
    if len(shown) != 1:
        raise NotSurvived(f"the exception is shown {len(shown)} times")
    end = launched.find(rf"^launch: process {trial.last} ended with exit code \d+ at step (\d+)")
    return trial.resumed(launched, f"exit code {launched.code}, shown once with its step, {end[1]}")


def _check_crash_loop(trial: Trial) -> str:
    trial.prepare(checkpoints=2)
    launched = trial.train("--restarts=10", inject=True, code=CRASH_CODE)
    launched.find(r"3 restarts without a new checkpoint: the cause has to be fixed")
    return trial.resumed(launched, _GIVEN_UP)


FAULTS = (
    Fault(
        "sigkill",
        "SIGKILL of the last process during a step",
        _RESTARTED,
        lambda trial: _check_killed(trial, trial.last),
    ),
    Fault(
        "sigkill-first",
        "SIGKILL of process 0, which coordinates",
        _RESTARTED,
        lambda trial: _check_killed(trial, 0),
        why_not=several_processes,
    ),
    Fault(
        "sigkill-launcher",
        "SIGKILL of the launcher",
        "its processes end with it, the port is free, the same command resumes",
        _check_launcher_killed,
    ),
    Fault(
        "sigkill-save",
        "SIGKILL while a checkpoint is written, at several points",
        "the previous checkpoint restores, partial ones are never listed, leftovers are removed",
        _check_killed_saving,
        starts=4,
    ),
    Fault(
        "preempt",
        "SIGTERM to the last process",
        _SAVED,
        lambda trial: _check_stopped(trial, "SIGTERM"),
    ),
    Fault("ctrl-c", "Ctrl-C", _SAVED, lambda trial: _check_stopped(trial, "SIGINT")),
    Fault(
        "ctrl-c-twice",
        "Ctrl-C, and again half a second later",
        "ends at once; the same command resumes from the last checkpoint",
        _check_stopped_twice,
    ),
    Fault(
        "sigstop",
        "SIGSTOP of the last process, so that the others wait for it",
        "named in 10 s with where every process is, and all restart",
        lambda trial: trial.restarted(
            rf"^error: process {trial.last} hangs at step \d+: stopped by a signal \(SIGSTOP\)"
        ),
    ),
    Fault(
        "gil",
        "the last process holds Python's interpreter lock forever",
        "noticed from outside, named with where every process is, and all restart",
        _check_hanging,
    ),
    Fault(
        "exception",
        "an exception in the last process only",
        "shown once and first, with the process and the step; the same command resumes",
        _check_exception,
    ),
    Fault("crash-loop", "the last process crashes at every start", _GIVEN_UP, _check_crash_loop),
)
