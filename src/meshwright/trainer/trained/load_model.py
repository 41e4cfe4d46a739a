"""Loading a trained model from a run folder."""

import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from meshwright.checkpoint import CheckpointReader, find_store
from meshwright.checkpoint.damage import Damage, DamagedCheckpoint, all_damaged, missing_folder
from meshwright.checkpoint.export import Which, choose_checkpoint, read_groups
from meshwright.checkpoint.reader import FOLDER
from meshwright.config.argument_checks import check_path
from meshwright.config.groups import download_command, is_hub_name
from meshwright.config.schema import Config
from meshwright.errors import Setting, UserError
from meshwright.inputs.user_model import model_source
from meshwright.models import find_builder
from meshwright.program.trace.adapters import merge_adapters
from meshwright.program.trace.build_model import ModelSource, describe_model, initial_values
from meshwright.program.trace.model_leaves import Leaf
from meshwright.recipe import make_model_source
from meshwright.runtime.user_code import is_users_file
from meshwright.step.assemble import set_eval_mode
from meshwright.step.average import no_average
from meshwright.trainer.trained.base_weights import find_base, without_factors
from meshwright.trees import from_key_data, is_key, key_data
from meshwright.weights.families import read_architecture
from meshwright.weights.hf_folder import CONFIG, describe_differences, is_hf_folder, open_folder
from meshwright.weights.hf_model import hf_model
from meshwright.weights.kept import read_kept
from meshwright.weights.match import find_weights
from meshwright.weights.peft_folder import PEFT_CONFIG


def load_model(
    run: str | Path,
    *,
    model: Any = None,
    step: int | None = None,
    which: Which = "last",
    ema: bool = False,
    adapters: bool = True,
) -> Any:
    """Load the model of a run with its trained parameters, in evaluation mode.

    Args:
        run: a run folder, its checkpoint folder, a single checkpoint, or a Hugging Face folder.
        model: an NNX model of the same structure, which stays as it is, or a function that
            builds it; not needed for runs started from the command line or from weights of
            Hugging Face.
        step: which checkpoint; by default the newest that is not damaged, with a warning about
            those that are.
        which: instead of a number: last, or best, the checkpoint with the lowest evaluation loss.
        ema: load the moving average of the parameters (``ema_decay``) instead.
        adapters: whether the adapters of a run with ``lora`` are merged into the weights.
    """
    path = check_path("run", run)
    hub_name = is_hub_name(str(path)) and not path.parent.exists()
    if hub_name or (is_hf_folder(path) and not (path / FOLDER).is_dir()):
        if ema:
            raise no_average()
        return _load_hf(path, model)
    if not path.exists():
        error = missing_folder(path.absolute())
        hint = f"a model of Hugging Face is downloaded first ({download_command(str(run))})"
        raise UserError(error.what, why=error.why, fix=f"{error.fix}; {hint}")
    if (path / PEFT_CONFIG).is_file():
        fix = f"start a run from it ({Setting('lora.init_from', str(path))}) and use that"
        raise UserError(f"{path} is a PEFT folder", why="it has adapters without a base", fix=fix)
    if which != "last":
        step = choose_checkpoint(path, step, which)[1]
    folder, named = find_store(path)
    asked = named if step is None else step
    if asked is not None:
        return _load(folder, asked, model, ema=ema, adapters=adapters)
    damaged: list[Damage] = []
    for newest in reversed(CheckpointReader(folder).steps()):
        try:
            loaded = _load(folder, newest, model, ema=ema, adapters=adapters)
        except DamagedCheckpoint as error:
            damaged.append(error.damage)
            continue
        _warn_damaged(folder, damaged, newest)
        return loaded
    raise all_damaged(
        folder, damaged, "use a copy of the folder, or the checkpoints of another run"
    )


def _load(folder: Path, step: int, model: Any, *, ema: bool, adapters: bool) -> Any:
    source = _from_config(folder, step) if model is None else _given(model)
    parts = describe_model(source, ...)
    loaded = parts.merge(read_leaves(folder, step, parts.leaves, ema=ema, adapters=adapters))
    set_eval_mode(loaded)
    return loaded


