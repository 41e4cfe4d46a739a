"""`meshwright plan`: the best mesh and settings for some hardware, and why."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.cli.arguments import Arguments
from meshwright.cli.auto_settings import config_estimator
from meshwright.cli.invocation import invoked_as
from meshwright.cli.output import write_file
from meshwright.cli.request import (
    Request,
    as_setting,
    check_planned_model,
    compose,
    describing,
    setting_group,
)
from meshwright.config.compose import Composed, parse_overrides, validate
from meshwright.config.origins import set_by_user
from meshwright.config.schema import Config, DataConfig
from meshwright.errors import ExitCode, Setting, UserError
from meshwright.hardware import LOCAL, MEMORY_SHARE, Hardware, chip_by_name, is_local
from meshwright.inputs.plan_file import KEY, without_planned
from meshwright.plan import mesh_sizes
from meshwright.planner.devices.absent_gpus import can_compile_for
from meshwright.planner.devices.links import check_network
from meshwright.planner.devices.local_hardware import find_hardware
from meshwright.planner.guidance.budget import Goal, PlanGoal, parse_goal, parse_price
from meshwright.planner.guidance.plan_report import PlanReport, make_report
from meshwright.planner.guidance.plan_rows import report_json
from meshwright.planner.guidance.plan_text import report_text
from meshwright.planner.guidance.why_this_plan import NothingFits
from meshwright.planner.search.candidates import PlanTask, config_task
from meshwright.recipe import find_data, make_task, training_duration
from meshwright.runtime.garbage import few_collections
from meshwright.text.columns import Indented
from meshwright.text.units import counted

COMPARABLE = ("mesh", "sharding", "pipeline", "training", "precision", "hardware", "kernels", KEY)
"""Settings that two plans for the same model may differ in."""
_PRECISION = {KEY, "precision", "precision.compute", "training.mixed_precision"}
"""Settings after which the compute format is another one."""
_SOURCES = ("--config-dir", "--config")
"""Flags that say where settings come from."""


@few_collections()
def run(request: Request) -> int:
    """Find the best plan, explain it, and write it to the files that were asked for."""
    arguments, config = request.arguments, request.config
    share, top = read_share(arguments), arguments.number("--top", 5)
    hardware = _hardware(config)
    check_network(hardware)
    decided = _decided(config, request.composed)
    _check_planned(config, hardware)
    task, remarks = config_task(config, decided, hardware, memory_share=share)
    other, goal = _compared(arguments, task), _goal(request, hardware)
    estimator = config_estimator(with_any_data(request, decided), task.global_batch_size)
    check_planned_model(request, estimator.num_parameters)
    try:
        report = make_report(
            estimator,
            task,
            name=request.composed.choices.get("model", config.model.kind),
            top=top,
            other=other,
            goal=goal,
            remarks=remarks,
        )
    except NothingFits as error:
        if request.output.as_json:
            request.output.result(error.report)
        raise
    _write_files(request, report)
    found, text = report_json(report), report_text(report)
    if arguments.has("--prove"):
        text = Group(text, *_prove(report, arguments.overrides, found))
    request.output.result(found, text)
    return ExitCode.DONE


def _decided(config: Config, composed: Composed) -> set[str]:
    """Return the keys that are not to be changed: those of the user, and of a plan they name."""
    return set_by_user(config, composed) | {
        key for key, file in composed.read_from.items() if file == config.plan
    }


def _check_planned(config: Config, hardware: Hardware) -> None:
    """Refuse a plan for another number of devices."""
    count = math.prod(mesh_sizes(config).values())
    if config.plan is None or count == hardware.count:
        return
    raise UserError(
        f"{Setting(KEY, config.plan)} is for {counted(count, 'device')}, and {hardware} has "
        f"{hardware.count}",
        fix=f"name as many devices, such as {Setting('hardware', f'{count}xH100')}, or leave "
        f"{Setting(KEY)} out to plan for {hardware}",
    )


def _prove(
    report: PlanReport, overrides: Sequence[str], found: dict[str, Any]
) -> list[RenderableType]:
    """Compile the ranked plans, compare with what is predicted, and say what that is worth.

    They are compiled for their hardware if there is a compiler for it here, else for CPUs. What is
    ``found`` is completed.
    """
    from meshwright.planner.rehearse.prove import cpu_note, proof_table, prove

    ranked = list(report.result.plans)
    for_gpus = all(can_compile_for(each.hardware) for each in ranked)
    note = "" if for_gpus else cpu_note(report.result.task.hardware)
    proved, notes = prove(ranked, overrides, for_gpus=for_gpus), [note] if note else []
    found["proof"] = [each.to_json() for each in proved]
    found["remarks"] += notes
    return [Text(), proof_table(proved), *(Indented(note, 2, first=0) for note in notes)]


def read_share(arguments: Arguments) -> float:
    """Return the share of a device's memory that a plan may take."""
    text = arguments.flags.get("--memory-share", str(MEMORY_SHARE))
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UserError(
            f"--memory-share {text} is not valid",
            fix=f"write a share from 0 to 1, such as {MEMORY_SHARE}",
        )
    return share


