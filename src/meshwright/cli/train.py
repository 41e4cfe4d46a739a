"""`meshwright train`: trains from a config, and writes the run folder."""

from __future__ import annotations

import json
import shlex
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import yaml
from rich.text import Text

from meshwright.cli.invocation import invoked_as
from meshwright.cli.request import Request, check_planned_model
from meshwright.cli.sample import generate_sample
from meshwright.config.builders import explain_failure, import_named
from meshwright.config.compose import parse_overrides
from meshwright.config.origins import chosen_keys, trace_origins
from meshwright.config.schema import Config
from meshwright.errors import ExitCode, UserError
from meshwright.inputs.plan_file import other_model
from meshwright.mesh.terminal_drawing import render_mesh
from meshwright.plan import Plan, make_plan, unused_settings
from meshwright.planner.estimate.estimator import Estimator
from meshwright.processes import broadcast, process_count
from meshwright.recipe import Recipe, make_recipe
from meshwright.runtime.attempts import EarlierAttempts, ProcessRange
from meshwright.runtime.interrupt import current_interrupt
from meshwright.step.assemble import Assembled
from meshwright.step.state import TrainState
from meshwright.text.masking import mask_tree
from meshwright.text.units import a_type
from meshwright.trainer.callbacks import Callback, EarlyStopping
from meshwright.trainer.incidents.not_finite import NonfinitePolicy
from meshwright.trainer.resuming.fewer_processes import plan_for_those_left
from meshwright.trainer.resuming.resume import ResumePoint, find_resume_point
from meshwright.trainer.run_spec import EvaluationSpec, LoadingSpec, OutputSpec, RunSpec
from meshwright.trainer.starting.folder import claimed_folder
from meshwright.trainer.starting.initial import find_initial, remembered_files
from meshwright.trainer.starting.schedule_warnings import schedule_warnings
from meshwright.trainer.trained.fit_result import FitResult
from meshwright.trainer.training_run import TrainingRun
from meshwright.weights.hf_folder import TOKENIZER, open_folder
from meshwright.weights.kept import HF_FOLDER, end_tokens, keep_files
from meshwright.weights.resolve import without_tokenizer


def run(request: Request) -> int:
    """Train, and print a summary."""
    if request.arguments.has("--distributed"):
        _check_distributed()
    with _run_folder(request) as folder:
        return _train(request, folder)


@contextmanager
def _run_folder(request: Request) -> Generator[Path]:
    """Yield the run folder; one that is named by the time alone is new."""
    # A run that its launcher starts again goes on in its folder, whose name may contain the time.
    earlier, composed = EarlierAttempts.from_environment().folder, request.composed
    folder = Path(broadcast(str((earlier or composed.run_dir).absolute())))
    if earlier is not None or "${now:" not in str(composed.hydra["run"]["dir"]):
        yield folder
        return
    with claimed_folder(folder) as claimed:
        yield claimed


def _train(request: Request, folder: Path) -> int:
    point = find_resume_point(request.config.resume, folder)
    config = _keep_batch(request.config, point)
    plan = plan_for_those_left(
        partial(make_plan, config),
        jax.device_count(),
        keep_micro=config.training.micro_batch_size is not None,
    )
    recipe = make_recipe(_with_tokenizer(config, point, folder), plan.batch.global_batch_size)
    # Mistakes in the model, the task or the data show here, before a file is written.
    example = recipe.example_batch(plan.batch.global_batch_size)
    assembled = recipe.assemble(plan, example)
    if point is None:
        check_planned_model(request, assembled.model_leaves.num_parameters)
    initial = find_initial(
        assembled,
        config.run.seed,
        lambda: assembled.init(config.run.seed),
        weights=config.model.weights,
        init_from=config.model.init_from,
        init_patterns=config.model.init_patterns,
        resumed=point is not None,
    )
    callbacks = _callbacks(config)
    hf_files = remembered_files(point, folder, lambda: _hf_files(config))
    training_run = TrainingRun(
        RunSpec(
            assembled=assembled,
            loss=recipe.loss,
            batch=example,
            data=recipe.data,
            duration=recipe.duration,
            seed=config.run.seed,
            initial_state=initial.state,
            weights=initial.source,
            resume_point=point,
            evaluation=EvaluationSpec(
                data=recipe.eval_data,
                loss=recipe.eval_loss,
                every=config.training.eval_every,
                batches=config.training.eval_batches,
            ),
            loading=LoadingSpec(workers=config.data.workers, prefetch=config.data.prefetch),
            output=_output(config, folder, _files(request, config, plan), hf_files),
            callbacks=callbacks,
            config=mask_tree(config.model_dump(mode="json")),
            learning_rate=recipe.learning_rate,
            code=[recipe.task, *callbacks],
            nonfinite=NonfinitePolicy(
                config.training.on_nonfinite,
                config.training.max_skipped,
                config.training.max_rewinds,
            ),
            strict=config.strict,
            extra_results=partial(_sample, config, recipe, assembled, end_tokens(hf_files)),
            warnings=[
                *_warnings(request, config, plan, recipe, point),
                *other_model(config.plan, assembled.model_leaves.num_parameters),
                *initial.remarks,
                *without_tokenizer(config),
            ],
            interrupt=current_interrupt(),
            estimator=partial(
                Estimator,
                recipe.model,
                recipe.loss,
                recipe.optimizer,
                example,
                precision=plan.precision,
            ),
        )
    )
    _show_mesh(request, assembled)
    result = training_run.run()
    _print_result(request, plan, result)
    return ExitCode.PREEMPTED if result.interrupted else ExitCode.DONE