def read_leaves(
    folder: Path, step: int, leaves: Sequence[Leaf], *, ema: bool = False, adapters: bool = True
) -> list[Any]:
    """Return the values of a model's leaves in a checkpoint; raise if it is of another model.

    Adapters are merged into the weights, or left out, unless they are among the leaves.
    """
    groups = read_groups(folder, ("params", "state"), step=step, ema=ema)
    saved = {path: array for group in groups.values() for path, array in group.items()}
    # On disk, random keys are words.
    need = {leaf.path: tuple(jax.eval_shape(key_data, leaf.struct).shape) for leaf in leaves}
    base = find_base(folder)
    if base is not None:
        saved |= base.read()
        if base.adapters and not any(path in need for path in base.adapters[0].paths):
            dtypes = {leaf.path: leaf.dtype for leaf in leaves}
            merged = merge_adapters(base.adapters, saved, dtypes) if adapters else saved
            saved = without_factors(merged)
    differences = describe_differences({p: a.shape for p, a in saved.items()}, need)
    if differences:
        raise UserError(
            f"the model is not the one of {folder / str(step)}",
            why="; ".join(differences),
            fix="pass the model that was trained",
        )
    return [_read(saved[leaf.path], leaf) for leaf in leaves]


def _load_hf(path: Path, model: Any) -> Any:
    source = hf_model(path) if model is None else _given(model)
    parts = describe_model(source, ...)
    shapes = {leaf.path: leaf.shape for leaf in parts.leaves if leaf.is_weight}
    weights = find_weights(open_folder(path), shapes)
    numbers = {n: leaf for n, leaf in enumerate(parts.leaves) if not leaf.is_weight}
    initial = initial_values(source, parts, 0, only=list(numbers))
    others = dict(zip(numbers, initial, strict=True))
    loaded = parts.merge(
        [
            others[n] if n in others else jnp.asarray(weights.read_whole(leaf.path, leaf.dtype))
            for n, leaf in enumerate(parts.leaves)
        ]
    )
    set_eval_mode(loaded)
    return loaded


def _warn_damaged(folder: Path, damaged: Sequence[Damage], used: int) -> None:
    for each in damaged:
        warnings.warn(
            f"the checkpoint {folder / str(each.step)} is damaged ({each.problem}); the model is "
            f"that of step {used} instead",
            UserWarning,
            stacklevel=3,
        )


def _given(model: Any) -> ModelSource:
    def no_loss(*_: Any) -> Any:
        raise UserError(
            "a Linen module cannot be loaded alone",
            why="its parameters are made by a call on a sample",
            fix="give nnx.bridge.ToNNX(module, rngs=rngs).lazy_init(x) as the model",
        )

    return model_source(model, no_loss, no_loss)


def _from_config(folder: Path, step: int) -> ModelSource:
    config = CheckpointReader(folder).metadata(step).config
    kept = read_kept(folder.parent) if not config else {}
    if CONFIG in kept:
        found = read_architecture(json.loads(kept[CONFIG]), str(folder.parent))
        builder = find_builder(found.family.kind)
        return lambda rngs: builder(**found.arguments, rngs=rngs)
    if not config:
        raise UserError(
            f"how to build the model of {folder.parent} is not known",
            why="the run was started from Python, which saves no config",
            fix="pass the model: mw.load_model(run, model=Net)",
        )
    parsed = Config.parse(dict(config))
    _refuse_foreign_code(parsed.model.kind, folder.parent)
    return make_model_source(parsed)


def _refuse_foreign_code(kind: str, run: Path) -> None:
    """Raise if a checkpoint names code that the user's program has not imported itself.

    Otherwise a checkpoint from a stranger could import and call anything.
    """
    module, colon, name = kind.partition(":")
    imported = sys.modules.get(module)
    named = getattr(imported, name, None)
    is_model = isinstance(named, type) and issubclass(named, nnx.Module)
    if not colon or is_model or is_users_file(getattr(imported, "__file__", None) or "<frozen "):
        return
    raise UserError(
        f"the run {run} names the model {kind}, which your program has not imported",
        why="code that a checkpoint names is never imported automatically",
        fix=f"pass the model: mw.load_model(run, model={name}), or write `import {module}` first; "
        f"to meshwright generate or eval, --model {kind}",
    )


def _read(array: Any, leaf: Leaf) -> Any:
    dtype = None if is_key(leaf.dtype) else leaf.dtype
    return from_key_data(jnp.asarray(array, dtype), leaf.dtype)
