"""Rules for dots, convolutions and fused attention."""

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.program.dims.factors import NO_DIM, Dim, Dims
from meshwright.program.dims.op import Op, Product, Rule, pick, unknown, without

HEADS_BEFORE_SEQUENCE = 1
"""The layout number of fused attention for arrays of (batch, heads, sequence, dim)."""


def dot_general(op: Op) -> list[Dims]:
    """Merge contracted and batch dims of both sides; the others are dims of the result."""
    return [_dot(op, op.params["dimension_numbers"])]


def ragged_dot(op: Op) -> list[Dims]:
    """Multiply each row by one kernel of a stack: neither rows nor stack can be sharded."""
    numbers = op.params["ragged_dot_dimension_numbers"]
    stack = tuple(numbers.rhs_group_dimensions)
    op.gather(pick(op.dims(0), numbers.lhs_ragged_dimensions), 0)
    op.gather(pick(op.dims(1), stack), 1)
    for d in stack:
        op.unify(op.dims(2)[-1], op.dims(1)[d])
    dims = _dot(op, numbers.dot_dimension_numbers, stack)
    added = len(op.out_shape()) - len(dims)
    return [op.fresh()[:added] + dims]


def _dot(op: Op, numbers: Any, stack: Sequence[int] = ()) -> Dims:
    contracted, batch = numbers
    left, right = op.dims(0), op.dims(1)
    for pair in (contracted, batch):
        op.unify_all(pick(left, pair[0]), pick(right, pair[1]))
    free = [without(left, contracted[0], batch[0]), without(right, contracted[1], batch[1], stack)]
    kept = pick(left, batch[0]) + free[0] + free[1]
    weight = _weight_of_batch(op)
    op.note("contract", pick(left, contracted[0]), op.out_nbytes(), kept=kept, weight=weight)
    for side in (0, 1):
        op.spread(side, free[1 - side])
        if op.operands[1 - side].has_data:
            op.use(side, "row", pick(op.dims(side), contracted[side]))
            op.use(side, "column", free[side])
            op.use(side, "batched", pick(op.dims(side), batch[side]))
    op.use(1, "batched", pick(right, stack))
    if op.operands[0].has_data and op.operands[1].has_data:
        shared = pick(left, batch[0])
        op.log.products.append(Product(shared, pick(left, contracted[0]), free[0] + free[1]))
    return kept


def _weight_of_batch(op: Op) -> int:
    """Return the bytes of a weight that multiplies data which no parameter comes before."""
    for side in (0, 1):
        weight, data = op.operands[side], op.operands[1 - side]
        if weight.params and data.has_data and not data.has_grad:
            return op.nbytes(side)
    return 0


def convolution(op: Op) -> list[Dims]:
    """Contract input channels within their group; windows need their neighbours."""
    if op.params["batch_group_count"] != 1:
        return unknown(op)
    numbers = op.params["dimension_numbers"]
    image, kernel = op.dims(0), op.dims(1)
    outputs, inputs, *window = numbers.rhs_spec
    batch, channels, *_ = numbers.lhs_spec
    groups = op.params["feature_group_count"]
    group = op.factors.dim(groups)
    within = op.factors.dim(op.shape(1)[outputs] // groups)
    op.unify(group + kernel[inputs], image[channels])
    op.unify(group + within, kernel[outputs])

    op.note("contract", [kernel[inputs]], op.out_nbytes(), kept=(kernel[outputs],))
    op.distinguish(pick(kernel, window), 1)
    op.spread(0, [within])
    op.spread(1, [image[batch]])
    op.use(1, "row", [kernel[inputs]])
    op.use(1, "column", [kernel[outputs]])
    op.log.channels += [image[channels], kernel[outputs]]

    dims = list(_windows(op))
    dims[numbers.out_spec[0]] = image[batch]
    dims[numbers.out_spec[1]] = kernel[outputs]
    return [tuple(dims)]


def _windows(op: Op) -> Dims:
    """Return new dims for the result, except spatial dims that a window of 1 does not change."""
    numbers, dims = op.params["dimension_numbers"], list(op.fresh())
    for k, source in enumerate(numbers.lhs_spec[2:]):
        target = numbers.out_spec[2 + k]
        one = op.shape(1)[numbers.rhs_spec[2 + k]] == 1 and op.params["window_strides"][k] == 1
        if one and op.shape()[source] == op.out_shape()[target]:
            dims[target] = op.dims()[source]
        else:
            op.gather([op.dims()[source]])
            op.make([dims[target]])
    return tuple(dims)


def fused_attention(op: Op) -> list[Dims]:
    """Attention as one kernel: batch and heads are independent, the other dims are needed whole."""
    query, key, value = (op.dims(i) for i in range(3))
    heads, length = (1, 2) if op.params["layout"] == HEADS_BEFORE_SEQUENCE else (2, 1)
    for other in (key, value):
        op.unify(other[0], query[0])
        op.unify(other[heads], query[heads])
    op.unify(key[length], value[length])
    op.unify(key[3], query[3])
    per_key = op.factors.dim(op.shape()[heads] // op.shape(1)[heads])
    op.unify(key[heads] + per_key, query[heads])
    op.gather([query[length], query[3], per_key])
    op.gather([key[length]], 1)
    op.gather([value[3]], 2)
    scores = (query[length], key[length], per_key)
    op.log.products.append(Product((query[0], key[heads]), (query[3],), scores))
    op.log.products.append(Product((query[0], key[heads]), (key[length],), (value[3],)))
    result = (*query[:3], value[3])
    statistics = (query[0], query[heads], query[length])
    _unify_bias(op, (*statistics, key[length]))
    fits = len(op.out_avals) > 1 and op.out_shape(1)[0] == op.shape()[0]
    return [result, *([statistics] if fits else [op.fresh(i) for i in range(1, len(op.out_avals))])]


def _unify_bias(op: Op, scores: Sequence[Dim]) -> None:
    bias = op.dims(3) if len(op.operands) > 3 else ()
    if len(bias) == len(scores):
        for bias_dim, dim in zip(bias, scores, strict=True):
            if bias_dim != NO_DIM:
                op.unify(bias_dim, dim)


RULES: Mapping[str, Rule] = {
    "dot_general": dot_general,
    "ragged_dot_general": ragged_dot,
    "conv_general_dilated": convolution,
    "dot_product_attention_fwd": fused_attention,
    "dot_product_attention_fwd_wrapper": fused_attention,
}
