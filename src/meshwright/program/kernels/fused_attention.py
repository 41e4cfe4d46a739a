"""Attention: the kernels for GPUs, and forms for any device that save no scores."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn import dot_product_attention
from jax.sharding import PartitionSpec

from meshwright.errors import first_line
from meshwright.mesh.axes import CONTEXT
from meshwright.program.evaluate.evaluator import Environment, Evaluator, constrain
from meshwright.program.evaluate.mesh_view import MeshView, run_locally
from meshwright.program.evaluate.weight_uses import HALF
from meshwright.program.jaxpr.equations import Equation, Value, aval_of, bind
from meshwright.program.kernels.attention_by_rows import rows_attention
from meshwright.program.kernels.attention_operands import AttentionOperands
from meshwright.program.kernels.context_attention import AttentionLayouts
from meshwright.program.kernels.joined_attention import (
    NEVER,
    Attend,
    AttentionPart,
    SharedRows,
    differentiable,
)
from meshwright.program.kernels.masks import HIDDEN, Allowed, band
from meshwright.program.kernels.regions import NotReplaced, Region
from meshwright.program.kernels.score_functions import Block, ScoreFunction


@dataclass(frozen=True)
class AttentionKernel:
    """Evaluates attention by a kernel for query, key and value.

    Attributes:
        name: ``cudnn``, ``pallas`` or ``xla``.
        operands: what it reads.
        layouts: how its inputs and its result are sharded over the mesh; None where they are not.
        exchange: how positions are exchanged over the context axis; None if they are not.
        planned: whether it is only traced, for a plan on devices that are not present.
    """

    name: str
    operands: AttentionOperands
    layouts: tuple[PartitionSpec | None, ...]
    exchange: AttentionLayouts | None = None
    planned: bool = False

    def __call__(self, region: Region, env: Environment, mesh: MeshView) -> list[Value]:
        """Return the result of the second product."""
        form = self.name if env.evaluator.weights.casts else "xla"
        inputs = [env.read(variable) for variable in region.inputs]
        exchange = self.exchange
        if exchange is not None and exchange.shared is not None:
            result = self._by_chunks(inputs, form, mesh, exchange, exchange.shared)
        else:
            planned = self.planned and form != "xla"
            attend = make_attend(self.operands, "planned" if planned else form)
            own = exchange is not None and CONTEXT in exchange.rows and not exchange.by_heads
            run = partial(run_attention, self.operands, attend, own_rows=own)
            layouts, copies = list(self.layouts[:-1]), set[int]()
            for number, variable in enumerate(region.inputs):
                if (rows := env.rows(variable)) is not None:
                    dtype, before = aval_of(variable).dtype, layouts[number] or ()
                    inputs[number] = env.evaluator.weights.cast(rows.value, dtype)
                    layouts[number] = PartitionSpec(rows.axes, *before)
                    copies.add(number)

            def on_device(*arrays: Any) -> Any:
                return run(*(x[0] if n in copies else x for n, x in enumerate(arrays)))

            result = run_locally(on_device, inputs, layouts, self.layouts[-1], mesh)
        return [result if exchange is None else constrain(result, mesh.sharding(exchange.rows))]

    def _by_chunks(
        self,
        inputs: Sequence[Any],
        form: str,
        mesh: MeshView,
        exchange: AttentionLayouts,
        shared: SharedRows,
    ) -> Any:
        """Attend to chunks of keys; a row is filled up behind, with positions that none sees."""
        attend = shared.attention(partial(part_of, self.operands, form), exchange.repeated[0][1])
        rows = shared.size * shared.own
        run = partial(run_attention, self.operands, attend, rows=rows)
        *dims, of_result = self.operands.positions
        if more := rows - exchange.length:
            inputs = [padded(x, own, more) for x, own in zip(inputs, dims, strict=True)]
        layouts = [self.layouts[0], *exchange.own_keys, *self.layouts[3:]]
        result = run_locally(run, inputs, layouts[:-1], layouts[-1], mesh)
        return jax.lax.slice_in_dim(result, 0, exchange.length, axis=of_result[0])


def padded(array: Any, dims: Sequence[int], more: int) -> Any:
    """Return an array with so many zeros behind its entries, along some dims."""
    return jnp.pad(array, [(0, more if d in dims else 0) for d in range(array.ndim)])


def make_attend(operands: AttentionOperands, form: str) -> Attend:
    """Return attention in one of its forms."""
    function, allowed = operands.function, operands.allowed
    if function is not None and form != "planned":
        return (rows_attention if form == "xla" else _by_blocks())(function, allowed)
    forms = {"cudnn": cudnn_attention, "planned": planned_attention, "xla": xla_attention}
    return forms[form](allowed, operands.scale)


def run_attention(
    operands: AttentionOperands,
    attend: Attend,
    *arrays: Any,
    own_rows: bool = False,
    rows: int | None = None,
) -> Any:
    """Evaluate attention on arrays with the dims of the program.

    With ``own_rows``, queries are those of this device's positions, and keys those of all; with
    ``rows``, both are its own, and what scores depend on are rows of so many positions.
    """
    query, key, value = arrays[:3]
    count = operands.num_batch
    query = jnp.transpose(query, operands.query_dims)
    shape = query.shape
    head = 1 if count > 1 else 0
    batch, heads, length = shape[: count - head], shape[count - head : count], shape[count]
    groups = shape[count + 1 : -1]
    # (batch…, heads, length, groups…, channels) → (batch…, length, heads, groups…, channels)
    query = jnp.moveaxis(query, count, count - head)
    query = query.reshape(math.prod(batch), length, math.prod(heads + groups), shape[-1])

    def of_keys(array: Any, dims: tuple[int, ...]) -> Any:
        array = jnp.moveaxis(jnp.transpose(array, dims), count, count - head)
        return array.reshape(math.prod(batch), -1, math.prod(heads), array.shape[-1])

    key, value = of_keys(key, operands.key_dims), of_keys(value, operands.value_dims)
    mask: Any = None
    first = jax.lax.axis_index(CONTEXT) * length if own_rows else 0
    whole = (*batch, *heads, rows or length, *groups, rows or key.shape[1])
    read = zip(arrays[3:], (dims for _, dims in operands.leaves), strict=True)
    leaves = [_broadcastable(array, dims, whole, count) for array, dims in read]
    if operands.function is not None:
        mask = leaves
    elif leaves:
        mask = jnp.broadcast_to(leaves[0], (query.shape[0], 1, length, key.shape[1]))
        mask &= band(operands.allowed, mask.shape[-2:], first)
    elif own_rows and (operands.allowed.causal or operands.allowed.window is not None):
        mask = band(operands.allowed, (length, key.shape[1]), first)[None, None]
    out = attend(query, key, value, mask)
    out = out.reshape(*batch, length, *heads, *groups, out.shape[-1])
    return jnp.transpose(jnp.moveaxis(out, count - head, count), operands.output_dims)


def _broadcastable(
    array: Any, dims: tuple[int | None, ...], whole: tuple[int, ...], count: int
) -> Any:
    """Return what scores are computed from as [B or 1, H or 1, T or 1, S or 1].

    Args:
        array: a mask, a bias or the like.
        dims: for each of its dims the one of ``whole`` that it is; None if it has size 1.
        whole: the sizes of (batch…, heads, length, group…, keys).
        count: how many dims of these are before the length.
    """
    head, last = (count - 1 if count > 1 else count), len(whole) - 1
    parts = [range(head), (*range(head, count), *range(count + 1, last)), (count,), (last,)]
    order, place = [n for part in parts for n in part], {at: d for d, at in enumerate(dims)}
    ones = [d for d, at in enumerate(dims) if at is None]
    array = jnp.transpose(array, [*(place[n] for n in order if n in place), *ones])
    array = array.reshape([whole[n] if n in place else 1 for n in order])
    # Dims that are joined are there as a whole or not at all.
    some = {n for part in parts if place.keys() & set(part) for n in part}
    array = jnp.broadcast_to(array, [whole[n] if n in some else 1 for n in order])
    return array.reshape([math.prod(whole[n] for n in part if n in some) for part in parts])


def cudnn_attention(allowed: Allowed, scale: float) -> Attend:
    """Return attention by cuDNN."""
    # How many keys before and after a query it attends to.
    window = None if allowed.window is None else (allowed.window - 1, 0)

    def attend(query: Any, key: Any, value: Any, mask: Any) -> Any:
        length, keys = query.shape[1], key.shape[1]
        # Rows of odd length have no kernel, so they are filled up behind, where a causal query
        # does not look.
        query, key, value = (_even(x, 1) for x in (query, key, value))
        hides = mask is not None or (allowed.causal and length <= keys)
        filled = keys % 2 == 1 and not hides
        out = dot_product_attention(
            query,
            key,
            value,
            mask=None if mask is None else _even(_even(mask, 2), 3),
            key_value_seq_lengths=jnp.full(len(key), keys, jnp.int32) if filled else None,
            scale=scale,
            is_causal=allowed.causal and mask is None,
            local_window_size=window if mask is None else None,
            implementation="cudnn",
        )
        return out[:, :length]

    return attend


def _even(array: Any, dim: int) -> Any:
    """Return an array with an even number of entries along a dim."""
    return padded(array, (dim,), 1) if array.shape[dim] % 2 else array


PLANNED = "planned_attention"
"""How the calls of planned attention are named; what follows is the part of the scores that is
computed, in thousandths."""
PLANNED_GRADIENT = "planned_gradient_of_attention"


def planned_attention(allowed: Allowed, scale: float) -> Attend:
    """Return attention as one call for each pass, which reads, saves and writes what cuDNN does.

    It is traced for plans, on machines without cuDNN.
    """
    del scale

    def call(name: str, run: Callable[..., Any], query: Any, key: Any, *others: Any) -> Any:
        run.__name__ = f"{name}_{round(1000 * allowed.part(query.shape[1], key.shape[1]))}"
        return jax.jit(run)(query, key, *others)

    def attended(query: Any, key: Any, value: Any, mask: Any) -> Any:
        def run(query: Any, key: Any, value: Any, mask: Any) -> Any:
            del mask
            heads = (*query.shape[:2], key.shape[2], -1, query.shape[3])
            scores = jnp.einsum("btkgc,bskc->bkgts", query.reshape(heads), key)
            mixed = jnp.einsum("bkgts,bskc->btkgc", scores, value).reshape(query.shape)
            sums = scores.sum(-1).reshape(query.shape[0], query.shape[2], query.shape[1])
            return mixed, sums.astype(jnp.float32)

        return call(PLANNED, run, query, key, value, mask)

    def gradients(query: Any, key: Any, value: Any, *others: Any) -> Any:
        def run(query: Any, key: Any, value: Any, *others: Any) -> Any:
            del others
            return query, key, value

        return call(PLANNED_GRADIENT, run, query, key, value, *others)

    return differentiable(AttentionPart(attended, gradients))


def check_cudnn(operands: AttentionOperands, platform: str, *, planned: bool = False) -> None:
    """Raise if cuDNN has no kernel for these operands; ``planned`` asks no installed release."""
    if platform != "gpu":
        raise NotReplaced("it needs a GPU")
    query, value = aval_of(operands.query), aval_of(operands.value)
    if query.dtype not in HALF:
        raise NotReplaced(f"it needs bf16 or fp16, not {query.dtype}")
    channels = query.shape[operands.query_dims[-1]]
    if channels != value.shape[operands.value_dims[-1]]:
        raise NotReplaced("keys and values have different numbers of channels")
    if channels % 8 or channels > 256:
        raise NotReplaced(
            f"it needs heads of at most 256 channels, a multiple of 8, not {channels}"
        )
    length, keys = _lengths(operands)
    form = operands.allowed, operands.scale, bool(operands.leaves)
    if not planned and (refusal := _refusal(length, keys, channels, query.dtype, *form)):
        raise NotReplaced(f"cuDNN has no kernel for it: {refusal}")


PAYS_FROM, BLOCK, CHANNELS = 1024, 128, (64, 128)
"""For which rows and heads attention by blocks was measured: it takes half the time.

