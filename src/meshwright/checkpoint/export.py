"""Export of checkpoints: parameters as NumPy arrays or as a safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.checkpoint.reader import CheckpointReader, find_store
from meshwright.errors import UserError


def read_params(
    path: str | Path, *, update: int | None = None, statistics: bool = False
) -> dict[str, NDArray[Any]]:
    """Read the parameters of a checkpoint by canonical path, and compare their checksums.

    Args:
        path: a run folder, its checkpoint folder, or a single checkpoint.
        update: which checkpoint; the newest by default.
        statistics: also read the model's other floating-point arrays, such as the running
            means of BatchNorm and frozen weights.
    """
    folder, named = find_store(Path(path))
    reader = CheckpointReader(folder)
    wanted = update if update is not None else named if named is not None else reader.latest()
    if wanted is None or wanted not in reader.updates():
        raise UserError(
            f"there is no checkpoint of update {wanted} in {folder}",
            why=f"checkpoints: {', '.join(map(str, reader.updates())) or 'none'}",
        )
    shapes = reader.shapes(wanted)
    groups = ("params", "state") if statistics else ("params",)
    paths = {group: list(shapes.get(group, {})) for group in groups if shapes.get(group)}
    tree = reader.read(wanted, paths)
    return {
        name: array
        for group in paths
        for name, array in tree[group].items()
        # Integer arrays are keys and counters of random streams.
        if group == "params" or np.issubdtype(array.dtype, np.floating)
    }


def export_safetensors(
    run: str | Path, out: str | Path, *, update: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Write a checkpoint's parameters and statistics to a safetensors file.

    Returns the shapes of its arrays by canonical path.
    """
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise UserError(
            "exporting needs the safetensors package", fix="pip install 'meshwright[hf]'"
        ) from error
    params = read_params(run, update=update, statistics=True)
    target = Path(out)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        arrays = {name: np.ascontiguousarray(value) for name, value in params.items()}
        save_file(arrays, target, metadata={"format": "meshwright"})
    except OSError as error:
        raise UserError(f"cannot write {target}", why=str(error)) from error
    return {name: tuple(value.shape) for name, value in params.items()}
