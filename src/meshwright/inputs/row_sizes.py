"""Whether the rows and the tokens of a config fit its model, before anything is read or traced."""

from __future__ import annotations

from meshwright import models, tasks
from meshwright.config.builders import parameters_of
from meshwright.config.schema import Config
from meshwright.errors import Setting, UserError


def check_rows(config: Config) -> None:
    """Refuse rows that are longer than a built-in model reads, and tokens that it does not know.

    What a task, data or a model of the user's own do with such numbers is not known.
    """
    if config.model.kind not in models.MODEL_KINDS:
        return
    task = config.task.arguments() if config.task.kind in tasks.TASK_KINDS else {}
    data = config.data.arguments() if ":" not in config.data.kind else {}
    asked = {
        "task.context_length": task.get("context_length"),
        "data.sequence_length": data.get("sequence_length"),
        "task.vocab_size": task.get("vocab_size"),
    }
    for key, value in asked.items():
        size = "vocab_size" if key.endswith("vocab_size") else "context_length"
        limit = _model_size(config, size)
        if isinstance(value, int) and isinstance(limit, int) and value > limit:
            raise _too_large(config, key, value, f"model.{size}", limit)


def _model_size(config: Config, name: str) -> object:
    parameter = parameters_of(models.find_builder(config.model.kind)).get(name)
    default = None if parameter is None else parameter.default
    return config.model.arguments().get(name, default)


def _too_large(config: Config, key: str, value: int, limit_key: str, limit: int) -> UserError:
    knows = "tokens" if limit_key == "model.vocab_size" else "positions"
    fix = f"write {Setting(key, limit)} or less"
    why = f"it has {limit:,} {knows} ({Setting(limit_key, limit)})"
    folder = config.model.weights
    if folder is None:
        fix += f", or {Setting(limit_key, value)} for a larger model"
    else:
        why += f" and starts from the weights in {folder}"
    return UserError(f"{Setting(key, value)} is more than the model has", why=why, fix=fix)
