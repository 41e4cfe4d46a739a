"""Export of checkpoints: parameters as NumPy arrays or as a safetensors file."""

import inspect
import math
import warnings
from collections.abc import ItemsView, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import jax
import numpy as np
from numpy.typing import NDArray

from meshwright.checkpoint.reader import CheckpointReader, find_store
from meshwright.config.argument_checks import check_count, check_path
from meshwright.errors import ANY, Setting, UserError
from meshwright.program.jaxpr.names import nest
from meshwright.step.average import EMA
from meshwright.tracking.run_files import read_metrics

_READS_NESTED = "flax.nnx"


class ArraysByPath(dict[str, Any]):
    """Arrays by path, such as ``blocks.0.mlp.up.kernel``; otherwise a dict like any other.

    NNX has a level of its dicts for every part of a path. To a flat dict, ``nnx.update`` would not
    object: it would give the model a new attribute ``"blocks.0.mlp.up.kernel"`` and leave its
    parameters as they are. NNX therefore gets the items of the nested dicts.
    """

    def items(self) -> ItemsView[Any, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the items: by path, and nested if NNX asks."""
        frame = inspect.currentframe()
        before = None if frame is None else frame.f_back
        caller = "" if before is None else str(before.f_globals.get("__name__"))
        asked_by_nnx = caller == _READS_NESTED or caller.startswith(f"{_READS_NESTED}.")
        return nest(self).items() if asked_by_nnx else super().items()


# JAX takes a subclass of dict for a leaf unless told otherwise.
jax.tree_util.register_pytree_with_keys(
    ArraysByPath,
    lambda own: (
        [(jax.tree_util.DictKey(path), own[path]) for path in sorted(own)],
        tuple(sorted(own)),
    ),
    lambda paths, arrays: ArraysByPath(zip(paths, arrays, strict=True)),
)


Which = Literal["best", "last"]

Arrays = dict[str, NDArray[Any]]
"""NumPy arrays by canonical path."""


class Trained(Protocol):
    """A trained model in memory, such as the result of a `fit`."""

    def host_arrays(self) -> Arrays:
        """Return parameters and statistics by canonical path."""
        ...


def read_params(
    path: str | Path,
    *,
    step: int | None = None,
    which: Which = "last",
    ema: bool = False,
    statistics: bool = False,
    nested: bool = False,
) -> dict[Any, Any]:
    """Read the parameters of a checkpoint by canonical path, and compare their checksums.

    `meshwright.load_model` returns a model that holds them.

    Args:
        path: a run folder, its checkpoint folder, or a single checkpoint.
        step: which checkpoint; the newest by default.
        which: instead of a number: last, or best, the one with the lowest evaluation loss.
        ema: read the moving average of the parameters instead.
        statistics: also read the model's other floating-point arrays, such as the running
            means of BatchNorm and frozen weights.
        nested: return plain nested dicts instead of one dict by path; ``nnx.update(model, …)``
            takes both.
    """
    wanted = ("params", "state") if statistics else ("params",)
    groups = read_groups(path, wanted, step=step, which=which, ema=ema)
    arrays = ArraysByPath(
        (name, array)
        for group, by_path in groups.items()
        for name, array in by_path.items()
        # Integer arrays are keys and counters of random streams.
        if group == "params" or np.issubdtype(array.dtype, np.floating)
    )
    return nest(arrays) if nested else arrays


def read_groups(
    path: str | Path,
    groups: Sequence[str],
    *,
    step: int | None = None,
    which: Which = "last",
    ema: bool = False,
) -> dict[str, Arrays]:
    """Read arrays of a checkpoint by group (params, state, optimizer) and canonical path."""
    reader, wanted = choose_checkpoint(check_path("path", path), step, which)
    shapes = reader.shapes(wanted)
    paths = {group: list(shapes[group]) for group in groups if shapes.get(group)}
    if not ema or "params" not in paths:
        return reader.read(wanted, paths)
    params = paths.pop("params")
    others = reader.read(wanted, paths) if paths else {}
    return {"params": read_averages(reader, wanted, params), **others}


def read_averages(reader: CheckpointReader, step: int, params: Sequence[str]) -> Arrays:
    """Read the moving averages of parameters, by the paths of the parameters."""
    names = {f"{EMA}.{path}": path for path in params}
    if not set(names) <= set(reader.shapes(step).get("optimizer", {})):
        raise UserError(
            f"the run in {reader.folder.parent} keeps no moving average of its weights",
            fix=f"leave out ema, or train with {Setting('training.ema_decay', 0.999)}",
        )
    found = reader.read(step, {"optimizer": list(names)})["optimizer"]
    return {names[name]: array for name, array in found.items()}


def choose_checkpoint(
    path: Path, step: int | None, which: Which = "last"
) -> tuple[CheckpointReader, int]:
    """Return a reader of the checkpoints of a run, and the step of the one that is wanted.

    The path is that of a run, its checkpoint folder or one checkpoint; ``which`` is last or best,
    the one with the lowest evaluation loss.
    """
    folder, named = find_store(path)
    if step is not None:
        check_count("step", step, least=0)
    reader = CheckpointReader(folder)
    if which not in get_args(Which):
        raise UserError(f"which={which!r} is not known", fix='write which="best" or "last"')
    if which == "best":
        step = _best(reader, step if step is not None else named)
    wanted = step if step is not None else named if named is not None else reader.latest()
    if wanted is None or wanted not in reader.steps():
        raise UserError(
            f"there is no checkpoint of step {wanted} in {folder}",
            why=f"checkpoints: {', '.join(map(str, reader.steps())) or 'none'}",
        )
    return reader, wanted


def _best(reader: CheckpointReader, step: int | None) -> int:
    if step is not None:
        raise UserError(
            f'which="best" and the checkpoint of step {step} are both asked for',
            fix="write one of the two",
        )
    best = reader.best()
    if best is None:
        raise UserError(
            f"no checkpoint in {reader.folder} has an evaluation loss",
            why="the best checkpoint is the one with the lowest, evaluated when it was saved",
            fix=f"evaluate as often as you save: {Setting('training.eval_every', 100)}, "
            f"{Setting('checkpoint.every', 100)}",
        )
    _warn_of_better(reader, best)
    return best


def _warn_of_better(reader: CheckpointReader, best: int) -> None:
    """Say so if an evaluation was better than that of the best checkpoint, but was not saved."""
    rows = read_metrics(reader.folder.parent / "metrics.jsonl")
    losses = {
        step: row["loss"]
        for (split, step), row in rows.items()
        if split == "eval" and isinstance(row.get("loss"), float)
    }
    lowest = min(losses, key=lambda step: losses[step], default=best)
    if losses.get(lowest, 0.0) < losses.get(best, -math.inf) and lowest not in reader.steps():
        warnings.warn(
            f"the lowest evaluation loss, {losses[lowest]:.4f} at step {lowest}, was not saved: "
            f"the best checkpoint is that of step {best} with {losses[best]:.4f}. To keep the "
            f"best, save as often as you evaluate ({Setting('checkpoint.every', ANY)})",
            stacklevel=4,
        )


def export_safetensors(
    run: str | Path | Trained,
    out: str | Path,
    *,
    step: int | None = None,
    which: Which = "last",
    ema: bool = False,
) -> dict[str, tuple[int, ...]]:
    """Write the parameters and statistics of a trained model to a safetensors file.

    Args:
        run: a run folder, its checkpoint folder, a single checkpoint, or the result of a `fit`.
        out: the file to write.
        step: which checkpoint of a folder; the newest by default.
        which: instead of a number: last, or best, the one with the lowest evaluation loss.
        ema: write the moving average of the parameters; of a result, give `FitResult.averaged`.

    Returns:
        The shapes of its arrays by canonical path.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file
    except ImportError as error:
        raise UserError(
            "exporting needs the safetensors package", fix="pip install 'meshwright[hf]'"
        ) from error
    target = check_path("out", out)
    if target.is_dir():
        raise UserError(
            f"{target} is a folder",
            why="parameters are written to one file",
            fix=f"name a file, such as {target / 'model.safetensors'}, or write a folder for "
            f"transformers: meshwright export RUN --to hf FOLDER, or mw.export_hf",
        )
    if not hasattr(run, "host_arrays"):
        run = check_path("run", run)
    if isinstance(run, str | Path):
        params = read_params(run, step=step, which=which, ema=ema, statistics=True)
    else:
        params = run.host_arrays()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        arrays = {name: np.ascontiguousarray(value) for name, value in params.items()}
        save_file(arrays, target, metadata={"format": "meshwright"})
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {target}", why=str(error)) from error
    return {name: tuple(value.shape) for name, value in params.items()}
