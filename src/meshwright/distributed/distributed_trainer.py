"""A trainer configured by three configs: model, training and devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.config.compose import compose_config
from meshwright.config.distributed_config import DistributedConfig
from meshwright.config.schema import Config, ModelConfig, TrainingConfig
from meshwright.data.user_data import UserData
from meshwright.errors import UserError
from meshwright.plan import make_plan
from meshwright.recipe import make_recipe
from meshwright.trainer import FitResult
from meshwright.trainer import Trainer as MeshTrainer

Values = Mapping[str, Any]
"""The keys of a config section with their values, which the schema checks."""


class Trainer:
    """Trains a model from configs; `meshwright.Trainer` takes a model and a loss instead.

    Args:
        model_config: the name of a model config (``"gpt2_tiny"``), a `ModelConfig`, or a mapping of
            its keys, including ``kind``.
        training_config: duration and batch sizes; see `TrainingConfig`.
        distributed_config: the mesh and the precision; all devices on ``data`` by default.
        run_dir: the run folder for metrics and checkpoints; None writes nothing.
        sections: further sections of the config, such as ``optimizer={"kind": "lion"}``.
    """

    def __init__(
        self,
        *,
        model_config: Values | str | ModelConfig,
        training_config: Values | TrainingConfig,
        distributed_config: DistributedConfig | None = None,
        run_dir: str | Path | None = None,
        **sections: Values,
    ) -> None:
        name = model_config if isinstance(model_config, str) else ""
        values = compose_config([f"model={name}"] if name else []).values
        if not name:
            values["model"] = _to_dict(model_config)
        values["training"] = {**values["training"], **_to_dict(training_config)}
        for section, keys in sections.items():
            # Arguments of the default kind do not apply to another kind.
            before = {} if "kind" in keys else values.get(section, {})
            values[section] = {**before, **keys}
        if distributed_config is not None:
            values["mesh"] = dict(distributed_config.mesh_sizes())
            values["precision"] = {"compute": distributed_config.mixed_precision}
        self.config = Config.parse(values)
        self._run_dir = run_dir

    def train(self, train: UserData, val: UserData | None = None) -> FitResult:
        """Train on one dataset and evaluate on another.

        Args:
            train: data in any form that `meshwright.Trainer.fit` takes: a dict of arrays, a list of
                global batches, a source, or a function of (step, batch_size).
            val: held-out data in any of these forms.
        """
        import jax

        plan = make_plan(self.config, jax.device_count())
        recipe = make_recipe(self.config, plan.batch.global_batch_size)
        training = self.config.training
        trainer = MeshTrainer(
            model=recipe.model,
            loss=recipe.loss,
            eval_loss=recipe.eval_loss,
            optimizer=recipe.optimizer,
            mesh=plan,
            clip_norm=self.config.optimizer.clip_norm,
            seed=self.config.run.seed,
            run_name=self.config.run.name,
            log_every=self.config.tracking.log_every,
            on_nonfinite=training.on_nonfinite,
            max_skipped=training.max_skipped,
            max_rewinds=training.max_rewinds,
        )
        return trainer.fit(
            train,
            steps=training.steps if training.max_duration is None else None,
            max_duration=training.max_duration,
            eval_data=val,
            eval_every=training.eval_every,
            eval_batches=training.eval_batches,
            run_dir=self._run_dir,
            checkpoint=self.config.checkpoint,
            tracking=self.config.tracking,
        )


def _to_dict(section: object) -> dict[str, Any]:
    if isinstance(section, ModelConfig | TrainingConfig):
        return section.model_dump(mode="json", exclude_unset=True)
    if not isinstance(section, Mapping):
        raise UserError(
            f"a config is of type {type(section).__name__}",
            fix="write the name of a model config, or a dict of keys and values",
        )
    return {str(key): value for key, value in section.items()}
