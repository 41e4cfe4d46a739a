"""Checking that a loss is a mean over samples, so that devices can compute it for their own."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.errors import Setting, UserError
from meshwright.program.dims.classes import DimClasses
from meshwright.program.dims.sample_rules import ProgramPair
from meshwright.program.dims.sample_values import MixedSamplesError, SampleValue, same_factor

_SYNC = "training.sync_gradients_every"


def find_mixing(classes: DimClasses) -> MixedSamplesError | None:
    """Return where a loss treats samples other than one by one or by sums; None if it does not.

    One trace is enough for that. Whether sums are divided by the number of samples is not looked
    at, which takes two (`check_mean`).

    Args:
        classes: the loss of some samples.
    """
    total, weight = ProgramPair(classes, classes).outputs(2)[:2]
    return total.error or weight.error


def check_mean(
    first: DimClasses, second: DimClasses, metrics: Sequence[str], kept: Sequence[str]
) -> None:
    """Refuse a loss that is neither a mean over samples nor a ratio of sums over them.

    Args:
        first: the loss of some samples.
        second: the same loss of another number of samples.
        metrics: names of its metrics.
        kept: paths of the leaves whose new values are its last outputs.
    """
    names = ["the loss", *(f"metric `{name}`" for name in metrics)]
    outputs = ProgramPair(first, second).outputs(2 * len(names))
    for name, total, weight in zip(names, outputs[::2], outputs[1::2], strict=False):
        if error := _ratio_problem(total, weight):
            raise _refusal(name, error)
    for path, value in zip(kept, outputs[2 * len(names) :], strict=True):
        if value.kind != "independent" or not same_factor(value.factor, 1.0):
            raise UserError(
                f"{Setting(_SYNC)} cannot be used: `{path}` depends on the samples of a microbatch",
                why="until gradients are reduced, each device has only its own samples",
                fix=f"write {Setting(_SYNC, 1)}",
            )


def has_weight(classes: DimClasses) -> bool:
    """Whether a loss is divided by a weight that is a sum over samples, as in `mw.Weighted`."""
    return ProgramPair(classes, classes).outputs(2)[1].kind == "sum"


def mean_problem(first: DimClasses, second: DimClasses) -> MixedSamplesError | None:
    """Return why a loss is no mean over samples; None if it is one, or a ratio of sums over them.

    Args:
        first: the loss of some samples.
        second: the same loss of another number of samples.
    """
    return _ratio_problem(*ProgramPair(first, second).outputs(2)[:2])


def _ratio_problem(total: SampleValue, weight: SampleValue) -> MixedSamplesError | None:
    if error := total.error or weight.error:
        return error
    if same_factor(total.factor, weight.factor):
        return None
    return MixedSamplesError("it is a sum over samples that is not divided by their number")


def _refusal(name: str, error: MixedSamplesError) -> UserError:
    if error.module:
        return UserError(
            f"{Setting(_SYNC)} cannot be used: `{error.module}` mixes samples",
            why=f"{error} (as in BatchNorm), and those of a microbatch are on different devices",
            fix=f"write {Setting(_SYNC, 1)}",
        )
    return UserError(
        f"{Setting(_SYNC)} cannot be used: {name} is not a mean over samples",
        why=f"{error}, and until gradients are reduced, each device has only its own samples",
        fix="return a mean over samples, or mw.Weighted(total, weight) of sums over them (as for a "
        f"masked mean; a weight of 0 needs no guard); or write {Setting(_SYNC, 1)}",
    )
