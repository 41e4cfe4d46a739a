"""`meshwright profile`: where the time of steps goes; with `--scaling`, on how many devices."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.cli.auto_settings import config_estimator
from meshwright.cli.output import write_file
from meshwright.cli.request import Request, assemble_first
from meshwright.config.schema import Config
from meshwright.data.batches import read_batch
from meshwright.errors import ExitCode, UserError
from meshwright.mesh.axes import MESH_AXES, describe_sizes
from meshwright.plan import Plan, make_plan
from meshwright.planner.devices.local_hardware import hardware_of
from meshwright.planner.search.what_if import device_counts
from meshwright.processes import is_main, process_count
from meshwright.profile import Profile, Profiling
from meshwright.profile.profiler import WARM_UP
from meshwright.recipe import make_recipe
from meshwright.runtime.activity import activity
from meshwright.text.columns import Columns, Indented
from meshwright.text.units import counted, human_bytes, human_count, human_seconds
from meshwright.trainer.batch_loader import BatchLoader
from meshwright.trainer.programs import compile_step

BAR = 24
"""Columns of the longest bar."""
SHARED_CORES = (
    "virtual devices share the cores of this machine, and predictions for CPUs are rough: this "
    "shows that every number of devices runs, not how they scale"
)


@dataclass(frozen=True)
class MeasuredPoint:
    """Steps on a number of devices, in the median; units are tokens, or samples of other data."""

    num_devices: int
    mesh: dict[str, int]
    units: int
    seconds: float
    predicted_seconds: float

    def speed(self, *, predicted: bool = False) -> float:
        """Return tokens or samples per second."""
        return self.units / (self.predicted_seconds if predicted else self.seconds)

    def efficiency(self, first: MeasuredPoint, *, predicted: bool = False) -> float:
        """Return the speed per device, relative to that of the fewest devices."""
        own, usual = (each.speed(predicted=predicted) / each.num_devices for each in (self, first))
        return own / usual

    def to_json(self, first: MeasuredPoint) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self) | {
            "per_second": self.speed(),
            "efficiency": self.efficiency(first),
            "predicted_efficiency": self.efficiency(first, predicted=True),
        }


def scaling_report(request: Request, steps: int) -> tuple[dict[str, Any], RenderableType]:
    """Measure steps on 1, 2, 4 … devices; return the report as plain values, and for reading."""
    points, unit, left_out = _points_of(request, steps)
    config = request.config
    same = "global batch" if config.training.global_batch_size is not None else "batch per device"
    remarks = [f"{count}: not measured: {why}" for count, why in left_out.items()]
    if jax.devices()[0].platform == "cpu":
        remarks.append(SHARED_CORES)
    found = {
        "points": [point.to_json(points[0]) for point in points],
        "unit": unit,
        "same": same,
        "steps": steps,
        "remarks": remarks,
    }
    notes = [Indented(f"remark: {remark}", 2, first=0) for remark in remarks]
    title = Text(f"scaling with the same {same}, median of {steps} steps", "bold")
    legend = Text("█ measured, ░ predicted", "dim")
    return found, Group(title, _table(points, unit), legend, *notes)


def _points_of(request: Request, steps: int) -> tuple[list[MeasuredPoint], str, dict[str, str]]:
    """Return the points, what they count, and why the other numbers of devices have none."""
    if process_count() > 1:
        raise UserError("--scaling measures the devices of one process", fix="leave launch out")
    devices, config = jax.devices(), request.config
    plans, left_out = dict[int, Plan](), dict[str, str]()
    whole = make_plan(config, len(devices))
    for count in device_counts(len(devices), len(devices)):
        try:
            plans[count] = make_plan(_on_fewer(config, whole, count), count)
        except UserError as error:
            left_out[f"{count} of {len(devices)} devices"] = error.why or error.what
    if len(plans) < 2:
        raise UserError(
            "scaling is measured on two numbers of devices at least",
            why="; ".join(f"{count}: {why}" for count, why in left_out.items())
            or "there is one device",
            fix="use more devices, such as simulate=8, or another batch",
        )
    first = plans[min(plans)]
    estimator = config_estimator(config, first.batch.global_batch_size)
    points: list[MeasuredPoint] = []
    for count, plan in plans.items():
        predicted = estimator.estimate(plan, hardware_of(devices[:count])).time.step
        units = plan.batch.global_batch_size * estimator.tokens_per_sample
        seconds = _seconds(request, plan, devices[:count], steps)
        points.append(MeasuredPoint(count, dict(plan.mesh), units, seconds, predicted))
    return points, "tokens" if estimator.tokens_per_sample > 1 else "samples", left_out


def _on_fewer(config: Config, whole: Plan, count: int) -> Config:
    """Return the config for fewer devices: data is divided first, then fsdp, tensor and pipe."""
    sizes, left = {axis: whole.size(axis) for axis in MESH_AXES}, whole.num_devices // count
    for axis in MESH_AXES:
        shared = math.gcd(sizes[axis], left)
        sizes[axis], left = sizes[axis] // shared, left // shared
    return config.model_copy(update={"mesh": config.mesh.model_copy(update=sizes)})


def _seconds(request: Request, plan: Plan, devices: Sequence[Any], steps: int) -> float:
    """Return the median seconds of a step of a plan."""
    size = plan.batch.global_batch_size
    recipe = make_recipe(request.config, size)
    batch = read_batch(recipe.data.batch(0, size))
    assembled = recipe.assemble(plan, batch, devices=devices)
    run = compile_step(assembled, batch).run
    state, placed = assembled.init(request.config.run.seed), assembled.put_batch(batch)
    taken: list[float] = []
    with activity(f"running {describe_sizes(plan.mesh)}"):
        for _ in range(WARM_UP + steps):
            begun = time.perf_counter()
            state, _ = run(state, placed)
            jax.block_until_ready(state)
            taken.append(time.perf_counter() - begun)
    return statistics.median(taken[WARM_UP:])


def _table(points: Sequence[MeasuredPoint], unit: str) -> Columns:
    first = points[0]
    fastest = max(max(point.speed(), point.speed(predicted=True)) for point in points)

    def bar(speed: float, mark: str) -> str:
        return mark * max(1, round(BAR * speed / fastest))

    rows = [
        (
            str(point.num_devices),
            describe_sizes(point.mesh),
            human_seconds(point.seconds),
            human_seconds(point.predicted_seconds),
            human_count(point.speed()),
            f"{point.efficiency(first):.0%}",
            f"{point.efficiency(first, predicted=True):.0%}",
            f"{bar(point.speed(), '█')} {bar(point.speed(predicted=True), '░')}",
        )
        for point in points
    ]
    head = ("devices", "mesh", "step", "predicted step", f"{unit}/s", "per device", "predicted",
            "")  # fmt: skip
    return Columns(head, rows, right=("devices", *head[2:7]))


def run(request: Request) -> int:
    """Compile, warm up, trace a few steps, and print their profile."""
    if request.arguments.has("--scaling"):
        request.output.result(*scaling_report(request, request.arguments.number("--steps", 5)))
        return ExitCode.DONE
    request.report_unused_settings(request.plan(), steps_flag="--steps")
    folder = Path(request.arguments.flags.get("--out", "profile"))
    profile = _measure(request, folder / "trace", request.arguments.number("--steps", 5))
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
