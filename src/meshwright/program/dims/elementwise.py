"""Rules for operations that treat every element alike."""

from collections.abc import Mapping

from meshwright.program.dims.factors import NO_DIM, Dim, Dims
from meshwright.program.dims.op import Op, Rule, primitives
from meshwright.program.jaxpr.equations import WITHOUT_RESULT

ELEMENTWISE = primitives(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
    clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf
    erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow
    is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi ne neg nextafter
    not one_minus_square or philox2x32 philox4x32 polygamma polynomial population_count pow
    random_gamma_grad real reduce_precision regularized_incomplete_beta rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient
    sub tan tanh threefry2x32 threefry4x32 xor zeta layout_constraint mesh_cast name
    reshard sharding_constraint random_fold_in random_clone random_seed tie
    xla_metadata_value pvary pcast to_edtype from_edtype
    """
)

POSITIONAL = primitives(
    """
    device_put optimization_barrier pbroadcast pmax pmin ppermute preduced psum psum_invariant
    shard_alike unreduced_psum
    """
)
"""Operations of which each result has the dims of the operand in its position."""

SAME_NUMBERS = primitives(
    """
    convert_element_type copy copy_p device_put layout_constraint mesh_cast name
    optimization_barrier reduce_precision reshape reshard sharding_constraint squeeze transpose
    """
)
"""Operations whose result is the operand (in the same position), cast or rearranged."""

FROM_NOTHING = primitives(
    """
    axis_index create_token empty empty2 iota random_bits random_gamma random_split random_unwrap
    random_wrap rng_bit_generator rng_uniform
    """
)
"""Operations that create values: only the leading dims of a key array are passed on."""


def elementwise(op: Op) -> list[Dims]:
    """Merge the dims position by position; dims of size 1 and scalars are broadcast."""
    shape = op.out_shape()
    dims = tuple(_merge(op, position, size) for position, size in enumerate(shape))
    for operand in range(len(op.operands)):
        padded = op.shape(operand) or (1,) * len(shape)
        op.spread(operand, (dims[i] for i, size in enumerate(padded) if size == 1))
    return [dims] * len(op.out_avals)


def _merge(op: Op, position: int, size: int) -> Dim:
    """Unify one dim of all operands that are not broadcast along it."""
    merged = NO_DIM
    for operand, value in enumerate(op.operands):
        shape = op.shape(operand)
        if shape and shape[position] == size:
            if merged:
                op.unify(merged, value.dims[position])
            merged = merged or value.dims[position]
    return merged


def positional(op: Op) -> list[Dims]:
    """Pass every operand's dims on to the result in the same position."""
    return [value.dims for value in op.operands]


def from_nothing(op: Op) -> list[Dims]:
    """Make new dims, except for the leading ones an array of keys shares with the result."""
    return [_like_keys(op, result) for result in range(len(op.out_avals))]


def _like_keys(op: Op, result: int) -> Dims:
    dims, shape = list(op.fresh(result)), op.out_shape(result)
    keys = op.shape() if op.operands else ()
    for position, (num_keys, size) in enumerate(zip(keys, shape, strict=False)):
        if num_keys == size:
            dims[position] = op.dims()[position]
    return tuple(dims)


def bitcast(op: Op) -> list[Dims]:
    """Keep the dims; a change of width adds or drops the last one."""
    dims, fresh = op.dims(), op.fresh()
    return [dims[: len(fresh)] + fresh[len(dims) :]]


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(POSITIONAL, positional),
    **dict.fromkeys(FROM_NOTHING, from_nothing),
    **dict.fromkeys(WITHOUT_RESULT, from_nothing),
    "bitcast_convert_type": bitcast,
}
