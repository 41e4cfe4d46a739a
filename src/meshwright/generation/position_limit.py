"""How many tokens a model takes, as its program says: where its tables of positions end."""

from __future__ import annotations

import jax
import numpy as np

from meshwright.generation.positions import NotIncremental, Positions, where
from meshwright.generation.token_decoder import SplitModel
from meshwright.generation.traced_decoder import Loops, trace_row
from meshwright.program.jaxpr.equations import Equation, aval_of


def position_limit(model: SplitModel, length: int) -> tuple[int, str]:
    """Return the most tokens that a model takes in a row, up to a length, and why not more.

    It is 0 for a model that takes only some lengths, and not this one.
    """

    def wrong(count: int) -> str:
        try:
            closed = trace_row(model, count, Loops(count, []))
        except NotIncremental as error:
            return str(error)
        return _past_a_table(Positions(closed))

    if not (why := wrong(length)):
        return length, ""
    fits, fails = 0, length
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if found := wrong(middle):
            fails, why = middle, found
        else:
            fits = middle
    known = fits > 1 and not wrong(fits - 1)
    return fits if known else 0, why


def _past_a_table(positions: Positions) -> str:
    looks = (eqn for eqn in positions.jaxpr.eqns if eqn.primitive.name == "gather")
    return next(filter(None, (_rows_past(positions, eqn) for eqn in looks)), "")


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
