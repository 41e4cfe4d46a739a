"""Export of checkpoints: parameters as NumPy arrays or as a safetensors file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.checkpoint.array_paths import ArraysByPath
from meshwright.checkpoint.reader import CheckpointReader, find_store
from meshwright.config.argument_checks import check_count, check_path
from meshwright.errors import UserError
from meshwright.program.jaxpr.names import nest
from meshwright.runtime.other_names import also_called

Arrays = dict[str, NDArray[Any]]
"""NumPy arrays by canonical path."""


class Trained(Protocol):
    """A trained model in memory, such as the result of a `fit`."""

    def host_arrays(self) -> Arrays:
        """Return parameters and statistics by canonical path."""
        ...


@also_called(update="step")
def read_params(
    path: str | Path,
    *,
    step: int | None = None,
    statistics: bool = False,
    nested: bool = False,
) -> dict[Any, Any]:
    """Read the parameters of a checkpoint by canonical path, and compare their checksums.

    `meshwright.load_model` returns a model that holds them.

    Args:
        path: a run folder, its checkpoint folder, or a single checkpoint.
        step: which checkpoint; the newest by default.
        statistics: also read the model's other floating-point arrays, such as the running
            means of BatchNorm and frozen weights.
        nested: return plain nested dicts instead of one dict by path; ``nnx.update(model, …)``
            takes both.
    """
    groups = read_groups(path, ("params", "state") if statistics else ("params",), step=step)
    arrays = ArraysByPath(
        (name, array)
        for group, by_path in groups.items()
        for name, array in by_path.items()
        # Integer arrays are keys and counters of random streams.
        if group == "params" or np.issubdtype(array.dtype, np.floating)
    )
    return nest(arrays) if nested else arrays


def read_groups(
    path: str | Path, groups: Sequence[str], *, step: int | None = None
) -> dict[str, Arrays]:
    """Read arrays of a checkpoint by group (params, state, optimizer) and canonical path."""
    reader, wanted = choose_checkpoint(check_path("path", path), step)
    shapes = reader.shapes(wanted)
    return reader.read(
        wanted, {group: list(shapes[group]) for group in groups if shapes.get(group)}
    )


def choose_checkpoint(path: Path, step: int | None) -> tuple[CheckpointReader, int]:
    """Return a reader of the checkpoints of a run, and the step of the one that is wanted.

    Args:
        path: a run folder, its checkpoint folder, or a single checkpoint.
        step: which checkpoint; the newest by default.
    """
    folder, named = find_store(path)
    if step is not None:
        check_count("step", step, least=0)
    reader = CheckpointReader(folder)
    wanted = step if step is not None else named if named is not None else reader.latest()
    if wanted is None or wanted not in reader.steps():
        raise UserError(
            f"there is no checkpoint of step {wanted} in {folder}",
            why=f"checkpoints: {', '.join(map(str, reader.steps())) or 'none'}",
        )
    return reader, wanted


@also_called(update="step")
def export_safetensors(
    run: str | Path | Trained, out: str | Path, *, step: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Write the parameters and statistics of a trained model to a safetensors file.

    Args:
        run: a run folder, its checkpoint folder, a single checkpoint, or the result of a `fit`.
        out: the file to write.
        step: which checkpoint of a folder; the newest by default.

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
        params = read_params(run, step=step, statistics=True)
    else:
        params = run.host_arrays()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        arrays = {name: np.ascontiguousarray(value) for name, value in params.items()}
        save_file(arrays, target, metadata={"format": "meshwright"})
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {target}", why=str(error)) from error
    return {name: tuple(value.shape) for name, value in params.items()}
