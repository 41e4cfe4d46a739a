"""Rules for operations along dims: reductions, cumulative sums, sorts, windows, FFTs."""

from collections.abc import Mapping

from meshwright.program.dims.factors import Dims
from meshwright.program.dims.op import Op, Rule, pick, primitives, without


def reduction(op: Op) -> list[Dims]:
    """Reduce some dims by a sum, maximum, argmax or similar."""
    axes = op.params["axes"] if "axes" in op.params else op.params["dimensions"]
    results = len(op.out_avals)
    for value in op.operands[1:results]:
        op.unify_all(op.dims(), value.dims)
    kept = without(op.dims(), axes)
    op.reduce(pick(op.dims(), axes), kept)
    return [kept] * results


def cumulative(op: Op) -> list[Dims]:
    """Compute running sums: each index needs the ones before it."""
    op.gather([op.dims()[op.params["axis"]]])
    return [op.dims()]


def sort(op: Op) -> list[Dims]:
    """Sort all operands by the first ones: every index may move."""
    for value in op.operands[1:]:
        op.unify_all(op.dims(), value.dims)
    axis = op.params["dimension"]
    for operand in range(len(op.operands)):
        op.gather([op.dims(operand)[axis]], operand)
    return [op.dims()] * len(op.out_avals)


def top_k(op: Op) -> list[Dims]:
    """Pick the largest along one dim, which must be whole."""
    axis = op.params.get("axis", op.params.get("reduction_dimension", -1)) % len(op.dims())
    op.gather([op.dims()[axis]])
    largest = op.fresh()[axis]
    op.make([largest])
    return [(*op.dims()[:axis], largest, *op.dims()[axis + 1 :])] * len(op.out_avals)


def windows(op: Op) -> list[Dims]:
    """Pool: dims with a window of one element do not change, the others need neighbours."""
    dims = list(op.fresh())
    for d, window in enumerate(op.params["window_dimensions"]):
        for operand, value in enumerate(op.operands):
            if len(value.dims) != len(dims):
                continue
            if window == 1 and op.shape(operand)[d] == op.out_shape()[d]:
                op.unify(value.dims[d], dims[d])
            else:
                op.gather([value.dims[d]], operand)
                op.make([dims[d]])
    return [tuple(dims)] * len(op.out_avals)


def fourier(op: Op) -> list[Dims]:
    """Transform the last dims, which mixes all their indices."""
    first = len(op.dims()) - len(op.params["fft_lengths"])
    op.gather(op.dims()[first:])
    frequencies = op.fresh()[first:]
    if any(value.has_grad for value in op.operands):
        # Often only the real part of a spectrum has a gradient.
        op.note("gather", frequencies, op.out_nbytes() // 2)
    return [op.dims()[:first] + frequencies]


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(
        primitives(
            """
        argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum
        reduce_xor
            """
        ),
        reduction,
    ),
    **dict.fromkeys(primitives("cumlogsumexp cummax cummin cumprod cumsum"), cumulative),
    "sort": sort,
    "top_k": top_k,
    "approx_top_k": top_k,
    **dict.fromkeys(
        primitives(
            """
        reduce_window reduce_window_max reduce_window_min reduce_window_sum
        select_and_gather_add select_and_scatter_add
            """
        ),
        windows,
    ),
    "fft": fourier,
}
