"""`meshwright train`: a whole run from a config, with its log, config and result on disk."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from rich.console import Group
from rich.text import Text

from meshwright.cli.request import Request
from meshwright.config.schema import Config
from meshwright.errors import ExitCode, UserError
from meshwright.mesh.build import build_mesh
from meshwright.mesh.draw import render_mesh
from meshwright.plan import Plan
from meshwright.recipe import Recipe, make_recipe
from meshwright.trainer import FitResult, Metrics, Trainer

logger = logging.getLogger("meshwright.train")


def run(request: Request) -> int:
    """Train, and tell what was done."""
    config, plan = request.config, request.plan()
    recipe = make_recipe(config, plan.batch.global_batch_size)
    folder = _open_run(request, plan)
    _log_to(folder / "train.log", request)
    if not request.output.as_json:
        request.output.say(render_mesh(build_mesh(plan.mesh)))
    logger.info("plan: %s", plan.describe())
    logger.info("output: %s", folder)
    result = _fit(config, plan, recipe, folder)
    if config.checkpoint.enabled:
        _save(folder / "checkpoint", result)
    _tell(request, plan, folder, result)
    return ExitCode.DONE


def _fit(config: Config, plan: Plan, recipe: Recipe, folder: Path) -> FitResult:
    trainer = Trainer(
        model=recipe.model,
        loss=recipe.task.loss,
        optimizer=recipe.optimizer,
        mesh=plan,
        clip_norm=config.optimizer.clip_norm,
        seed=config.run.seed,
        log_every=config.tracking.log_every,
    )

    def batches() -> Iterator[Any]:
        for step in range(config.training.steps):
            yield recipe.data.batch(step, plan.batch.global_batch_size)

    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:

        def on_metrics(step: int, metrics: Metrics) -> None:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
            file.flush()
            shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            logger.info("step %5d  %s", step, shown)

        return trainer.fit(batches(), steps=config.training.steps, on_metrics=on_metrics)


def _open_run(request: Request, plan: Plan) -> Path:
    import yaml

    folder = request.composed.run_dir.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config = request.config.model_dump(mode="json")
        (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        (folder / "plan.yaml").write_text(plan.to_yaml())
    except OSError as error:
        raise UserError(
            f"cannot write the output directory {folder}",
            why=str(error),
            fix="write hydra.run.dir=… with a directory you can write to",
        ) from error
    return folder


def _log_to(path: Path, request: Request) -> None:
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for old in list(logger.handlers):
        logger.removeHandler(old)
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(file)
    screen = logging.StreamHandler()
    screen.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(screen)


def _save(path: Path, result: FitResult) -> None:
    checkpointer = ocp.StandardCheckpointer()
    params = {
        leaf.path: value
        for leaf, value in zip(
            result.assembled.traced.layout.leaves,
            result.assembled.canonical(result.state).values(),
            strict=True,
        )
        if leaf.role == "param"
    }
    checkpointer.save(path, params, force=True)
    checkpointer.wait_until_finished()
    checkpointer.close()


def _tell(request: Request, plan: Plan, folder: Path, result: FitResult) -> None:
    losses = list(result.losses.values())
    report = {
        "run_dir": str(folder),
        "mesh": plan.mesh,
        "devices": plan.num_devices,
        "steps": request.config.training.steps,
        "first_loss": losses[0],
        "final_loss": losses[-1],
        "seconds": round(result.seconds, 2),
    }
    lines = [
        f"trained {report['steps']} updates of {plan.batch.global_batch_size} samples on "
        f"{plan.num_devices} devices in {result.seconds:.0f} s",
        f"loss {losses[0]:.4f} → {losses[-1]:.4f}",
        f"everything about it: {folder}",
    ]
    request.output.result(report, Group(*(Text(line) for line in lines)))
