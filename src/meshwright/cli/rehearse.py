"""`meshwright rehearse`: compiles a step for devices elsewhere, and says what it needs."""

import math
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.cli.auto_settings import recipe_estimator
from meshwright.cli.plan import read_share, with_any_data
from meshwright.cli.request import Request, check_planned_model
from meshwright.config.origins import set_by_user
from meshwright.config.schema import Config
from meshwright.errors import ExitCode, Setting, UserError
from meshwright.hardware import LOCAL, Hardware, chip_by_name, is_local, parse_hardware
from meshwright.inputs.plan_file import other_model
from meshwright.launch.environments import count_gpus
from meshwright.mesh.axes import INFER
from meshwright.mesh.simulate import MAX_DEVICES, simulate_devices
from meshwright.plan import Plan, make_plan, mesh_sizes
from meshwright.planner.devices.absent_gpus import (
    INSTALL,
    absent_gpus,
    can_compile_for,
    cudnn_version,
)
from meshwright.planner.estimate.estimate import Estimate
from meshwright.planner.estimate.words import room
from meshwright.planner.rehearse.rehearsal import (
    CPU_PROGRAM,
    Figure,
    Rehearsal,
    figures_table,
    make_figures,
    rehearse,
)
from meshwright.processes import process_count
from meshwright.recipe import Recipe, make_recipe
from meshwright.runtime.activity import activity
from meshwright.runtime.jax_internals import attention_on
from meshwright.text.columns import Indented
from meshwright.text.units import human_bytes
from meshwright.trees import resize_batch

ON = "--on"
_MOCKED = "--xla_gpu_shard_autotuning=false"
"""Mocked devices would wait for each other to tune kernels."""


Target = Literal["gpu", "absent gpus", "cpu"]
"""What the step is compiled for: the GPU here, which stands for all, GPUs elsewhere, or CPUs."""


def run(request: Request) -> int:
    """Compile the step, run it on a GPU if there is one, and print what is known about it."""
    if process_count() > 1:
        raise UserError(
            "a rehearsal runs in one process",
            why=f"there are {process_count()}",
            fix="run it without `meshwright launch`; it compiles for all devices by itself",
        )
    hardware, share = _hardware(request.config), read_share(request.arguments)
    count = count_devices(request.config, hardware)
    target = _choose(request, hardware)
    with activity("starting JAX"):
        _start_devices(count, target)
        plan = make_plan(request.config, count)
        decided = set_by_user(request.config, request.composed)
        recipe = make_recipe(with_any_data(request, decided), plan.batch.global_batch_size)
    batch = resize_batch(recipe.example_batch(1), plan.batch.global_batch_size)
    with _devices(target, hardware) as devices:
        assembled = recipe.assemble(plan, batch, devices=devices)
        check_planned_model(request, assembled.model_leaves.num_parameters)
        rehearsal = rehearse(assembled, run=target == "gpu")
    estimate = _estimate(recipe, plan, hardware)
    figures = make_figures(rehearsal, hardware, estimate)
    remarks = other_model(request.config.plan, assembled.model_leaves.num_parameters)
    report = _report(rehearsal, hardware, figures, [*remarks, *assembled.remarks])
    report["memory"] |= _besides(estimate)
    lines = _room(rehearsal, estimate, share) if hardware is not None else []
    request.output.result(report, _picture(rehearsal, lines, figures, report))
    return ExitCode.DONE


def _estimate(recipe: Recipe, plan: Plan, hardware: Hardware | None) -> Estimate:
    """Return what the planner predicts; without a name the hardware is what was simulated."""
    hardware = hardware or Hardware(chip=chip_by_name("CPU"), count=plan.num_devices)
    with activity("estimating the plan"):
        return recipe_estimator(recipe, plan.precision).estimate(plan, hardware)


def count_devices(config: Config, hardware: Hardware | None) -> int:
    """Return how many devices to compile for: those of the hardware, or of the mesh."""
    sizes = mesh_sizes(config)
    known = config.simulate if hardware is None else hardware.count
    if known is None and INFER not in sizes.values():
        known = math.prod(sizes.values())
    if known is None:
        raise UserError(
            "a rehearsal needs the number of devices",
            why="one size of the mesh follows from it, and no hardware is given",
            fix=f"write {Setting('hardware', '8xH100')}, or {Setting('simulate', 8)}",
        )
    return known


def _hardware(config: Config) -> Hardware | None:
    if config.hardware is None:
        return None
    if is_local(config.hardware):
        raise UserError(
            f"{Setting('hardware', LOCAL)} is this machine, which needs no rehearsal",
            why="a rehearsal compiles for devices that are not here",
            fix="name the hardware, such as hardware=8xH100",
        )
    return parse_hardware(config.hardware)


def _choose(request: Request, hardware: Hardware | None) -> Target:
    """Return what to compile for: GPUs if the hardware has them, and they can be compiled for."""
    asked = request.arguments.flags.get(ON)
    if asked not in (None, "cpu", "gpu"):
        raise UserError(f"{ON} {asked} is not valid", fix=f"write {ON} cpu or {ON} gpu")
    for_gpus = hardware is not None and hardware.chip.platform in ("cuda", "rocm")
    if asked == "cpu" or not (asked or for_gpus):
        return "cpu"
    if count_gpus(os.environ) > 0:
        return "gpu"
    if hardware is not None and can_compile_for(hardware):
        return "absent gpus"
    if asked is None:
        return "cpu"
    raise _no_gpu(hardware)


