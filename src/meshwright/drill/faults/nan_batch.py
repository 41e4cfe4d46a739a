"""A batch with a NaN in one process, in a training that stops for it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from meshwright.drill.fault import Fault, Missed
from meshwright.drill.hooks import Hooks
from meshwright.drill.plays import resumed
from meshwright.drill.scene import Scene
from meshwright.errors import ExitCode


def _inject(hooks: Hooks) -> None:
    if hooks.is_last:
        hooks.change_batch(_with_nan)


def _with_nan(batch: Any) -> Any:
    leaves, tree = jax.tree.flatten(batch)
    for number, leaf in enumerate(leaves):
        if np.issubdtype(np.asarray(leaf).dtype, np.floating):
            leaves[number] = np.array(leaf)
            leaves[number][0, ...] = np.nan
            break
    return jax.tree.unflatten(tree, leaves)


def _whole_numbers(scene: Scene) -> str:
    kinds = scene.batch_kinds
    if any(kind.startswith(("float", "bfloat")) for kind in kinds):
        return ""
    return f"batches of {' and '.join(sorted(set(kinds)))} cannot hold a NaN"


def _play(scene: Scene) -> str:
    update = scene.configuration.update
    launched = scene.train("--restarts=3", inject=True, settings=["training.on_nonfinite=stop"])
    launched.check_code(ExitCode.NOT_FINITE)
    launched.find(rf"error: .* at update {update}\b")
    launched.find(rf"batch {update - 1}\b")
    if not (scene.run.run_dir / "incidents" / f"{update:06d}").is_dir():
        raise Missed(f"update {update} was not recorded")
    if (saved := scene.run.updates[-1]) != update - 1:
        raise Missed(f"update {saved} is saved instead of {update - 1}")
    return resumed(
        scene, launched, f"exit code 4 in all processes, recorded, update {update - 1} saved"
    )


FAULTS = (
    Fault(
        "nan-batch",
        "a NaN in the part of a batch that the last process reads",
        "all stop before the update with exit code 4, record it, and save no NaN",
        _play,
        inject=_inject,
        why_not=_whole_numbers,
    ),
)
