"""Arguments that `Trainer` does not take: where each belongs."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from functools import wraps
from typing import Any, TypeVar

from meshwright.config.base import SYNONYMS
from meshwright.config.schema import (
    CheckpointConfig,
    PipelineConfig,
    ShardingConfig,
    TrackingConfig,
)
from meshwright.errors import ANY, UserError, did_you_mean

Kind = TypeVar("Kind")

_BATCH = (
    "the samples of an update are `trainer.fit(…, batch_size=…)`; each device gets an equal part, "
    "in as many microbatches as gradient_accumulation_steps says"
)
_ELSEWHERE = {
    "global_batch_size": _BATCH,
    "micro_batch_size": _BATCH,
    "learning_rate": "it is the optimizer's: optimizer=optax.adamw(…)",
}
"""Settings of a config that are called otherwise in Python."""


class UnknownArgument(UserError, TypeError):
    """An argument that a call does not take."""


def places_unknown(trainer: type[Kind]) -> type[Kind]:
    """Let a class of trainers refuse arguments that it does not have, and say where they belong."""
    kind: Any = trainer
    init = kind.__init__
    own = [name for name in inspect.signature(init).parameters if name != "self"]
    of_fit = [name for name in inspect.signature(kind.fit).parameters if name != "self"]

    @wraps(init)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in own:
                raise UnknownArgument(
                    f"{trainer.__name__} has no argument {name}", fix=_place(name, own, of_fit)
                )
        init(self, *args, **given)

    kind.__init__ = checked
    return trainer


def _place(name: str, own: Collection[str], of_fit: Collection[str]) -> str:
    """Say where an argument belongs."""
    meant = SYNONYMS.get(name, name)
    if name in of_fit:
        return f"write it when you train: `trainer.fit(…, {name}={ANY})`"
    if meant in _ELSEWHERE:
        return _ELSEWHERE[meant]
    if meant in own:
        return f"did you mean `{meant}`?"
    if meant in of_fit:
        return f"write it when you train: `trainer.fit(…, {meant}={ANY})`"
    if name in ShardingConfig.model_fields:
        return f"write sharding=mw.ShardingConfig({name}={ANY})"
    if name in PipelineConfig.model_fields:
        return f'write pipeline={{"{name}": {ANY}}}'
    for section, config in (("checkpoint", CheckpointConfig), ("tracking", TrackingConfig)):
        if name in config.model_fields:
            return f"write `trainer.fit(…, {section}=mw.{config.__name__}({name}={ANY}))`"
    return did_you_mean(name, own) or f"its arguments: {', '.join(own)}"