def _no_gpu(hardware: Hardware | None) -> UserError:
    """Return why nothing can be compiled for GPUs here."""
    if hardware is None:
        why = "no hardware is given to compile for"
        fix = f"write {Setting('hardware', '8xH100')}, or {ON} cpu"
    elif hardware.chip.cores is None:
        why = f"the processors of {hardware.chip.name} are not known"
        fix = f"write {ON} cpu, or `cores` of an NVIDIA GPU in your hardware file"
    else:
        why, fix = "its compiler for them is not installed", f"{INSTALL}, or write {ON} cpu"
    return UserError(
        f"{ON} gpu needs a GPU, or a compiler for GPUs that are elsewhere",
        why=f"JAX sees no GPU on this machine, and {why}",
        fix=fix,
    )


def _start_devices(count: int, target: Target) -> None:
    """Start as many devices, of which at most one exists; one CPU where none is needed."""
    import jax

    if target == "absent gpus":
        simulate_devices(1)
    elif target == "cpu":
        if count > MAX_DEVICES:
            raise UserError(
                f"cannot rehearse on {count} virtual devices",
                why=f"one process has at most {MAX_DEVICES}",
                fix=f"rehearse with {MAX_DEVICES}, or for GPUs: {ON} gpu",
            )
        simulate_devices(count)
    elif count > 1:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_MOCKED}".strip()
        # Slices × hosts × devices of a host; each host has the one GPU that exists.
        jax.config.update("jax_mock_gpu_topology", f"1x{count}x1")


@contextmanager
def _devices(target: Target, hardware: Hardware | None) -> Generator[list[Any] | None]:
    """Yield the devices to compile for; None for those that JAX lists."""
    if target != "absent gpus":
        yield None
        return
    assert hardware is not None
    assert hardware.chip.cores is not None
    with attention_on(hardware.chip.cores.capability, cudnn_version()):
        yield absent_gpus(hardware)


def _report(
    rehearsal: Rehearsal, hardware: Hardware | None, figures: list[Figure], remarks: list[str]
) -> dict[str, Any]:
    return {
        "plan": rehearsal.plan.model_dump(mode="json"),
        "hardware": None if hardware is None else str(hardware),
        "compiled_for": rehearsal.compiled_for,
        "compile_seconds": rehearsal.compile_seconds,
        "memory": {
            "state_bytes": rehearsal.state,
            "batch_bytes": rehearsal.batch,
            "argument_bytes": rehearsal.memory.argument,
            "temp_bytes": rehearsal.memory.temp,
            "total_bytes": rehearsal.memory.total,
        },
        "sent_bytes": {axis: own.sent_bytes for axis, own in rehearsal.ledger.axes.items()},
        "overlapped": {axis: own.overlapped for axis, own in rehearsal.ledger.axes.items()},
        "figures": [figure.to_json() for figure in figures],
        "remarks": remarks,
    }


def _picture(
    rehearsal: Rehearsal, verdict: list[str], figures: list[Figure], report: dict[str, Any]
) -> RenderableType:
    lines = [*verdict, *_overlap(rehearsal), *_caveats(rehearsal)]
    return Group(
        Text(rehearsal.plan.describe(), style="bold"),
        Text(f"compiled for {rehearsal.compiled_for} in {rehearsal.compile_seconds} s"),
        Text(),
        figures_table(figures, errors=rehearsal.for_gpus),
        Text(),
        *(Indented(line, 2, first=0) for line in lines),
        *(Indented(f"remark: {remark}", 2, first=0) for remark in report["remarks"]),
    )


def _room(rehearsal: Rehearsal, estimate: Estimate, share: float) -> list[str]:
    """Say whether the program fits on the hardware, by the limit that plans have."""
    besides = {name: size for name, size in _besides(estimate).items() if size}
    needs, capacity = rehearsal.memory.total + sum(besides.values()), estimate.capacity
    verdict = "fits on" if needs <= share * capacity else "does not fit on"
    lines = [f"It {verdict} {estimate.hardware.chip.name}: {room(needs, capacity, share)}."]
    if besides:
        parts = (f"{n.removesuffix('_bytes')} {human_bytes(s)}" for n, s in besides.items())
        lines.append(f"With what runs beside the step, as predicted: {', '.join(parts)}.")
    return lines


def _besides(estimate: Estimate) -> dict[str, int]:
    """Return what learning from rewards needs that is not part of the compiled step."""
    memory = estimate.memory
    return {"reference_bytes": memory.reference, "rollout_bytes": memory.rollout}


def _overlap(rehearsal: Rehearsal) -> list[str]:
    """Say how much is sent while devices compute, if the compiled program shows it."""
    shares = [
        f"{own.overlapped:.0%} over {axis}"
        for axis, own in rehearsal.ledger.axes.items()
        if own.overlapped is not None
    ]
    return [f"Sent while the devices compute: {', '.join(shares)}."] if shares else []


def _caveats(rehearsal: Rehearsal) -> list[str]:
    if rehearsal.measured is not None:
        return ["The program of the first device ran, with communication that takes no time."]
    if rehearsal.for_gpus:
        return [
            "Compiled for these GPUs without having one: memory and what is sent are those of the "
            "program they would run, except for what tuning kernels on them changes."
        ]
    return [CPU_PROGRAM]
