"""What is known of a model before it generates: its context, its vocabulary, its format."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshwright.errors import UserError, argument, typed_line
from meshwright.generation.make_decoder import how_decoded, make_decoder
from meshwright.generation.position_limit import position_limit
from meshwright.generation.token_decoder import SplitModel, remembered, split_model
from meshwright.generation.token_loop import length_bucket

UNLIMITED = 2**31 - 1

_contexts: OrderedDict[Any, int] = OrderedDict()
_vocabularies: OrderedDict[Any, int] = OrderedDict()
_limits: OrderedDict[Any, tuple[int, str]] = OrderedDict()


def context_of(model: Any) -> int:
    """Return the most tokens of a row that a model takes, as it or its parts say."""
    parts = [part for _, part in nnx.iter_modules(model)]
    found = [getattr(part, "context_length", None) for part in parts]
    return min((each for each in found if isinstance(each, int)), default=UNLIMITED)


def half_precision(dtype: Any) -> Any:
    """Return a dtype that is computed in as in training; None for others, as weights alone are."""
    try:
        asked = jnp.dtype(jnp.float32 if dtype is None else dtype)
    except TypeError:
        asked = jnp.dtype(bool)
    if not jnp.issubdtype(asked, jnp.floating):
        raise UserError(
            f"{argument('dtype', dtype)} is no format of floats", fix="write bfloat16 or float32"
        )
    return asked if asked.itemsize == 2 else None


def known_context(model: SplitModel, whole: Any) -> int:
    """Return `context_of` a model, which is not looked for again in every call."""
    return remembered(_contexts, model, None, lambda: context_of(whole))


def limit_of(model: SplitModel, length: int) -> tuple[int, str]:
    """Return the most tokens of a row that the model's program takes, and why."""
    return remembered(_limits, model, length, lambda: position_limit(model, length))


def vocabulary_of(model: SplitModel, length: int) -> int:
    """Return V of a model from tokens [B, T] to logits [B, T, V]; refuse any other."""
    return remembered(_vocabularies, model, length, lambda: _find_vocabulary(model, length))


def _find_vocabulary(model: SplitModel, length: int) -> int:
    fix = "pass a model that maps token ids [rows, length] to logits [rows, length, tokens]"
    tokens = jax.ShapeDtypeStruct((1, length), np.dtype(np.int32))
    try:
        found: Any = jax.eval_shape(model.logits_of, [*model.weights, *model.source], tokens)
    except Exception as error:
        raise UserError(
            f"{model.structure.name} is not a model of tokens",
            why=f"called with token ids [1, {length}] it raises {typed_line(error)}",
            fix=fix,
        ) from error
    shape = tuple(getattr(found, "shape", ()))
    if len(shape) != 3 or shape[:2] != (1, length) or not jnp.issubdtype(found.dtype, jnp.floating):
        what = f"an array {list(shape)} of {found.dtype}" if shape else type(found).__name__
        raise UserError(
            f"{model.structure.name} is not a model of tokens",
            why=f"from token ids [1, {length}] it makes {what}",
            fix=fix,
        )
    return shape[-1]


def how_generated(model: Any) -> str:
    """Return how a model without values would be generated from; empty if it is no decoder."""
    if not isinstance(model, nnx.Module):
        return ""
    length = min(context_of(model), 128)
    try:
        vocabulary_of(split_model(model), min(8, length))
    except UserError:
        return ""
    return how_decoded(make_decoder(split_model(model), length))


def cache_shapes(model: Any, prompt: int, length: int, dtype: Any = None) -> tuple[Any, Any]:
    """Return the logits and the cache of a row, as shapes, for a model without values.

    Args:
        model: the model.
        prompt: tokens of the prompt.
        length: the most tokens of the row.
        dtype: format of the weights while generating.
    """
    split, most = split_model(model, half_precision(dtype)), context_of(model)
    weights = [
        jax.ShapeDtypeStruct(w.shape, dtype if is_float and dtype is not None else w.dtype)
        for w in split.weights
        for is_float in [jnp.issubdtype(w.dtype, jnp.floating)]
    ]
    decoder = make_decoder(replace(split, weights=weights), length_bucket(min(length, most), most))
    tokens, one = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, prompt), (1,)))
    return jax.eval_shape(
        lambda values, *rows: decoder.start(decoder.prepare(values), *rows), weights, tokens, one
    )
