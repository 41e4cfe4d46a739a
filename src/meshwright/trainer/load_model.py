"""Loading a trained model from a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.checkpoint import CheckpointReader, find_store
from meshwright.checkpoint.export import read_groups
from meshwright.checkpoint.older_paths import as_named_now
from meshwright.config.schema import Config
from meshwright.errors import UserError
from meshwright.inputs.user_model import model_source
from meshwright.program.trace.build_model import ModelSource, describe_model
from meshwright.program.trace.model_leaves import Leaf
from meshwright.recipe import make_model_source
from meshwright.step.assemble import set_eval_mode
from meshwright.trainer.warm_start import describe_differences
from meshwright.trees import is_key


def load_model(run: str | Path, *, model: Any = None, update: int | None = None) -> Any:
    """Load the model of a run with its trained parameters, in evaluation mode.

    Args:
        run: a run folder, its checkpoint folder, or a single checkpoint.
        model: an NNX model of the same structure, which stays as it is, or a function that
            builds it; not needed for runs started from the command line.
        update: which checkpoint; the newest by default.
    """
    source = _from_config(run, update) if model is None else _given(model)
    parts = describe_model(source, ...)
    groups = read_groups(run, ("params", "state"), update=update)
    saved = {path: array for group in groups.values() for path, array in group.items()}
    need = {leaf.path: _stored_shape(leaf) for leaf in parts.leaves}
    saved = as_named_now(saved, need)
    differences = describe_differences({p: a.shape for p, a in saved.items()}, need)
    if differences:
        raise UserError(
            f"the model is not the one of {run}",
            why="; ".join(differences),
            fix="pass the model that was trained",
        )
    loaded = parts.merge([_read(saved[leaf.path], leaf) for leaf in parts.leaves])
    set_eval_mode(loaded)
    return loaded


def _given(model: Any) -> ModelSource:
    def no_loss(*_: Any) -> Any:
        raise UserError(
            "a Linen module cannot be loaded alone",
            why="its parameters are made by a call on a sample",
            fix="give nnx.bridge.ToNNX(module, rngs=rngs).lazy_init(x) as the model",
        )

    return model_source(model, no_loss, no_loss)


def _from_config(run: str | Path, update: int | None) -> ModelSource:
    folder, named = find_store(Path(run))
    reader = CheckpointReader(folder)
    newest = update if update is not None else named if named is not None else reader.latest()
    config = {} if newest is None else reader.metadata(newest).config
    if not config:
        raise UserError(
            f"how to build the model of {run} is not known",
            why="the run was started from Python, which saves no config",
            fix="pass the model: mw.load_model(run, model=Net)",
        )
    return make_model_source(Config.parse(dict(config)))


def _stored_shape(leaf: Leaf) -> tuple[int, ...]:
    """Return the shape of a leaf on disk, where random keys are words."""
    if not is_key(leaf.dtype):
        return leaf.shape
    words = jax.eval_shape(jax.random.key_data, leaf.struct)
    return tuple(words.shape)


def _read(array: Any, leaf: Leaf) -> Any:
    if not is_key(leaf.dtype):
        return jnp.asarray(array, leaf.dtype)
    impl = jax.random.key_impl(jnp.empty((0,), leaf.dtype))
    return jax.random.wrap_key_data(jnp.asarray(array), impl=impl)
