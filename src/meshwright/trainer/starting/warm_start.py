"""Starting a training from the parameters of another run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshwright.checkpoint import read_params
from meshwright.checkpoint.array_paths import as_named_now
from meshwright.errors import ANY, Setting, UserError
from meshwright.sharding.rules import matches
from meshwright.step.assemble import Assembled
from meshwright.step.state import TrainState
from meshwright.weights.hf_folder import describe_differences, listed


def warm_start(
    run: str | Path | None, patterns: Sequence[str] | None, assembled: Assembled
) -> Callable[[TrainState], TrainState]:
    """Return what replaces the parameters of an initial state by those of a run.

    Statistics, such as the running means of BatchNorm, and frozen weights come with them. What
    does not fit is refused here, before anything is compiled.

    Args:
        run: a run or a checkpoint; None replaces nothing.
        patterns: path patterns of the parameters to take; None takes all, and they must then be
            the model's own.
        assembled: the step.
    """
    if run is None:
        if patterns is not None:
            raise UserError(
                f"{Setting('model.init_patterns')} has no effect without a run",
                fix=f"write {Setting('model.init_from', ANY)} with a run folder",
            )
        return lambda state: state
    leaves = {leaf.path: leaf.shape for leaf in assembled.traced.layout.leaves}
    saved = as_named_now(read_params(run, statistics=True), leaves)
    weights = {leaf.path for leaf in assembled.traced.layout.leaves if leaf.is_weight}
    wanted = _chosen({*saved, *weights}, patterns, run)
    differences = describe_differences(
        {path: saved[path].shape for path in saved if path in wanted},
        {path: shape for path, shape in leaves.items() if path in wanted},
    )
    if differences:
        raise UserError(
            f"the parameters of {run} do not fit the model",
            why="; ".join(differences),
            fix=f'take only what fits, with {Setting("model.init_patterns")} such as ["blocks.**"]',
        )

    def replaced(state: TrainState) -> TrainState:
        values = assembled.canonical(state)
        return assembled.start([saved[p] if p in wanted else values[p] for p in values])

    return replaced


def _chosen(paths: set[str], patterns: Sequence[str] | None, run: Any) -> set[str]:
    if patterns is None:
        return paths
    chosen: set[str] = set()
    for pattern in patterns:
        matched = {path for path in paths if matches(pattern, path)}
        if not matched:
            raise UserError(
                f"the pattern `{pattern}` matches no parameter",
                why=f"neither the model nor {run} has one; there are {listed(sorted(paths))}",
            )
        chosen |= matched
    return chosen
