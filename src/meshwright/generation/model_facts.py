"""What is known of a model before it generates: its context, its vocabulary, its format."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshwright.errors import UserError, argument, typed_line
from meshwright.generation.make_decoder import how_decoded, logits_struct, make_decoder
from meshwright.generation.positions import NotIncremental, Positions
from meshwright.generation.row_placement import cast_dtype
from meshwright.generation.token_decoder import PerModel, SplitModel, split_model
from meshwright.generation.token_loop import length_bucket
from meshwright.generation.traced_decoder import Loops, trace_row
from meshwright.program.jaxpr.equations import Equation, aval_of
from meshwright.program.jaxpr.walks import where


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


@PerModel
def vocabulary_of(model: SplitModel, length: int) -> int:
    """Return V of a model from tokens [B, T] to logits [B, T, V]; refuse any other."""
    fix = "pass a model that maps token ids [rows, length] to logits [rows, length, tokens]"
    try:
        found = logits_struct(model, length)
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
    split = split_model(model)
    length = min(split.structure.context, 128)
    try:
        vocabulary_of(split, min(8, length))
    except UserError:
        return ""
    return how_decoded(make_decoder(split, length))


def cache_shapes(model: Any, prompt: int, length: int, dtype: Any = None) -> tuple[Any, Any]:
    """Return the logits and the cache of a row, as shapes, for a model without values.

    The row has at most ``length`` tokens, ``prompt`` of which are its prompt; ``dtype`` is the
    format of the weights while generating.
    """
    split = split_model(model, half_precision(dtype))
    most = split.structure.context
    weights = [jax.ShapeDtypeStruct(w.shape, cast_dtype(w.dtype, dtype)) for w in split.weights]
    decoder = make_decoder(replace(split, weights=weights), length_bucket(min(length, most), most))
    tokens, one = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, prompt), (1,)))
    return jax.eval_shape(
        lambda values, *rows: decoder.start(decoder.prepare(values), *rows), weights, tokens, one
    )


@PerModel
def position_limit(model: SplitModel, length: int) -> tuple[int, str]:
    """Return the most tokens that a model takes in a row, up to a length, and why not more.

    A row ends where a table of positions in the model's program does. It is 0 for a model that
    takes only some lengths, and not this one.
    """

    def wrong(count: int) -> str:
        try:
            closed = trace_row(model, count, Loops(count, []))
        except NotIncremental as error:
            return str(error)
        positions = Positions(closed)
        looks = (eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "gather")
        return next(filter(None, (_rows_past(positions, eqn) for eqn in looks)), "")

    if not (why := wrong(length)):
        return length, ""
    fits, fails = 0, length
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if found := wrong(middle):
            fails, why = middle, found
        else:
            fits = middle
    return fits if fits > 1 and not wrong(fits - 1) else 0, why


def _rows_past(positions: Positions, eqn: Equation) -> str:
    """Return what is wrong with a look-up whose indices follow from positions alone."""
    table, indices = eqn.invars
    clips = eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP
    value = None if clips or positions.depends(indices) else positions.constant(indices)
    if value is None or not value.size:
        return ""
    shape, sizes = aval_of(table).shape, eqn.params["slice_sizes"]
    for place, dim in enumerate(eqn.params["dimension_numbers"].start_index_map):
        if int(np.max(value[..., place])) > shape[dim] - sizes[dim]:
            return f"the table of positions that {where(eqn)} reads has {shape[dim]:,} rows"
    return ""
