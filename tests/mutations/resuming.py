"""Resuming: counters, moments, random streams, statistics and data that do not continue."""

import dataclasses

import jax
import jax.numpy as jnp
from mutations.mutation import Mutation
from mutations.runs_of import MOVED, RESUMED
from mutations.sabotage import replace

from meshwright.step.canonical import CanonicalForm
from meshwright.trainer.batch_loader import BatchLoader


def _restored(change):
    """Change a checkpoint's arrays while they become a training state."""

    def make(right):
        def to_state(self, groups):
            copy = {group: dict(by_path) for group, by_path in groups.items()}
            change(copy)
            return right(self, copy)

        return to_state

    return replace(CanonicalForm, "_to_state", make)


def _cleared(group, *endings):
    """Start some arrays from zero again."""

    def change(groups):
        for path, value in groups[group].items():
            if path.endswith(endings):
                groups[group][path] = jnp.zeros_like(value)

    return _restored(change)


def _transposed(groups):
    groups["params"]["second.kernel"] = groups["params"]["second.kernel"].T


def _swapped(groups):
    params = groups["params"]
    params["first.kernel"], params["second.kernel"] = (
        params["second.kernel"],
        params["first.kernel"],
    )


def _swapped_moments(groups):
    moments = groups["optimizer"]
    first, second = (
        next(p for p in moments if p.endswith(f"mu.{n}.kernel")) for n in ("first", "second")
    )
    moments[first], moments[second] = moments[second], moments[first]


def _half_precision(right):
    def from_state(self, state):
        return jax.tree.map(
            lambda a: a.astype(jnp.bfloat16).astype(a.dtype) if a.dtype == jnp.float32 else a,
            right(self, state),
        )

    return from_state


def _batch_off(by):
    def make(right):
        def open_at(self, start, stop, *on_end):
            more = by if start else 0
            return right(self, start + more, stop + more, *on_end)

        return open_at

    return replace(BatchLoader, "open", make)


def _other_seed(right):
    def open_at(self, start, stop, *on_end):
        if start:
            self.data = dataclasses.replace(self.data, seed=self.data.seed + 1)
        return right(self, start, stop, *on_end)

    return open_at


def _mutation(does, break_it, caught, *, check=RESUMED, seen="", names="", everyday=False):
    return Mutation(does, break_it, check, caught, seen=seen, names=names, everyday=everyday)


MUTATIONS = (
    _mutation(
        "the optimizer's counter starts from zero",
        _cleared("optimizer", "count"),
        ("params", "losses"),
        seen="optimizer states that are not restored",
    ),
    _mutation(
        "the optimizer's moments start from zero",
        _cleared("optimizer", "kernel", "bias", "scale"),
        ("params", "losses"),
    ),
    _mutation(
        "random streams start again",
        _cleared("state", "dropout.rngs.count"),
        ("losses", "state"),
        names="3",
    ),
    _mutation(
        "batch statistics start again",
        _cleared("state", "norm.mean", "norm.var"),
        ("state",),
        names="norm.mean",
    ),
    _mutation(
        "one batch is repeated",
        _batch_off(-1),
        ("losses", "params"),
        seen="positions that are saved one batch late",
        names="3",
    ),
    _mutation("one batch is skipped", _batch_off(1), ("losses", "params"), names="3"),
    _mutation(
        "the data continue with another seed",
        replace(BatchLoader, "open", _other_seed),
        ("losses", "params"),
        seen="samplers that forget the epoch when they resume",
        names="3",
    ),
    _mutation(
        "a square kernel is transposed on another mesh",
        _restored(_transposed),
        ("losses", "params"),
        check=MOVED,
        names="3",
    ),
    _mutation(
        "two leaves of the same shape are swapped on another mesh",
        _restored(_swapped),
        ("losses", "params"),
        check=MOVED,
        names="3",
    ),
    _mutation(
        "the moments of two leaves are swapped on another mesh",
        _restored(_swapped_moments),
        ("optimizer", "params"),
        check=MOVED,
    ),
    _mutation(
        "a checkpoint is cast to bfloat16 before it is saved",
        replace(CanonicalForm, "_from_state", _half_precision),
        ("params", "losses"),
    ),
)
