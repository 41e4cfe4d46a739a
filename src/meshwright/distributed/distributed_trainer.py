"""A trainer configured by three configs: model, training and devices."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.config.compose import compose_config
from meshwright.config.distributed_config import DistributedConfig
from meshwright.config.groups import CONF_DIR
from meshwright.config.schema import Config, ModelConfig, TrainingConfig
from meshwright.data.user_data import UserData
from meshwright.errors import UserError
from meshwright.recipe import training_duration
from meshwright.text.yaml_text import read_yaml
from meshwright.trainer import FitResult
from meshwright.trainer import Trainer as MeshTrainer

Values = Mapping[str, Any]
"""The keys of a config section with their values, which the schema checks."""


class Trainer:
    """Trains a model from configs; `meshwright.Trainer` takes a model and a loss instead.

    Args:
        model_config: the name of a model config (``"gpt2_tiny"``), a `ModelConfig`, or a mapping of
            its keys, including ``kind``, which implies the task of that kind's model configs.
        training_config: duration and batch sizes; see `TrainingConfig`.
        distributed_config: the mesh and the precision; all devices on ``data`` by default.
        run_dir: the run folder for metrics and checkpoints; None writes nothing.
        sections: further sections and keys of the config, such as ``optimizer={"kind": "lion"}`` or
            ``strict=True``.
    """

    def __init__(
        self,
        *,
        model_config: Values | str | ModelConfig,
        training_config: Values | TrainingConfig,
        distributed_config: DistributedConfig | None = None,
        run_dir: str | Path | None = None,
        **sections: Any,
    ) -> None:
        _check_sections(sections, distributed_config)
        given = None if isinstance(model_config, str) else _to_dict(model_config)
        name = str(model_config) if given is None else _like(given.get("kind"))
        values = compose_config([f"model={name}"] if name else []).values
        if given is not None:
            values["model"] = given
        values["training"] = {**values["training"], **_to_dict(training_config)}
        for section, keys in sections.items():
            if not isinstance(keys, Mapping):
                values[section] = keys
                continue
            # Arguments of the default kind do not apply to another kind.
            before = {} if "kind" in keys else values.get(section, {})
            values[section] = {**before, **keys}
        if distributed_config is not None:
            values["mesh"] = dict(distributed_config.mesh_sizes())
            compute = distributed_config.mixed_precision
            values["precision"] = {**values.get("precision", {}), "compute": compute}
        self.config = Config.parse(values)
        self._run_dir = run_dir

    def train(self, train: UserData, val: UserData | None = None) -> FitResult:
        """Train on one dataset and evaluate on another.

        Args:
            train: data in any form that `meshwright.Trainer.fit` takes: a dict of arrays, a list of
                global batches, a source, or a function of (step, batch_size).
            val: held-out data in any of these forms.
        """
        duration, schedule = self.config.training.max_duration, self.config.optimizer.schedule
        if training_duration(self.config).epochs is not None and schedule != "constant":
            # Only the config's data would say how long an epoch is.
            raise UserError(
                f"optimizer.schedule={schedule} needs the number of steps",
                why=f"training.max_duration={duration} counts epochs of data that is given later",
                fix='write training_config={"steps": …}, or optimizer={"schedule": "constant", …}',
            )
        return MeshTrainer.from_config(self.config, run_dir=self._run_dir).fit(train, eval_data=val)


def _check_sections(sections: Mapping[str, Any], distributed: DistributedConfig | None) -> None:
    """Refuse settings that other arguments replace."""
    keys = {name: dict(given) for name, given in sections.items() if isinstance(given, Mapping)}
    unused = set(keys.get("data", {})) - {"workers", "prefetch"}
    if unused:
        raise UserError(
            f"data.{min(unused)} has no effect",
            why="the data is given to train(train, val)",
            fix="write only data.workers and data.prefetch, or train with the command line",
        )
    if distributed is None:
        return
    compute = keys.get("precision", {}).get("compute")
    for key, value in {"mesh": keys.get("mesh"), "precision.compute": compute}.items():
        if value is not None:
            raise UserError(
                f"{key} is given twice",
                why="distributed_config has it too",
                fix=f"leave out {key}, or distributed_config",
            )


def _like(kind: Any) -> str:
    """Return a model config of this kind, whose task a mapping implies; empty if there is none."""
    for file in sorted((CONF_DIR / "model").glob("*.yaml")):
        if read_yaml(file.read_text()).get("kind") == kind:
            return file.stem
    return ""


def _to_dict(section: object) -> dict[str, Any]:
    if isinstance(section, ModelConfig | TrainingConfig):
        return section.model_dump(mode="json", exclude_unset=True)
    if not isinstance(section, Mapping):
        raise UserError(
            f"a config is of type {type(section).__name__}",
            fix="write the name of a model config, or a dict of keys and values",
        )
    return {str(key): value for key, value in section.items()}
