"""Parameters of a checkpoint for other tools: as NumPy arrays, or as a safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from numpy.typing import NDArray

from meshwright.checkpoint.store import STATE, CheckpointStore, find_store
from meshwright.errors import UserError


def read_params(path: str | Path, *, update: int | None = None) -> dict[str, NDArray[Any]]:
    """Read the parameters of a run's newest checkpoint by canonical path.

    Args:
        path: a run's folder, its folder of checkpoints, or one checkpoint.
        update: which checkpoint; the newest by default.
    """
    folder, named = find_store(Path(path))
    store = CheckpointStore(folder, read_only=True)
    try:
        wanted = update if update is not None else named if named is not None else store.latest()
        if wanted is None or wanted not in store.updates():
            raise UserError(
                f"there is no checkpoint of update {wanted} in {folder}",
                why=f"there are {', '.join(map(str, store.updates())) or 'none'}",
            )
        paths = store.shapes(wanted)["params"]
    finally:
        store.close()
    with ocp.PyTreeCheckpointer() as reader:
        tree: Any = reader.restore(
            folder / str(wanted) / STATE,
            args=ocp.args.PyTreeRestore(
                item={"params": dict.fromkeys(paths, 0)},
                restore_args={"params": {p: ocp.RestoreArgs(np.ndarray) for p in paths}},
                partial_restore=True,
            ),
        )
    return dict(tree["params"])


def export_safetensors(
    run: str | Path, out: str | Path, *, update: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Write the parameters of a checkpoint to a safetensors file; returns their shapes by name."""
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise UserError(
            "exporting needs the safetensors package", fix="pip install 'meshwright[hf]'"
        ) from error
    params = read_params(run, update=update)
    target = Path(out)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: np.ascontiguousarray(v) for name, v in params.items()}, target)
    except OSError as error:
        raise UserError(f"cannot write {target}", why=str(error)) from error
    return {name: tuple(value.shape) for name, value in params.items()}
