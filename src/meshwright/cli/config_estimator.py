"""The estimator for the model, loss and optimizer of a config."""

from __future__ import annotations

from meshwright.config.schema import Config
from meshwright.plan import precision
from meshwright.planner.estimate.estimator import Estimator, ProgramEstimator
from meshwright.recipe import make_recipe
from meshwright.runtime.activity import activity


def config_estimator(config: Config, global_batch_size: int) -> Estimator:
    """Return the estimator for a config; the model is traced, and nothing is allocated."""
    recipe = make_recipe(config, global_batch_size)
    with activity("tracing the model"):
        return ProgramEstimator(
            recipe.model,
            recipe.loss,
            recipe.optimizer,
            recipe.example_batch(1),
            precision=precision(config),
        )
