"""`meshwright train`: trains from a config, and writes the run folder."""

import json
import shlex
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

# Reading the data imports it anyway, but then the devices wait; now they start.
import grain  # noqa: F401  # pyright: ignore[reportUnusedImport]
from rich.text import Text

from meshwright.cli.invocation import invoked_as
from meshwright.cli.request import Request, assemble_first, check_planned_model
from meshwright.config.compose import parse_overrides
from meshwright.config.origins import chosen_keys, trace_origins
from meshwright.errors import ExitCode, UserError
from meshwright.inputs.plan_file import other_model
from meshwright.mesh.terminal_drawing import render_mesh
from meshwright.plan import Plan
from meshwright.processes import broadcast, process_count
from meshwright.runtime.attempts import EarlierAttempts, ProcessRange
from meshwright.step.assemble import Assembled
from meshwright.trainer import FitResult
from meshwright.trainer.fit_settings import FitSettings
from meshwright.trainer.run_dir import claimed_folder
from meshwright.trainer.starting.resume import find_resume_point
from meshwright.trainer.starting.run_warnings import fitting_warmup, schedule_warnings
from meshwright.trainer.trained.fit_result import summarize


def run(request: Request) -> int:
    """Train, and print a summary."""
    asked = request.arguments.has("--distributed")
    if asked and process_count() == 1 and ProcessRange.from_environment() is None:
        raise UserError(
            "--distributed: this process would train alone",
            why="the environment names no other processes",
            fix="export MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK in each of them, or write "
            "meshwright launch --nprocs N -- train …",
        )
    # A run that its launcher restarts stays in its folder, whose name may contain the time.
    earlier, composed = EarlierAttempts.from_environment().folder, request.composed
    folder = Path(broadcast(str((earlier or composed.run_dir).absolute())))
    # One that is named by the time alone is new.
    is_new = earlier is None and "${now:" in str(composed.hydra["run"]["dir"])
    with claimed_folder(folder) if is_new else nullcontext(folder) as claimed:
        return _train(request, claimed)


def _train(request: Request, folder: Path) -> int:
    point = find_resume_point(request.config.resume, folder)
    config, said = fitting_warmup(
        request.config,
        chosen_keys(request.config, request.composed),
        None if point is None else point.metadata,
    )
    request = replace(request, config=config)
    trainer = request.trainer(folder)
    trainer.defaults = replace(trainer.defaults, warnings=[*trainer.defaults.warnings, *said])
    # Mistakes in the model, the task or the data show here, before a file is written.
    _, assembled = assemble_first(trainer)
    trainer.defaults = _with_request(trainer.defaults, request, assembled)
    result = trainer.fit(assembled=assembled)
    _print_result(request, assembled.plan, result)
    return ExitCode.PREEMPTED if result.interrupted else ExitCode.DONE


def _with_request(asked: FitSettings, request: Request, assembled: Assembled) -> FitSettings:
    """Return how to train, with what only the command line knows."""
    config, composed = request.config, request.composed
    assert asked.recipe is not None
    num_parameters = assembled.model_leaves.num_parameters
    if config.plan is not None and find_resume_point(asked.resume, asked.run_dir) is None:
        check_planned_model(request, num_parameters)
    warnings = schedule_warnings(
        config,
        asked.recipe,
        assembled.plan.batch.global_batch_size,
        overrides=[o.key_or_group for o in parse_overrides(composed.overrides)],
        chosen=chosen_keys(config, composed),
    )
    return replace(
        asked,
        config={**asked.config, "simulate": config.simulate, "plan": config.plan},
        files={"config.json": _origins(request)},
        warnings=[*asked.warnings, *warnings, *other_model(config.plan, num_parameters)],
        on_checked=partial(_show_mesh, request, assembled),
    )


def _show_mesh(request: Request, assembled: Assembled) -> None:
    if request.output.as_json:
        return
    request.output.say(render_mesh(assembled.mesh))
    if assembled.pipeline_report is not None:
        request.output.say(Text(assembled.pipeline_report.summary()))


def _origins(request: Request) -> str:
    """Return where each value of the config comes from, as JSON."""
    origins = trace_origins(request.config, request.composed)
    entries = [
        {"key": o.key, "value": o.value, "origin": o.source, "from": o.detail} for o in origins
    ]
    return json.dumps(entries, ensure_ascii=False)


def _print_result(request: Request, plan: Plan, result: FitResult) -> None:
    sample, grade = result.extra.get("sample"), result.extra.get("grade")
    report: dict[str, Any] = {
        "run_dir": str(result.run_dir),
        "mesh": plan.mesh,
        "devices": plan.num_devices,
        "steps": result.steps,
        **summarize(result.losses, result.eval),
        "seconds": round(result.seconds, 2),
        "stopped": result.stopped,
        "sample": sample,
        "grade": grade,
    }
    # Plain text, because a wrapped path cannot be copied.
    request.output.result(report, text="\n".join(_lines(result, sample, grade)))


def _lines(result: FitResult, sample: str | None, grade: str | None) -> list[str]:
    lines = str(result).splitlines()
    if sample:
        graded = [grade] if grade else []
        lines += ["", "sample of generated text:", *sample.splitlines(), *graded, ""]
    if result.interrupted:
        lines.append(
            f"to resume: the same command with {shlex.quote(f'hydra.run.dir={result.run_dir}')}"
        )
    if sample:
        data, model = (result.metadata.config.get(part, {}) for part in ("data", "model"))
        chat = ["--chat"] if data.get("kind") == "chat" else []
        own = ["--model", model["kind"]] if ":" in model.get("kind", "") else []
        words = ["generate", str(result.run_dir), *own, *chat, "--prompt"]
        more = shlex.join([*invoked_as(), *words])
        lines.append(f'more of it: {more} "…"')
    return [
        *lines,
        f"run folder: {result.run_dir}",
        f"HTML report: {shlex.join([*invoked_as(), 'report', str(result.run_dir)])}",
    ]
