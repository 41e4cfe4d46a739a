"""`meshwright drill`: injects faults into a real run, and checks that it recovers."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.cli.arguments import Arguments
from meshwright.cli.request import Request
from meshwright.config.distributed_config import DistributedConfig
from meshwright.drill.run_drill import FAULTS, DrillReport, FaultResult, run_drill
from meshwright.drill.trial import DEFAULT_STEPS, FEWEST_STEPS, Configuration, Fault
from meshwright.errors import ExitCode, UserError, did_you_mean
from meshwright.launch.environments import count_gpus
from meshwright.launch.flags import MAX_PROCESSES
from meshwright.runtime.activity import activity
from meshwright.text.columns import Columns
from meshwright.text.units import counted, human_seconds

_STYLES = {"passed": "green", "failed": "bold red", "not applicable": "dim"}
_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


def run(request: Request) -> int:
    """Run the drill and print its table."""
    arguments, output = request.arguments, request.output
    faults = _chosen(arguments)
    if arguments.has("--list"):
        rows = [(fault.name, fault.what, fault.expected) for fault in faults]
        listed = [dict(zip(("fault", "what", "expected"), row, strict=True)) for row in rows]
        output.result(
            listed, Columns(("fault", "what happens", "how the run has to recover"), rows)
        )
        return ExitCode.DONE
    if DistributedConfig.from_environment().world_size > 1:
        raise UserError(
            "a drill starts its processes itself",
            why="the environment says that this is one process among others",
            fix="leave launch out, and write meshwright drill --nprocs N …",
        )
    folder = Path(tempfile.mkdtemp(prefix="meshwright-drill-"))
    keep = arguments.has("--keep")
    try:
        configuration = _configuration(request, folder)
        with activity("drilling", afterwards=False) as show_progress:
            report = run_drill(
                configuration, faults, folder, show_progress, lambda row: output.say(_line(row))
            )
        keep |= bool(report.failed)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    kept = str(folder) if keep else None
    output.result({**report.to_json(), "folder": kept}, _picture(report, kept))
    return ExitCode.CHECK_FAILED if report.failed else ExitCode.DONE


def _configuration(request: Request, folder: Path) -> Configuration:
    """Return the run to drill; prepare this process and the environment of the others."""
    import jax

    # Checkpoints are read here, while the accelerators belong to the processes of the drill.
    jax.config.update("jax_platforms", "cpu")
    gpus = request.config.simulate is None and count_gpus(os.environ) > 0
    if gpus:
        # Otherwise even two identical runs differ in the last bits.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DETERMINISTIC}".strip()
    arguments = request.arguments
    flags = [
        f"{name}={arguments.flags[name]}"
        for name in ("--config", "--config-dir")
        if arguments.has(name)
    ]
    return Configuration(
        words=(*flags, *arguments.overrides),
        nprocs=arguments.number("--nprocs", 2, most=MAX_PROCESSES),
        devices=arguments.given_number("--devices-per-process"),
        steps=_steps(request),
        # Of several processes with GPUs, one that finds a program would wait for one that does not.
        cache=None if gpus else folder / "compiled",
    )


def _steps(request: Request) -> int:
    """Return the steps of each run: those of the config, if they are few."""
    arguments, own = request.arguments, request.config.training.steps
    steps = arguments.number("--steps", max(FEWEST_STEPS, min(own, DEFAULT_STEPS)))
    if steps < FEWEST_STEPS:
        raise UserError(
            f"--steps {steps} is not enough for a drill",
            why="two checkpoints come before a fault, and steps after it",
            fix=f"write --steps {FEWEST_STEPS} or more",
        )
    return steps


def _chosen(arguments: Arguments) -> list[Fault]:
    """Return the faults that --only names; all by default."""
    if not arguments.has("--only"):
        return list(FAULTS.values())
    names = [name.strip() for name in arguments.flags["--only"].split(",") if name.strip()]
    for name in names:
        if name not in FAULTS:
            hint = did_you_mean(name, FAULTS)
            raise UserError(
                f"--only: there is no fault `{name}`" + (f": {hint}" if hint else ""),
                why=f"faults: {', '.join(FAULTS)}",
                fix="meshwright drill --list describes them",
            )
    return [fault for name, fault in FAULTS.items() if name in names]


def _line(row: FaultResult) -> RenderableType:
    return Text.assemble((row.verdict, _STYLES[row.verdict]), f"  {row.fault}: {row.happened}")


def _picture(report: DrillReport, folder: str | None) -> RenderableType:
    rows = [
        (
            row.fault,
            Text(row.verdict, style=_STYLES[row.verdict]),
            f"{row.seconds:.1f}" if row.seconds else "",
            row.happened,
        )
        for row in report.rows
    ]
    table = Columns(("fault", "verdict", "seconds", "what happened"), rows, right=("seconds",))
    where = [] if folder is None else [Text(f"logs and run folders: {folder}", overflow="fold")]
    return Group(table, Text(_summary(report)), *where)


def _summary(report: DrillReport) -> str:
    verdicts: Sequence[str] = [row.verdict for row in report.rows]
    mesh = " × ".join(f"{axis}={size}" for axis, size in report.mesh.items())
    skipped = verdicts.count("not applicable")
    return (
        f"{mesh} in {counted(report.processes, 'process')}: "
        f"{verdicts.count('passed')} passed, {len(report.failed)} failed"
        + (f", {skipped} not applicable" if skipped else "")
        + f", in {human_seconds(report.seconds)}"
    )
