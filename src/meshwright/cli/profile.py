"""`meshwright profile`: where the time of a step goes, from a trace of a few steps."""

from __future__ import annotations

import json
from pathlib import Path

import jax
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.cli.output import write_file
from meshwright.cli.request import Request, assemble_first
from meshwright.errors import ExitCode
from meshwright.processes import is_main
from meshwright.profile import Profile, Profiling
from meshwright.profile.profiler import WARM_UP
from meshwright.runtime.activity import activity
from meshwright.text.columns import Columns, Indented
from meshwright.text.units import counted, human_bytes
from meshwright.trainer.batch_loader import BatchLoader
from meshwright.trainer.programs import compile_step


def run(request: Request) -> int:
    """Compile, warm up, trace a few steps, and print their profile."""
    if request.arguments.has("--scaling"):
        from meshwright.cli.measured_scaling import scaling_report

        request.output.result(*scaling_report(request, request.arguments.number("--steps", 5)))
        return ExitCode.DONE
    request.report_unused_settings(request.plan(), steps_flag="--steps")
    folder = Path(request.arguments.flags.get("--out", "profile"))
    steps = request.arguments.number("--steps", 5)
    profile = _measure(request, folder / "trace", steps)
    if is_main():
        text = json.dumps(profile.to_json() | {"trace": "trace"}, indent=2)
        write_file(folder / "profile.json", text + "\n")
    request.output.result(profile.to_json(), picture(profile))
    return ExitCode.DONE


def _measure(request: Request, trace: Path, steps: int) -> Profile:
    config, trainer = request.config, request.trainer()
    batch, assembled = assemble_first(trainer)
    assert trainer.defaults.recipe is not None
    compiled = compile_step(assembled, batch)
    profiling, profile = Profiling(trace, assembled.mesh, compiled.text, steps=steps), None
    loader = BatchLoader(
        trainer.defaults.recipe.data,
        batch_size=assembled.plan.batch.global_batch_size,
        sharding=assembled.step.shardings.batch,
        workers=config.data.workers,
        prefetch=config.data.prefetch,
    )
    with activity("initializing the state"):
        state = assembled.init(config.run.seed)
    running = activity(f"running {counted(steps, 'step')}")
    with running, loader.open(0, WARM_UP + steps) as batches:
        for number, batch in enumerate(batches):
            with jax.profiler.StepTraceAnnotation("step", step_num=number):
                state, metrics = compiled.run(state, batch)
            profile = profiling.after((state, metrics), loader.waited)
    assert profile is not None
    return profile


def picture(profile: Profile) -> RenderableType:
    """Return a profile as tables for the terminal."""
    parts: list[RenderableType] = [
        Text.assemble(
            (f"{1000 * profile.seconds_per_step:,.1f} ms per step", "bold"),
            f", mean of {profile.steps} on {counted(len(profile.devices), 'device')}",
        ),
        _shares(profile),
    ]
    if profile.collectives:
        parts += [Text(), _collectives(profile)]
    if profile.advice:
        parts += [Text(), *(Indented(f"! {line}", 2, "yellow", first=0) for line in profile.advice)]
    trace = f"trace: {profile.trace} (TensorBoard --logdir there, or its trace.json.gz in Perfetto)"
    return Group(*parts, Text(), Text(trace, overflow="fold"))


def _shares(profile: Profile) -> Table:
    table = Table.grid("", "", "", padding=(0, 2))
    for name, share in profile.shares.items():
        bar = "█" * round(30 * share)
        table.add_row(name.replace("_", " "), Text(f"{share:6.1%}"), bar)
    hidden = profile.hidden_communication
    table.add_row("overlapped", Text(f"{hidden:6.1%}"), "communication that costs no time")
    table.add_row("load balance", Text(f"{profile.load_balance:6.2f}"), "busiest device over mean")
    return table


def _collectives(profile: Profile, most: int = 12) -> Columns:
    rows = [
        (
            time.module or "outside modules",
            time.axis,
            time.kind,
            f"{time.count:g}",
            f"{1000 * time.seconds:.2f}",
            f"{1000 * time.exposed_seconds:.2f}",
            "–" if time.bytes is None else human_bytes(time.bytes),
        )
        for time in profile.collectives[:most]
    ]
    if rest := profile.collectives[most:]:
        seconds = sum(time.seconds for time in rest)
        rows.append((f"… and {len(rest)} more", "", "", "", f"{1000 * seconds:.2f}", "", ""))
    head = ("module", "axis", "kind", "count", "ms", "exposed ms", "sent")
    return Columns(head, rows, right=head[3:])
