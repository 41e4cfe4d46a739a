"""Checks of the arguments of the trainer, and of the sizes in a config."""

import inspect
from collections.abc import Mapping
from typing import Any, get_args

from flax import nnx
from jax.sharding import Mesh

from meshwright import models, tasks
from meshwright.config.argument_checks import check_takes, wrong_kind
from meshwright.config.base import shorten, suggest_value
from meshwright.config.builders import parameters_of
from meshwright.config.schema import Config, KernelChoice, Precision
from meshwright.errors import Setting, UserError
from meshwright.mesh.axes import canonical_sizes, parse_mesh
from meshwright.program.trace.trained_leaves import Adapted


def mesh_sizes(mesh: object) -> Mapping[str, int]:
    """Return the axis sizes of a mesh argument; empty for ``"auto"``."""
    if isinstance(mesh, str):
        if mesh and "=" not in mesh and mesh != "auto":
            raise UserError(
                f'mesh="{mesh:.60}" is neither axis sizes nor "auto"',
                fix='write mesh="fsdp=4,tensor=2", or mesh="auto" to let the planner choose',
            )
        return parse_mesh("" if mesh == "auto" else mesh)
    if isinstance(mesh, Mesh):
        axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
        raise UserError(
            "the mesh is a jax.sharding.Mesh",
            why="the trainer builds its own mesh, whose axis names have fixed meanings",
            fix=f'write mesh="{axes}" and devices=list(mesh.devices.flat)',
        )
    if not isinstance(mesh, Mapping):
        raise UserError(
            f"the mesh is {shorten(mesh)}, of type {type(mesh).__name__}",
            fix='write mesh="fsdp=4,tensor=2", a dict of axis sizes, or a Plan',
        )
    return canonical_sizes(mesh)


def check_loss(loss: object, name: str = "loss") -> None:
    """Refuse a loss that cannot be called with a model and a batch."""
    if not callable(loss):
        raise UserError(
            f"the {name} is {shorten(loss)}, of type {type(loss).__name__}",
            fix=f"write a function {name}(model, batch) that returns a scalar",
        )
    check_takes(name, loss, ("model", "batch"))


def check_trainable(trainable: Any) -> None:
    """Refuse anything that is not an NNX filter, path patterns or adapters."""
    if isinstance(trainable, Adapted):
        trainable = trainable.also
    try:
        nnx.filterlib.to_predicate(trainable)
    except (TypeError, ValueError):
        fix = "write an NNX filter: nnx.Param, or a function of (path, value)"
        raise wrong_kind("trainable", trainable, fix) from None
    if inspect.isfunction(trainable):
        check_takes("trainable", trainable, ("path", "value"))


def check_run_name(name: object) -> None:
    """Refuse a run name that is not one line of text."""
    if name is None or (isinstance(name, str) and name.strip() and name.isprintable()):
        return
    raise UserError(
        f"run_name={shorten(name)} is not a name",
        why="reports and trackers show it on one line",
        fix='write a short text, such as run_name="baseline, lr 3e-4"',
    )


def check_kernels(choice: object) -> None:
    """Refuse an unknown choice of kernels."""
    known = get_args(KernelChoice)
    if not isinstance(choice, str) or choice not in known:
        hint = suggest_value("kernels", choice, known)
        raise UserError(
            f"there are no kernels {shorten(repr(choice))}",
            why='"auto" uses those of the platform, "xla" their forms for any device, "none" the '
            "model as written",
            fix=f"write kernels={' or '.join(repr(name) for name in known)}"
            + (f": {hint}" if hint else ""),
        )


def check_precision(precision: object) -> None:
    """Refuse an unknown precision."""
    known = get_args(Precision)
    if not isinstance(precision, str) or precision not in known:
        raise UserError(
            f"there is no precision {shorten(repr(precision))}",
            why='"no" is float32 throughout; "bf16" and "fp16" compute in 16 bits',
            fix=f"write precision={' or '.join(repr(name) for name in known)}",
        )


def check_rows(config: Config) -> None:
    """Refuse rows that are longer than a built-in model reads, and tokens that it does not know.

    What the user's own task, data or model does with such numbers is not known.
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
    parameters = parameters_of(models.find_builder(config.model.kind))
    for key, value in asked.items():
        size = "vocab_size" if key.endswith("vocab_size") else "context_length"
        default = parameters[size].default if size in parameters else None
        limit = config.model.arguments().get(size, default)
        if isinstance(value, int) and isinstance(limit, int) and value > limit:
            raise _too_large(config, key, value, f"model.{size}", limit)


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