Else rows attend one part after the other, if most of their keys are hidden.
"""


HIDES_MOST = 0.6
"""The share of pairs of queries and keys up to which it pays to leave out what is hidden."""


def check_kernel(operands: AttentionOperands, platform: str, *, planned: bool = False) -> str:
    """Return the kernel for attention on a platform; raise if there is none that pays."""
    if operands.function is None or platform != "gpu":
        check_cudnn(operands, platform, planned=planned)
        return "cudnn"
    query, value = aval_of(operands.query), aval_of(operands.value)
    channels, (length, keys) = query.shape[operands.query_dims[-1]], _lengths(operands)
    same = channels in CHANNELS and channels == value.shape[operands.value_dims[-1]]
    even = length % BLOCK == keys % BLOCK == 0
    if min(length, keys) < PAYS_FROM:
        needs = f"rows of {PAYS_FROM:,} positions or more, not {length:,}"
    elif query.dtype == jnp.bfloat16 and same and even and not operands.function.learned:
        _by_blocks()
        return "pallas"
    elif pays_in_parts(operands):
        return "xla"
    else:
        needs = "bf16, 64 or 128 channels, a multiple of 128 positions, and no learned values"
    raise NotReplaced(f"{operands.function.why}, for which a kernel needs {needs}")


def pays_in_parts(operands: AttentionOperands) -> bool:
    """Whether rows are long enough, and enough of their keys hidden, to attend in parts."""
    length, keys = _lengths(operands)
    return min(length, keys) >= PAYS_FROM and operands.allowed.part(length, keys) <= HIDES_MOST


def _lengths(operands: AttentionOperands) -> tuple[int, int]:
    """Return the numbers of queries and keys of a row."""
    query, key = aval_of(operands.query).shape, aval_of(operands.key).shape
    return query[operands.query_dims[operands.num_batch]], key[operands.key_dims[-2]]


def _by_blocks() -> Callable[..., Attend]:
    """Return what makes attention by blocks; raise if JAX has no Triton any more."""
    try:
        # Pallas takes half a second to import.
        from meshwright.program.kernels.block_attention import block_attention
    except (ImportError, AttributeError) as error:
        raise NotReplaced(f"JAX {jax.__version__} has no Triton: {first_line(error)}") from None
    return block_attention


@lru_cache
def _refusal(
    length: int,
    keys: int,
    channels: int,
    dtype: Any,
    allowed: Allowed,
    scale: float,
    has_mask: bool,
) -> str:
    """Return why JAX refuses an attention and its gradient; once for all blocks of a model."""
    query = jax.ShapeDtypeStruct((1, length, 1, channels), dtype)
    key = jax.ShapeDtypeStruct((1, keys, 1, channels), dtype)
    mask = jax.ShapeDtypeStruct((1, 1, length, keys), bool) if has_mask else None
    attend = cudnn_attention(allowed, scale)

    def total(query: Any, key: Any, value: Any, mask: Any) -> Any:
        return attend(query, key, value, mask).astype(jnp.float32).sum()

    try:
        jax.eval_shape(jax.grad(total, argnums=(0, 1, 2)), query, key, key, mask)
    except (NotImplementedError, ValueError, RuntimeError) as error:
        return first_line(error)
    return ""


def part_of(operands: AttentionOperands, form: str, allowed: Allowed) -> AttentionPart:
    """Return attention to some of the keys in one of its forms."""
    function, scale = operands.function, operands.scale
    edge = allowed.causal or operands.allowed.window is not None
    if form != "cudnn":
        return xla_part(allowed, scale, function and partial(_scores, function, edge))
    part = cudnn_part(allowed, scale)
    if function is None:
        return part

    def masked(run: Callable[..., Any], query: Any, key: Any, value: Any, *rest: Any) -> Any:
        shape = query.shape[0], 1, query.shape[1], key.shape[1]
        mask = _scores(function, edge, jnp.zeros(shape), *rest[0]) > HIDDEN
        return run(query, key, value, mask, *rest[1:])

    return AttentionPart(partial(masked, part.forward), partial(masked, part.gradients))


def _scores(function: ScoreFunction, edge: bool, products: Any, leaves: Any, at: Any) -> Any:
    """Return the scores of a block, at the edge of what is allowed or inside of it."""
    return function(Block(products, leaves, at, edge))


def xla_part(
    allowed: Allowed, scale: float, function: Callable[..., Any] | None = None
) -> AttentionPart:
    """Return attention that saves no scores: its gradient computes them again."""

    def grouped(array: Any, key: Any) -> Any:
        return array.reshape(*array.shape[:2], key.shape[2], -1, array.shape[3])

    def scored(products: Any, seen: Any) -> Any:
        if function is not None:
            by_head = products.reshape(len(products), -1, *products.shape[-2:])
            return jnp.maximum(function(by_head, *seen), NEVER).reshape(products.shape)
        visible = band(allowed, products.shape[-2:]) if seen is None else seen[:, None]
        return jnp.where(visible, products * scale, NEVER)

    def exponents(query: Any, key: Any, seen: Any) -> Any:
        wide = jnp.promote_types(query.dtype, jnp.float32)
        products = jnp.einsum("btkgc,bskc->bkgts", query, key, preferred_element_type=wide)
        return jax.vjp(partial(scored, seen=seen), products)

    def forward(query: Any, key: Any, value: Any, mask: Any) -> Any:
        scores, _ = exponents(grouped(query, key), key, mask)
        peak = scores.max(-1, keepdims=True)
        exponentials = jnp.exp(scores - peak)
        total = exponentials.sum(-1, keepdims=True)
        weights = (exponentials / total).astype(value.dtype)
        mixed = jnp.einsum("bkgts,bskc->btkgc", weights, value)
        total = (peak + jnp.log(total)).reshape(query.shape[0], query.shape[2], query.shape[1])
        return mixed.reshape(*query.shape[:3], -1), total

    def gradients(query: Any, key: Any, value: Any, mask: Any, *rest: Any) -> Any:
        of_query, (out, total, cotangent) = grouped(query, key), rest
        of_out = grouped(cotangent, key)
        product = partial(jnp.einsum, preferred_element_type=total.dtype)
        scores, pull = exponents(of_query, key, mask)
        weights = jnp.exp(scores - total.reshape(*scores.shape[:-1], 1))
        of_value = product("bkgts,btkgc->bskc", weights.astype(value.dtype), of_out)
        of_weights = product("btkgc,bskc->bkgts", of_out, value)
        mean = product("btkgc,btkgc->bkgt", of_out, grouped(out, key))[..., None]
        (of_scores,) = pull(weights * (of_weights - mean))
        of_scores = of_scores.astype(query.dtype)
        gradient = product("bkgts,bskc->btkgc", of_scores, key).reshape(query.shape)
        return gradient, product("bkgts,btkgc->bskc", of_scores, of_query), of_value

    return AttentionPart(forward, gradients)


def cudnn_part(allowed: Allowed, scale: float) -> AttentionPart:
    """Return attention by cuDNN, whose calls are read from how JAX differentiates it."""
    attend = cudnn_attention(allowed, scale)

    def evaluate(run: Callable[..., Any], mask: Any, *arrays: Any, given: Any = None) -> Any:
        results = [] if given is None else list(given)

        def replace(eqn: Equation, env: Environment) -> list[Value] | None:
            if not eqn.primitive.name.startswith("dot_product_attention_fwd"):
                return None
            results[:] = results or bind(eqn, env.operands(eqn))
            return results

        def with_gradients(mask: Any, *arrays: Any) -> Any:
            return run(*jax.vjp(lambda *qkv: attend(*qkv, mask), *arrays[:3]), *arrays[3:])

        program = jax.make_jaxpr(with_gradients)(mask, *arrays)
        found = Evaluator([replace]).run(program, jax.tree.leaves((mask, *arrays)))
        return results if given is None else found

    def forward(query: Any, key: Any, value: Any, mask: Any) -> Any:
        return evaluate(lambda out, _: out, mask, query, key, value)

    def gradients(query: Any, key: Any, value: Any, mask: Any, *rest: Any) -> Any:
        pull = lambda _, pullback, cotangent: pullback(cotangent)  # noqa: E731
        return evaluate(pull, mask, query, key, value, rest[-1], given=rest[:-1])

    return AttentionPart(forward, gradients)


def xla_attention(allowed: Allowed, scale: float) -> Attend:
    """Return attention that saves queries, keys, values and its result, and no scores."""
    return differentiable(xla_part(allowed, scale))
