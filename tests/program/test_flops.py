"""Counted operations against closed forms and against what XLA counts."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshwright.models.gpt import GPT
from meshwright.program.blocks.to_scan import roll_program
from meshwright.program.flops import count_flops, forward_flops, peak_flops
from meshwright.program.trace.model_leaves import split_model
from meshwright.program.trace.traced_loss import trace_loss


def flops(function, *shapes) -> int:
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return forward_flops(jax.make_jaxpr(function)(*structs).jaxpr)


def counted_by_xla(function, *shapes) -> float:
    structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    analysis = jax.jit(function).lower(*structs).compile().cost_analysis()
    return analysis["flops"]


def test_a_product_is_two_operations_per_pair_of_elements():
    assert flops(jnp.dot, (3, 5), (5, 7)) == 2 * 3 * 5 * 7
    assert flops(lambda a, b: jnp.einsum("bij,bkj->bik", a, b), (2, 3, 5), (2, 7, 5)) == 420


def test_loops_branches_and_calls_are_entered():
    def body(carry, _):
        return jnp.tanh(carry @ carry), None

    assert flops(lambda x: jax.lax.scan(body, x, length=6)[0], (4, 4)) == 6 * 2 * 4**3
    branches = [lambda x: x, lambda x: x @ x, lambda x: x @ x @ x]
    assert flops(lambda x: jax.lax.switch(1, branches, x), (4, 4)) == 2 * 2 * 4**3
    assert flops(jax.jit(jax.checkpoint(lambda x: x @ x)), (4, 4)) == 2 * 4**3
    square = jax.custom_jvp(lambda x: x @ x)
    square.defjvp(lambda primals, tangents: (primals[0] @ primals[0], tangents[0]))
    assert flops(square, (4, 4)) == 2 * 4**3


CONVOLUTIONS = {
    "plain": {"padding": "VALID"},
    "padded": {"padding": "SAME"},
    "strided": {"padding": [(2, 1), (0, 3)], "window_strides": (2, 3)},
    "dilated": {"padding": "VALID", "rhs_dilation": (2, 1)},
    "transposed": {"padding": [(2, 2), (2, 2)], "lhs_dilation": (2, 2)},
    "grouped": {"padding": "SAME", "feature_group_count": 2},
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions_count_as_xla_counts_them(kind):
    settings = {"window_strides": (1, 1), **CONVOLUTIONS[kind]}
    kernel = (3, 3, 4 // settings.get("feature_group_count", 1), 6)

    def convolve(image, weights):
        return jax.lax.conv_general_dilated(
            image, weights, dimension_numbers=("NHWC", "HWIO", "NHWC"), **settings
        )

    shapes = ((2, 9, 8, 4), kernel)
    if kind == "plain":
        assert flops(convolve, *shapes) == 2 * (2 * 7 * 6 * 6) * (3 * 3 * 4)
    assert flops(convolve, *shapes) == counted_by_xla(convolve, *shapes)


def test_ragged_products_meet_one_matrix_per_row():
    sizes = jnp.array([2, 3, 1])
    shapes = ((6, 5), (3, 5, 7))
    assert flops(lambda x, w: jax.lax.ragged_dot(x, w, sizes), *shapes) == 2 * 6 * 5 * 7


def test_a_fused_attention_is_two_products():
    value = SimpleNamespace(aval=jax.ShapeDtypeStruct((2, 8, 4, 16), jnp.bfloat16))
    primitive = SimpleNamespace(name="dot_product_attention_fwd_wrapper")
    fused = SimpleNamespace(primitive=primitive, invars=[value, value, value], params={})
    assert forward_flops(SimpleNamespace(eqns=[fused])) == 2 * (2 * 2 * 4 * 8 * 8 * 16)


def test_a_network_without_loops_counts_as_xla_counts_its_products():
    def network(x, a, b):
        return ((x @ a) @ b).sum()

    shapes = ((16, 32), (32, 64), (64, 8))
    whole = counted_by_xla(network, *shapes)
    # XLA also counts the additions of the sum.
    assert flops(network, *shapes) == whole - (16 * 8 - 1)


def gpt_loss(batch: int, length: int, **settings):
    model = nnx.eval_shape(lambda: GPT(rngs=nnx.Rngs(0), **settings))
    model_leaves = split_model(model, nnx.Param)
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return model_leaves, trace_loss(lambda m, b: m(b).mean(), model_leaves, tokens)


def test_a_gpt_needs_six_operations_per_weight_and_token_plus_attention():
    hidden, blocks, vocabulary, batch, length = 32, 3, 64, 4, 16
    model_leaves, traced = gpt_loss(
        batch,
        length,
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_blocks=blocks,
        num_heads=4,
        context_length=length,
        dropout=0.0,
    )
    kernels = [
        leaf for leaf in model_leaves.leaves if len(leaf.shape) > 1 and "blocks" in leaf.path
    ]
    weights = sum(int(np.prod(leaf.shape)) for leaf in kernels) + vocabulary * hidden
    tokens = batch * length
    attention = blocks * 12 * tokens * length * hidden
    assert count_flops(traced) == 6 * weights * tokens + attention
    assert count_flops(roll_program(traced).traced) == count_flops(traced)


def device(kind: str):
    return SimpleNamespace(device_kind=kind, process_index=0, slice_index=None)


def test_peaks_are_those_of_all_devices_in_the_format_used():
    h100 = [device("NVIDIA H100 80GB HBM3")] * 4
    assert peak_flops(h100, "bf16") == pytest.approx(4 * 989e12, rel=1e-3)
    assert peak_flops(h100, "no") == peak_flops(h100, "bf16") / 2
    v5e = [device("TPU v5 lite")] * 2
    assert peak_flops(v5e, "no") == peak_flops(v5e, "bf16") == pytest.approx(2 * 197e12)


def test_cpus_and_unknown_devices_have_no_peak():
    assert peak_flops(jax.devices(), "no") is None
    assert peak_flops([device("A chip of tomorrow")], "bf16") is None
