"""`meshwright train`: a whole run from a config, with its log, config and result on disk."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from meshwright.cli.request import Request
from meshwright.config.schema import Config
from meshwright.errors import CheckFailed, ExitCode, UserError
from meshwright.ledger import make_ledger
from meshwright.mesh.draw import render_mesh
from meshwright.plan import Plan, check_supported, unused_settings
from meshwright.recipe import Recipe, make_recipe
from meshwright.step.assemble import Assembled
from meshwright.trainer import FitResult, Metrics, Trainer

logger = logging.getLogger("meshwright.train")


def run(request: Request) -> int:
    """Train, and tell what was done."""
    config, plan = request.config, request.plan()
    check_supported(plan)
    recipe = make_recipe(config, plan.batch.global_batch_size)
    trainer = _trainer(config, plan, recipe)
    # Whatever is wrong with the model, the task or the data shows here, before a file is written.
    example = recipe.example_batch(plan.batch.global_batch_size)
    assembled = trainer.assemble(example)
    if config.strict:
        _check_strictly(assembled, example)
    folder = _open_run(request, plan)
    _log_to(folder / "train.log")
    if not request.output.as_json:
        request.output.say(render_mesh(assembled.mesh))
    logger.info("plan: %s", plan.describe())
    for remark in (*unused_settings(config, plan), *assembled.remarks):
        logger.warning("remark: %s", remark)
    logger.info("output: %s", folder)
    result = _fit(trainer, assembled, recipe, config, folder)
    if config.checkpoint.enabled:
        _save(folder / "checkpoint", result)
    _tell(request, plan, folder, result)
    return ExitCode.DONE


def _trainer(config: Config, plan: Plan, recipe: Recipe) -> Trainer:
    return Trainer(
        model=recipe.model,
        loss=recipe.loss,
        optimizer=recipe.optimizer,
        mesh=plan,
        clip_norm=config.optimizer.clip_norm,
        seed=config.run.seed,
        log_every=config.tracking.log_every,
    )


def _check_strictly(assembled: Assembled, batch: Any) -> None:
    """Compile the step and refuse one that does otherwise than the plan asked."""
    ledger = make_ledger(assembled, batch)
    deviations = [
        f"over {axis} it sends {own.sent_bytes:,} bytes where {own.minimum_bytes:,} are needed"
        for axis, own in ledger.axes.items()
        if own.suspicious
    ]
    deviations += assembled.remarks
    if deviations:
        raise CheckFailed(
            "the program deviates from its plan",
            why="; ".join(deviations),
            fix="`meshwright ledger` with the same settings shows where; strict=false trains",
        )


def _fit(
    trainer: Trainer, assembled: Assembled, recipe: Recipe, config: Config, folder: Path
) -> FitResult:
    steps, size = config.training.steps, assembled.plan.batch.global_batch_size
    batches = (recipe.data.batch(step, size) for step in range(steps))
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:

        def on_metrics(step: int, metrics: Metrics) -> None:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
            file.flush()
            shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            logger.info("step %5d  %s", step, shown)

        return trainer.fit(batches, steps=steps, on_metrics=on_metrics, assembled=assembled)


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


def _log_to(path: Path) -> None:
    # Orbax tells about every file it writes.
    logging.getLogger("absl").setLevel(logging.WARNING)
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
        "steps": result.updates,
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
    if request.output.as_json:
        request.output.result(report)
    else:
        # As plain text, because a path that is wrapped cannot be copied.
        request.output.text("\n".join(lines))