def _hardware(config: Config) -> Hardware:
    """Return the hardware that is named, simulated or present; JAX starts only for the last."""
    if config.hardware is None and config.simulate is not None:
        return Hardware(chip=chip_by_name("CPU"), count=config.simulate)
    local = config.hardware is not None and is_local(config.hardware)
    if local and config.simulate is not None:
        raise UserError(
            f"{Setting('hardware', LOCAL)} contradicts {Setting('simulate', config.simulate)}",
            why="the devices of this machine are measured, and simulated ones are not there",
            fix=f"write {Setting('simulate', config.simulate)} without hardware, or name it, such "
            f"as {Setting('hardware', '8xH100')}",
        )
    if config.hardware is not None and not local:
        import jax

        # The model is only traced, for which this machine's accelerators stay untouched.
        jax.config.update("jax_platforms", "cpu")
    return find_hardware(config.hardware)


def _goal(request: Request, hardware: Hardware) -> PlanGoal | None:
    """Return how much to train: by a flag, or as the config says."""
    flags, given = request.arguments.flags, hardware.chip.usd_per_device_hour
    price = parse_price(flags["--price"]) if "--price" in flags else given
    if "--tokens" in flags and "--epochs" in flags:
        raise UserError("--tokens and --epochs are both given", fix="write one of them")
    duration = training_duration(request.config)
    if "--tokens" in flags or "--epochs" in flags:
        goal = parse_goal(flags.get("--tokens") or f"{flags['--epochs']} epochs")
    elif duration.epochs is not None:
        goal = Goal(duration.epochs, "epochs")
    elif duration.steps:
        goal = Goal(duration.steps, "steps")
    else:
        return None
    data = find_data(request.config, make_task(request.config)) if goal.unit == "epochs" else None
    return PlanGoal(goal, data and data.train.num_samples, price)


def with_any_data(request: Request, decided: set[str]) -> Config:
    """Return the config with random samples, which have the same shapes, for data not chosen."""
    named = {override.key_or_group for override in parse_overrides(request.arguments.overrides)}
    saved = request.composed.config_file is not None
    if saved or "data" in named or any(key.startswith("data.") for key in decided):
        return request.config
    return request.config.model_copy(update={"data": DataConfig(kind="synthetic")})


def _compared(arguments: Arguments, task: PlanTask) -> PlanTask | None:
    """Return the task with the settings of ``--compare``, and otherwise the same."""
    if not arguments.has("--compare"):
        return None
    words = tuple(map(as_setting, shlex.split(arguments.flags["--compare"])))
    changed = {override.key_or_group for override in parse_overrides(words)}
    for key in changed:
        if key.partition(".")[0] not in COMPARABLE:
            raise UserError(
                f"--compare cannot change {key}",
                why=f"all settings after --compare belong to the other plan, and plans for the "
                f"same model differ in {', '.join(COMPARABLE)}",
                fix="write settings of both plans before --compare, and after it those of the "
                "other one, such as --compare mesh.tensor=4 mesh.pipe=2",
            )
    here = {setting_group(word) for word in arguments.overrides}
    if len(words) > 1 and "hardware" in changed and "hardware" not in here:
        raise UserError(
            "hardware after --compare is that of the other plan alone",
            why="all settings after --compare belong to the other plan",
            fix="write hardware=… before --compare, to plan for it as well",
        )
    # Settings that the plan itself has are left out.
    given = without_planned(arguments.overrides) if KEY in changed else arguments.overrides
    kept = [
        text
        for text in given
        if not {override.key_or_group for override in parse_overrides([text])} & {*changed, KEY}
    ]
    composed = compose(replace(arguments, overrides=(*kept, *words)))
    config = validate(composed)
    hardware = _hardware(config) if "hardware" in changed else task.hardware
    _check_planned(config, hardware)
    decided = _decided(config, composed)
    other, _ = config_task(config, decided, hardware, memory_share=task.memory_share)
    same = dict[str, Any]()
    if config.training.global_batch_size is None:
        same["global_batch_size"] = task.global_batch_size
    if not changed & _PRECISION:
        # A plan may have set it.
        same["precision"] = task.precision
    return replace(other, **same)


def _write_files(request: Request, report: PlanReport) -> None:
    flags = request.arguments.flags
    if "--html" in flags:
        from meshwright.report.plan_page import plan_page

        write_file(Path(flags["--html"]), plan_page(report))
    if "--out" in flags:
        words = describing(request.arguments.overrides)
        write_file(Path(flags["--out"]), report.to_yaml(words))
        # With no setting that the plan itself has.
        own = without_planned(request.arguments.overrides)
        settings = [word for word in own if setting_group(word) != "hardware"]
        sources = [(flag, flags[flag]) for flag in _SOURCES if flag in flags]
        train = [*invoked_as(), "train", *chain(*sources), *settings, f"{KEY}={flags['--out']}"]
        command = shlex.join(train)
        line = Text(f"to train with this plan: {command}", overflow="ignore", no_wrap=True)
        # Rich wraps a text by itself, whatever it says.
        request.output.say(Group(line))
