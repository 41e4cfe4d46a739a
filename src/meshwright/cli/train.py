"""`meshwright train`: a run from a config, with its files in a run folder."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import yaml
from rich.text import Text

from meshwright.cli.request import Request
from meshwright.cli.sample import generate_sample
from meshwright.config.origins import trace_origins
from meshwright.config.schema import Config
from meshwright.errors import ExitCode, UserError
from meshwright.mesh.terminal_drawing import render_mesh
from meshwright.plan import Plan, make_plan, unused_settings
from meshwright.processes import broadcast
from meshwright.recipe import make_recipe
from meshwright.step.state import TrainState
from meshwright.tracking.setup import make_trackers
from meshwright.tracking.tracker import Tracker
from meshwright.trainer.callbacks import Callback, EarlyStopping
from meshwright.trainer.folder import make_folder
from meshwright.trainer.resume import Origin, find_origin
from meshwright.trainer.training import FitResult, Training
from meshwright.units import counted


def run(request: Request) -> int:
    """Train, and print a summary."""
    folder = Path(broadcast(str(request.composed.run_dir.absolute())))
    origin = find_origin(request.config.resume, folder)
    config = _keep_batch(request.config, origin)
    plan = make_plan(config, jax.device_count())
    recipe = make_recipe(config, plan.batch.global_batch_size)
    # Mistakes in the model, the task or the data show here, before any file is written.
    example = recipe.example_batch(plan.batch.global_batch_size)
    assembled = recipe.assemble(plan, example)
    generated: dict[str, Any] = {}

    def finish(state: TrainState) -> dict[str, Any]:
        tokens = config.training.sample_tokens
        generated["sample"] = generate_sample(recipe, assembled, state, num_tokens=tokens)
        return generated

    training = Training(
        assembled=assembled,
        loss=recipe.loss,
        batch=example,
        data=recipe.data,
        duration=recipe.duration,
        start=lambda: assembled.init(config.run.seed),
        seed=config.run.seed,
        eval_data=recipe.eval_data,
        eval_every=config.training.eval_every,
        eval_batches=config.training.eval_batches,
        log_every=config.tracking.log_every,
        workers=config.data.workers,
        prefetch=config.data.prefetch,
        callbacks=_callbacks(config),
        run_dir=folder,
        make_tracker=partial(_trackers, config, folder),
        checkpoint=config.checkpoint,
        origin=origin,
        config=config.model_dump(mode="json"),
        project=config.run.project,
        learning_rate=recipe.learning_rate,
        strict=config.strict,
        profile=config.training.profile_communication,
        finish=finish,
        remarks=unused_settings(config, plan),
    )
    training.check()
    make_folder(folder, _files(request, config, plan))
    if not request.output.as_json:
        request.output.say(render_mesh(assembled.mesh))
        if assembled.pipeline is not None:
            request.output.say(Text(assembled.pipeline.summary()))
    result = training.run()
    _print_result(request, plan, result, generated.get("sample"))
    return ExitCode.PREEMPTED if result.interrupted else ExitCode.DONE


def _keep_batch(config: Config, origin: Origin | None) -> Config:
    """Return the config with the checkpoint's global batch size, unless it sets its own."""
    if origin is None or config.training.global_batch_size is not None:
        return config
    size = origin.passport.global_batch_size
    training = config.training.model_copy(update={"global_batch_size": size})
    return config.model_copy(update={"training": training})


def _files(request: Request, config: Config, plan: Plan) -> dict[str, str]:
    """Return the files that are written to the run folder at the start, by name."""
    origins = trace_origins(request.config, request.composed)
    entries = [
        {"key": o.key, "value": o.value, "origin": o.source, "from": o.detail} for o in origins
    ]
    values = config.model_dump(mode="json")
    return {
        "config.yaml": yaml.safe_dump(values, sort_keys=False, allow_unicode=True),
        "config.json": json.dumps(entries, ensure_ascii=False),
        "plan.yaml": plan.to_yaml(),
    }


def _callbacks(config: Config) -> list[Callback]:
    patience = config.training.early_stopping_patience
    if patience is None:
        return []
    if config.training.eval_every is None:
        raise UserError(
            f"training.early_stopping_patience={patience} counts evaluations",
            why="training.eval_every is null, so there is only one, at the end",
            fix="write training.eval_every=… too",
        )
    return [EarlyStopping(patience, min_delta=config.training.early_stopping_min_delta)]


def _trackers(config: Config, folder: Path, updates: int | None) -> Tracker:
    return make_trackers(config.tracking, folder, total_updates=updates)


def _print_result(request: Request, plan: Plan, result: FitResult, sample: str | None) -> None:
    losses = list(result.losses.values())
    report: dict[str, Any] = {
        "run_dir": str(result.run_dir),
        "mesh": plan.mesh,
        "devices": plan.num_devices,
        "steps": result.updates,
        "first_loss": losses[0] if losses else None,
        "final_loss": losses[-1] if losses else None,
        "eval_loss": result.eval_loss,
        "seconds": round(result.seconds, 2),
        "stopped": result.stopped,
        "sample": sample,
    }
    if request.output.as_json:
        request.output.result(report)
        return
    # As plain text, because a wrapped path cannot be copied.
    request.output.text("\n".join(_lines(plan, result, losses, sample)))


def _lines(plan: Plan, result: FitResult, losses: list[float], sample: str | None) -> list[str]:
    lines = [
        f"trained {counted(result.updates, 'update')} of "
        f"{counted(plan.batch.global_batch_size, 'sample')} on "
        f"{counted(plan.num_devices, 'device')} in {result.seconds:.0f} s: {result.stopped}",
    ]
    if losses:
        evaluated = "" if result.eval_loss is None else f", held out {result.eval_loss:.4f}"
        lines.append(f"loss {losses[0]:.4f} → {losses[-1]:.4f}{evaluated}")
    if sample:
        lines += ["", "sample of generated text:", *sample.splitlines(), ""]
    if result.interrupted:
        lines.append(f"to resume: the same command with hydra.run.dir={result.run_dir}")
    return [
        *lines,
        f"run folder: {result.run_dir}",
        f"HTML report: meshwright report {result.run_dir}",
    ]
