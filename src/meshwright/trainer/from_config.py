"""From a config to a trainer: what each key means for `Trainer` and for its `fit`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from meshwright.config.argument_checks import check_path
from meshwright.config.builders import explain_failure, import_named
from meshwright.config.schema import Config
from meshwright.errors import Setting, UserError
from meshwright.plan import Plan, make_plan, unused_settings
from meshwright.recipe import Recipe, make_recipe, model_builder
from meshwright.text.masking import mask_tree
from meshwright.text.units import a_type
from meshwright.trainer.callbacks import Callback, EarlyStopping
from meshwright.trainer.fit_settings import FitSettings
from meshwright.trainer.starting.fewer_processes import all_devices
from meshwright.trainer.starting.resume import ResumePoint, find_resume_point
from meshwright.trainer.starting.run_warnings import raised_rate
from meshwright.weights.hf_folder import TOKENIZER
from meshwright.weights.kept import HF_FOLDER
from meshwright.weights.resolve import without_tokenizer


def read_config(config: Config, run_dir: str | Path | None) -> tuple[dict[str, Any], FitSettings]:
    """Return the arguments of `Trainer` for a config, and how its `fit` runs.

    A checkpoint that the run resumes from gives the global batch size, if the config does not.
    """
    _refuse_commands_own(config)
    folder = None if run_dir is None else check_path("run_dir", run_dir).absolute()
    point = find_resume_point(config.resume, folder)
    config = _keep_batch(config, point)
    plan = make_plan(config, all_devices(jax.device_count()))
    batch_size = plan.batch.global_batch_size
    recipe = make_recipe(_with_tokens(config, point, folder), batch_size)
    warnings = [
        *unused_settings(config, plan),
        *without_tokenizer(config),
        *(raised_rate(config, recipe, batch_size, point.metadata) if point else []),
    ]
    defaults = replace(_fit_settings(config, recipe), run_dir=folder, warnings=warnings)
    return _trainer_arguments(config, recipe, plan), defaults


def _trainer_arguments(config: Config, recipe: Recipe, plan: Plan) -> dict[str, Any]:
    same = (
        (recipe, ("loss", "eval_loss", "optimizer", "clip_norm", "ema_decay")),
        (config.model, ("weights", "init_from", "init_patterns")),
        (config.training, ("eval_ema", "on_nonfinite", "max_skipped", "max_rewinds")),
    )
    return {
        **{name: getattr(given, name) for given, names in same for name in names},
        "model": model_builder(config),
        "mesh": plan,
        "trainable": config.training.trainable or nnx.Param,
        "lora": config.lora,
        "seed": config.run.seed,
        "log_every": config.tracking.log_every,
        "run_name": config.run.name,
        "compilation_cache": config.compilation_cache,
    }


def _fit_settings(config: Config, recipe: Recipe) -> FitSettings:
    training, tokenizer = config.training, config.data.arguments().get("tokenizer")
    return FitSettings(
        duration=recipe.duration,
        eval_every=training.eval_every,
        eval_batches=training.eval_batches,
        callbacks=_callbacks(config),
        resume=config.resume,
        checkpoint=config.checkpoint,
        tracking=config.tracking,
        workers=config.data.workers,
        prefetch=config.data.prefetch,
        strict=config.strict,
        profile=training.profile_communication,
        sample_tokens=training.sample_tokens,
        sample_prompt=training.sample_prompt,
        sample_every=training.sample_every,
        project=config.run.project,
        keep_micro=training.micro_batch_size is not None,
        config=mask_tree(config.model_dump(mode="json")),
        recipe=recipe,
        tokenizer=tokenizer if isinstance(tokenizer, str) else None,
    )


_COMMANDS_OWN = {
    "mesh.auto": "write the sizes of the mesh",
    "plan": "write the settings that the file has",
    "simulate": "call mw.simulate_devices(…) before JAX starts",
}
"""Keys that the command line acts on before there is a trainer, and what to write instead."""


def _refuse_commands_own(config: Config) -> None:
    """Raise for what the command line decides, so that it is not ignored."""
    given = {"mesh.auto": config.mesh.auto, "plan": config.plan, "simulate": config.simulate}
    for key, value in given.items():
        if value:
            raise UserError(
                f"{Setting(key, value)} has no effect in Python",
                why="only the command line acts on it, before it makes a trainer",
                fix=_COMMANDS_OWN[key],
            )


def _keep_batch(config: Config, point: ResumePoint | None) -> Config:
    """Return the config with the global batch size of the checkpoint, unless it sets its own."""
    if point is None or config.training.global_batch_size is not None:
        return config
    size = point.metadata.global_batch_size
    training = config.training.model_copy(update={"global_batch_size": size})
    return config.model_copy(update={"training": training})


def _with_tokens(config: Config, point: ResumePoint | None, folder: Path | None) -> Config:
    """Return the config with the tokenizer that a resumed run has kept, if its own is gone."""
    if point is None or not point.same_run or folder is None:
        return config
    given, kept = config.data.arguments().get("tokenizer"), folder / HF_FOLDER / TOKENIZER
    if not isinstance(given, str) or Path(given).exists() or not kept.is_file():
        return config
    data = config.data.model_copy(update={"tokenizer": str(kept)})
    return config.model_copy(update={"data": data})


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
        f"{setting} is not a callback",
        why=f"it gives {a_type(callback)}",
        fix="name a class that extends mw.Callback and takes no arguments",
    )
