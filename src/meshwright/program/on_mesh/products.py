"""Products, factors and lookups whose weight gradients are summed in float32, in one order.

cuDNN has no convolution of half-precision numbers with a float32 kernel gradient. Asked for one,
XLA widens both operands, which takes twice their memory, and multiplies at half the rate. So the
gradients of convolutions that are plain products are computed as products.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.program.evaluate.evaluator import Environment, Evaluator
from meshwright.program.evaluate.weight_uses import HALF
from meshwright.program.jaxpr.equations import PRODUCTS, Equation, Value, aval_of, bind
from meshwright.program.on_mesh.cells import in_cells
from meshwright.program.on_mesh.lookup_sums import LookupSums


def use_weight_by_rows(eqn: Equation, args: list[Any], weight: int, **options: Any) -> list[Any]:
    """Evaluate a product of activations with a weight, all dims but their features joined.

    Compilers choose transposed layouts for activations [B, T, D] around the gradients of weights,
    and write copies of them; rows [B·T, D] stay as they are. Convolutions of few channels are
    those of cells. See `use_weight` for the arguments.
    """
    lead = _row_dims(eqn, weight)
    if lead >= 2:
        other = args[1 - weight]
        flat = [other.reshape(-1, *other.shape[lead:]), args[1]]
        contracting, batch = eqn.params["dimension_numbers"]
        joined = list(contracting)
        joined[1 - weight] = tuple(d - lead + 1 for d in contracting[1 - weight])
        params = {**eqn.params, "dimension_numbers": (tuple(joined), batch)}
        (result,) = use_weight(_changed(eqn, params, flat), flat, weight, **options)
        return [result.reshape(*other.shape[:lead], *result.shape[1:])]
    convolves = eqn.primitive.name == "conv_general_dilated" and weight == 1
    cells = in_cells(eqn, *args) if convolves else None
    if cells is not None:
        params, args = cells
        eqn = _changed(eqn, params, args)
    return use_weight(eqn, args, weight, **options)


def _changed(eqn: Equation, params: dict[str, Any], args: Sequence[Value]) -> Equation:
    """Return an equation with other parameters, of arrays of these shapes."""
    structs = [
        jax.ShapeDtypeStruct(x.shape, aval_of(atom).dtype)
        for x, atom in zip(args, eqn.invars, strict=True)
    ]
    traced = jax.make_jaxpr(lambda *x: bind(eqn.replace(params=params), x))(*structs)
    return traced.jaxpr.eqns[0]


def _row_dims(eqn: Equation, weight: int) -> int:
    """Return how many leading dims of the activations only count rows; 0 if others are between."""
    if eqn.primitive.name != "dot_general" or weight != 1:
        return 0
    (contracting, _), (batch, _) = eqn.params["dimension_numbers"]
    rank = len(aval_of(eqn.invars[0]).shape)
    lead = rank - len(contracting)
    return 0 if batch or tuple(contracting) != tuple(range(lead, rank)) else lead


def use_weight(
    eqn: Equation,
    args: list[Any],
    weight: int,
    *,
    platform: str,
    casts: bool = True,
    sums: LookupSums | None = None,
) -> list[Any]:
    """Evaluate a product, factor or lookup; the gradient of its weight is summed in float32.

    A weight's gradient is a sum over all samples, and each device has a partial sum. By default,
    JAX would round these to the compute dtype before they are added. The weight, operand number
    ``weight``, may be float32 numbers; if ``casts``, they are read in the dtype the equation was
    traced with. ``sums`` is how the gradient of a lookup is summed.

    What a ``platform`` lacks is worked around. The CPU runtime has no products of half-precision
    numbers with float32 results: the operands of gradients are widened. GPUs have no such
    convolutions: the gradient of a kernel is rounded before it is widened, unless it is a product.
    """
    dtypes = [aval_of(atom).dtype for atom in eqn.invars]

    def forward_only(*operands: Any) -> Any:
        cast = [
            x if number != weight or not casts else x.astype(dtypes[number])
            for number, x in enumerate(operands)
        ]
        return bind(eqn, cast)[0]

    def of_weight(operands: Any, cotangent: Any) -> Any:
        gradient = partial(_weight_gradient, eqn, weight=weight, platform=platform)
        if sums is None:
            return gradient(operands, cotangent)
        return sums(gradient, operands, cotangent)

    run = jax.custom_vjp(forward_only)

    def forward(*operands: Any) -> tuple[Any, Any]:
        return forward_only(*operands), operands

    def backward(operands: Any, cotangent: Any) -> tuple[Any, ...]:
        return tuple(
            of_weight(operands, cotangent)
            if number == weight
            else _gradient(forward_only, operands, number, cotangent)
            for number in range(len(operands))
        )

    run.defvjp(forward, backward)
    return [run(*args)]


def _gradient(function: Any, operands: Any, number: int, cotangent: Any) -> Any:
    operand = operands[number]
    if not jnp.issubdtype(operand.dtype, jnp.inexact):
        return None

    def of_one(value: Any) -> Any:
        return function(*operands[:number], value, *operands[number + 1 :])

    return jax.linear_transpose(of_one, operand)(cotangent)[0]


def _weight_gradient(
    eqn: Equation, operands: Any, cotangent: Any, *, weight: int, platform: str
) -> Any:
    value, widen_first = operands[weight], platform == "cpu"
    is_product = eqn.primitive.name in PRODUCTS
    # The gradients of lookups and factors are plain sums, whose terms are widened. A product widens
    # while it adds.
    dtype = aval_of(eqn.invars[weight]).dtype if is_product else jnp.dtype(jnp.float32)
    cotangent = cotangent if is_product else cotangent.astype(dtype)
    others = [x.astype(dtype) if x.dtype in HALF else x for x in operands]

    direct = _in_order_of_weight(eqn, weight)
    if direct is not None:
        pair = (others[1 - weight], cotangent)
        wide = _wide_product(direct, pair, widen_first)
        return wide[0].astype(value.dtype)
    narrow = platform == "gpu" and eqn.primitive.name == "conv_general_dilated"
    product = product_gradient(eqn, others[0], cotangent) if narrow and weight == 1 else None
    if product is not None:
        return product.astype(value.dtype)

    def of_weight(array: Any) -> Any:
        return bind(eqn, [*others[:weight], array, *others[weight + 1 :]])[0]

    transposed = jax.linear_transpose(of_weight, jax.ShapeDtypeStruct(value.shape, dtype))
    if narrow:
        return transposed(cotangent)[0].astype(value.dtype)
    pullback = jax.make_jaxpr(lambda c: transposed(c)[0])(cotangent)
    (wide,) = Evaluator([partial(_wide_products, widen_first)]).run(pullback, [cotangent])
    return wide.astype(value.dtype)


def _in_order_of_weight(eqn: Equation, weight: int) -> Equation | None:
    """Return the product of other operand and cotangent that has the weight's own order of dims.

    JAX would compute some gradients in another order and transpose them. Reductions over devices
    come before the transposes, and cannot be merged with those of the weight's other gradients.
    """
    if eqn.primitive.name != "dot_general":
        return None
    contracting, batch = eqn.params["dimension_numbers"]
    ranks = [len(aval_of(atom).shape) for atom in eqn.invars]
    of_weight, of_other = contracting[weight], contracting[1 - weight]
    kept = [d for d in range(ranks[weight]) if d not in of_weight]
    order = [of_weight[of_other.index(d)] for d in sorted(of_other)] + kept
    if any(batch) or order != sorted(order):
        return None
    summed = tuple(d for d in range(ranks[1 - weight]) if d not in of_other)
    # The cotangent has the free dims of the left operand, then those of the right one.
    first = 0 if weight == 1 else len(kept)
    numbers = ((summed, tuple(range(first, first + len(summed)))), ((), ()))
    return eqn.replace(params={**eqn.params, "dimension_numbers": numbers, "out_sharding": None})


def _wide_products(widen_first: bool, eqn: Equation, env: Environment) -> list[Value] | None:
    """Evaluate products with float32 results."""
    if eqn.primitive.name not in PRODUCTS:
        return None
    return _wide_product(eqn, env.operands(eqn), widen_first)


def _wide_product(eqn: Equation, operands: Sequence[Value], widen_first: bool) -> list[Value]:
    if widen_first:
        operands = [x.astype(jnp.float32) for x in operands]
    params = {**eqn.params, "preferred_element_type": jnp.dtype(jnp.float32)}
    return bind(eqn.replace(params=params), list(operands))


def product_gradient(eqn: Equation, activations: Value, cotangent: Value) -> Value | None:
    """Return the kernel gradient of a convolution that is a product of each position's channels.

    Products of half-precision numbers are summed in float32.

    Args:
        eqn: the convolution.
        activations: what it reads.
        cotangent: of its result.

    Returns:
        The gradient in float32; None if the convolution is no such product, or if channels are
        not the last dim.
    """
    numbers, kernel = eqn.params["dimension_numbers"], aval_of(eqn.invars[1]).shape
    last = len(kernel) - 1
    outputs, inputs, *window = numbers.rhs_spec
    if not _is_product(eqn.params) or any(kernel[dim] != 1 for dim in window):
        return None
    if numbers.lhs_spec != numbers.out_spec or numbers.lhs_spec[:2] != (0, last):
        return None
    steps = dict(zip(numbers.lhs_spec[2:], eqn.params["window_strides"], strict=True))
    strides = [steps.get(dim, 1) for dim in range(last + 1)]
    if max(strides) > 1:
        activations = lax.slice(activations, [0] * (last + 1), activations.shape, strides)
    left, right = (
        x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) for x in (activations, cotangent)
    )
    if outputs < inputs:
        left, right = right, left
    product = lax.dot_general(
        left,
        right,
        (((0,), (0,)), ((), ())),
        precision=eqn.params["precision"],
        preferred_element_type=jnp.float32,
    )
    return product.reshape(kernel)


def _is_product(params: dict[str, Any]) -> bool:
    padded = any(side != 0 for sides in params["padding"] for side in sides)
    dilated = any(step != 1 for step in params["lhs_dilation"])
    grouped = max(params["feature_group_count"], params["batch_group_count"]) > 1
    return not (padded or dilated or grouped)