def _check_distributed() -> None:
    if process_count() == 1 and ProcessRange.from_environment() is None:
        raise UserError(
            "--distributed: this process would train alone",
            why="the environment names no other processes",
            fix="export MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK in each of them, or write "
            "meshwright launch --nprocs N -- train …",
        )


def _warnings(
    request: Request, config: Config, plan: Plan, recipe: Recipe, point: ResumePoint | None
) -> list[str]:
    given = [o.key_or_group for o in parse_overrides(request.composed.overrides)]
    return [
        *unused_settings(config, plan),
        *schedule_warnings(
            config,
            recipe.data,
            plan.batch.global_batch_size,
            overrides=given,
            chosen=chosen_keys(request.config, request.composed),
            resumed=None if point is None else point.metadata,
        ),
    ]


def _output(
    config: Config, folder: Path, files: Mapping[str, str], hf_files: Mapping[str, str]
) -> OutputSpec:
    return OutputSpec(
        run_dir=folder,
        files=files,
        hf_files=hf_files,
        project=config.run.project,
        name=config.run.name,
        log_every=config.tracking.log_every,
        tracking=config.tracking,
        checkpoint=config.checkpoint,
        profile=config.training.profile_communication,
    )


def _sample(
    config: Config, recipe: Recipe, assembled: Assembled, ends: Sequence[int], state: TrainState
) -> dict[str, Any]:
    tokens = config.training.sample_tokens
    return {"sample": generate_sample(recipe, assembled, state, num_tokens=tokens, ends=ends)}


def _hf_files(config: Config) -> dict[str, str]:
    """Return what the run remembers for an export; nothing of a folder that is gone."""
    path, tokenizer = config.model.weights, config.data.arguments().get("tokenizer")
    folder = None if path is None or not Path(path).is_dir() else open_folder(path)
    return keep_files(folder, tokenizer=tokenizer if isinstance(tokenizer, str) else None)


def _show_mesh(request: Request, assembled: Assembled) -> None:
    if request.output.as_json:
        return
    request.output.say(render_mesh(assembled.mesh))
    if assembled.pipeline_report is not None:
        request.output.say(Text(assembled.pipeline_report.summary()))


def _keep_batch(config: Config, point: ResumePoint | None) -> Config:
    """Return the config with the global batch size of the checkpoint, unless it sets its own."""
    if point is None or config.training.global_batch_size is not None:
        return config
    size = point.metadata.global_batch_size
    training = config.training.model_copy(update={"global_batch_size": size})
    return config.model_copy(update={"training": training})


def _with_tokenizer(config: Config, point: ResumePoint | None, folder: Path) -> Config:
    """Return the config with the tokenizer a resumed run remembers, if the file itself is gone."""
    named = config.data.arguments().get("tokenizer")
    kept = folder / HF_FOLDER / TOKENIZER
    resumed = point is not None and point.same_run
    if not resumed or not isinstance(named, str) or Path(named).exists() or not kept.is_file():
        return config
    data = config.data.model_copy(update={"tokenizer": str(kept)})
    return config.model_copy(update={"data": data})


def _files(request: Request, config: Config, plan: Plan) -> dict[str, str]:
    """Return the files that are written to the run folder at the start, by name."""
    origins = trace_origins(request.config, request.composed)
    entries = [
        {"key": o.key, "value": o.value, "origin": o.source, "from": o.detail} for o in origins
    ]
    values = mask_tree(config.model_dump(mode="json"))
    return {
        "config.yaml": yaml.safe_dump(values, sort_keys=False, allow_unicode=True),
        "config.json": json.dumps(entries, ensure_ascii=False),
        "plan.yaml": plan.to_yaml(),
    }


def _callbacks(config: Config) -> list[Callback]:
    own = [_make_callback(name) for name in config.training.callbacks]
    patience = config.training.early_stopping_patience
    if patience is None:
        return own
    return [*own, EarlyStopping(patience, min_delta=config.training.early_stopping_min_delta)]


def _make_callback(name: str) -> Callback:
    """Make a callback of the user, which a config names."""
    setting = f"training.callbacks=[{name}]"
    made = import_named(setting, name)
    try:
        callback = made()
    except Exception as error:
        raise explain_failure(f"{setting} cannot be built", error) from error
    if isinstance(callback, Callback):
        return callback
    raise UserError(
        f"{setting} is no callback",
        why=f"it gives {a_type(callback)}",
        fix="name a class that extends mw.Callback and takes no arguments",
    )


def _print_result(request: Request, plan: Plan, result: FitResult) -> None:
    losses, sample = list(result.losses.values()), result.extra.get("sample")
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
    # Plain text, because a wrapped path cannot be copied.
    request.output.text("\n".join(_lines(result, sample)))


def _lines(result: FitResult, sample: str | None) -> list[str]:
    lines = str(result).splitlines()
    if sample:
        lines += ["", "sample of generated text:", *sample.splitlines(), ""]
    if result.interrupted:
        lines.append(
            f"to resume: the same command with {shlex.quote(f'hydra.run.dir={result.run_dir}')}"
        )
    return [
        *lines,
        f"run folder: {result.run_dir}",
        f"HTML report: {shlex.join([*invoked_as(), 'report', str(result.run_dir)])}",
    ]
