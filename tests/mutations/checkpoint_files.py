"""Checkpoint files: what is on disk is not what was to be saved."""

import jax
import jax.numpy as jnp
from mutations.mutation import Mutation
from mutations.runs_of import CHECKSUMS
from mutations.sabotage import replace

from meshwright.checkpoint.store import ocp


def _written(change):
    """Change the arrays on their way to the disk; checksums are those of the right ones."""

    def make(right):
        def save(state, *rest, **options):
            copy = {group: dict(by_path) for group, by_path in state.items()}
            change(copy)
            return right(copy, *rest, **options)

        return save

    return replace(ocp.args, "PyTreeSave", make)


def _flipped(groups):
    kernel = groups["params"]["first.kernel"]
    bits = jax.lax.bitcast_convert_type(kernel, jnp.uint32)
    bits = bits.at[3, 5].set(bits[3, 5] ^ 1)
    groups["params"]["first.kernel"] = jax.lax.bitcast_convert_type(bits, jnp.float32)


def _transposed(groups):
    groups["params"]["first.kernel"] = groups["params"]["first.kernel"].T


def _swapped(groups):
    params = groups["params"]
    params["first.kernel"], params["second.kernel"] = (
        params["second.kernel"],
        params["first.kernel"],
    )


def _rounded(groups):
    params = groups["params"]
    for path, value in params.items():
        params[path] = value.astype(jnp.bfloat16).astype(value.dtype)


def _missing(groups):
    groups["optimizer"].pop(next(path for path in groups["optimizer"] if "mu." in path))


def _mutation(does, change, *, everyday=False):
    return Mutation(does, _written(change), CHECKSUMS, ("damaged",), everyday=everyday)


MUTATIONS = (
    _mutation("one bit of a checkpoint is flipped", _flipped),
    _mutation("a leaf is written transposed", _transposed),
    _mutation("two leaves of the same shape are written in each other's place", _swapped),
    _mutation("parameters are written in bfloat16 precision", _rounded),
    _mutation("an array of the optimizer is not written", _missing),
)
