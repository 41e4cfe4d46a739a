"""Settings that are left to the planner: `mesh=auto` and `training.micro_batch_size=auto`."""

from dataclasses import replace

import jax

from meshwright import processes
from meshwright.config.compose import Composed, validate
from meshwright.config.origins import set_by_user
from meshwright.config.schema import Config, Precision
from meshwright.inputs.plan_file import plan_settings, with_settings
from meshwright.plan import Plan, precision
from meshwright.planner.devices.local_hardware import hardware_of
from meshwright.planner.estimate.estimator import Estimator
from meshwright.planner.guidance.plan_report import AUTO, choose_plan
from meshwright.planner.search.candidates import config_task
from meshwright.recipe import Recipe, make_recipe
from meshwright.trainer.starting.planning import estimator_of

_FIXED = ("mesh.data", "mesh.fsdp", "mesh.tensor", "mesh.pipe", "sharding.remat", "sharding.blocks",
          "training.sync_gradients_every", "pipeline.schedule", "pipeline.num_chunks")  # fmt: skip
"""What `training.micro_batch_size=auto` by itself leaves as it is."""


def choose_settings(config: Config, composed: Composed) -> tuple[Config, Composed, str]:
    """Return the config with what the planner chooses for the devices present, and the reason."""
    decided = set_by_user(config, composed) | set(() if config.mesh.auto else _FIXED)
    task, _ = config_task(config, decided, hardware_of(jax.devices()))
    key = "mesh" if config.mesh.auto else "training.micro_batch_size"
    estimator = config_estimator(config, task.global_batch_size)
    plan, line = choose_plan(estimator, task, f"{key}={AUTO}")
    # Every process finds a plan; that of the first one counts.
    text, line = processes.broadcast([plan.to_yaml(), line])
    settings = plan_settings(Plan.from_yaml(text))
    values = with_settings(composed.values, settings)
    origins = {**composed.read_from, **dict.fromkeys(settings, "chosen by the planner")}
    composed = replace(composed, values=values, read_from=origins)
    return validate(composed), composed, line


def config_estimator(config: Config, global_batch_size: int) -> Estimator:
    """Return the estimator for a config; the model is traced, and nothing is allocated."""
    return recipe_estimator(make_recipe(config, global_batch_size), precision(config))


def recipe_estimator(recipe: Recipe, compute: Precision) -> Estimator:
    """Return the estimator for what a recipe trains, in a compute format."""
    return estimator_of(recipe, recipe.model, recipe.example_batch(1), compute)
