"""Tasks from the user: a loss function, or a class with a ``loss`` method."""

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from meshwright.config.builders import Builder, build, check_arguments, parameters_of
from meshwright.errors import UserError
from meshwright.program.trace.traced_loss import Loss


class HasLoss(Protocol):
    """Any object with a loss."""

    @property
    def loss(self) -> Loss:
        """The loss of a model on a batch, and optionally metrics."""
        ...


@dataclass(frozen=True)
class LossTask:
    """A task that consists of a loss function."""

    loss: Loss


def read_task(kind: str, builder: Builder, arguments: dict[str, Any]) -> HasLoss:
    """Return the task that ``kind`` names: an instance of a class, or a `LossTask`.

    Further parameters of the class, or of the function beyond model and batch, are the task's
    settings.
    """
    if not inspect.isclass(builder):
        return LossTask(_loss_function(kind, builder, arguments))
    task = build("task", kind, builder, check_arguments("task", builder, arguments))
    if not callable(getattr(task, "loss", None)):
        raise UserError(
            f"task.kind={kind} has no loss",
            why=f"{builder.__name__} has no method named loss",
            fix=f"give {builder.__name__} a method loss(self, model, batch), or write "
            "task.kind=package.module:function with a function loss(model, batch)",
        )
    return task


def _loss_function(kind: str, function: Builder, arguments: dict[str, Any]) -> Loss:
    parameters = parameters_of(function)
    positional = [
        n for n, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(positional) < 2:
        raise UserError(
            f"task.kind={kind} is not a loss",
            why=f"it takes ({', '.join(parameters)}), but is called with a model and a batch",
            fix="write a function loss(model, batch), or a class with such a method",
        )
    settings = check_arguments("task", function, arguments, supplied=tuple(positional[:2]))
    return partial(function, **settings)
