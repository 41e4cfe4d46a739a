"""Attention to chunks of keys: the numbers of one device, equal work, and cuDNN's calls on GPUs."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from meshwright.program.kernels.fused_attention import cudnn_part, xla_attention, xla_part
from meshwright.program.kernels.joined_attention import SharedRows
from meshwright.program.kernels.masks import Allowed
from meshwright.runtime.jax_internals import attention_on

SCALE = 0.3


def on_devices(rows, part, group=1):
    """Return attention of sharded queries, keys and values."""
    kind = (AxisType.Auto,)
    mesh = jax.make_mesh((rows.size,), ("context",), axis_types=kind, devices=jax.devices()[:4])
    spec = PartitionSpec(None, "context")
    attend = rows.attention(functools.partial(part, scale=SCALE), group)

    def run(query, *keys):
        return attend(query, *(jnp.repeat(array, group, axis=2) for array in keys), None)

    return jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def with_gradients(attend, *arrays):
    def total(*arrays):
        out = attend(*arrays)
        return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(*arrays)


@pytest.mark.parametrize(
    ("window", "group"), [pytest.param(None, 2, marks=pytest.mark.full), (6, 1)]
)
def test_joined_attention_has_the_numbers_of_one_device(window, group):
    draw = np.random.default_rng(0).normal
    query, key, value = (draw(size=(2, 32, heads, 4)) for heads in (4, 2, 2))
    rows = SharedRows(4, 8, window)
    with jax.enable_x64(True):
        alone = xla_attention(Allowed(0, window), SCALE)
        expected = with_gradients(lambda *arrays: alone(*arrays, None), query, key, value)
        found = with_gradients(on_devices(rows, xla_part, group), query, key, value)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-13)
        jax.tree.map(close, found, expected)


@pytest.mark.parametrize("window", [None, 200])
def test_all_devices_have_equal_work_and_gpus_run_it_by_cudnn(window):
    rows = SharedRows(4, 256, window)
    attend = on_devices(rows, cudnn_part)
    shapes = [jax.ShapeDtypeStruct((1, 1024, heads, 64), jnp.bfloat16) for heads in (4, 1, 1)]
    with attention_on("9.0", (9, 10)):
        run = jax.jit(lambda *arrays: jax.vjp(attend, *arrays)[1](arrays[0]))
        traced = run.trace(*shapes)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # Loops of a length that depends on the device would be `while`, and branches `cond`.
    program = str(traced.jaxpr)
    assert not re.findall(r"\b(while|cond)\[", program)
    loops = [int(n) for n in re.findall(r"\blength=(\d+)", program)]
    calls = collections.Counter(re.findall(r"@__cudnn\$(\w+)", text))
    assert "dot_general" not in text
    # No mask or score is larger than a chunk of queries by a chunk of keys.
    assert max(int(a) * int(b) for a, b in re.findall(r"(\d+)x(\d+)xi1>", text)) <= rows.chunk**2
    if window is None:
        # Two own chunks, and seven before them, on each of four devices: half of the 8 × 8.
        assert loops == [2 * rows.size - 1] * 2
        assert calls == {"fmhaSoftmax": 3, "fmhaSoftmaxBackward": 3}
    else:
        assert (loops, rows.chunk, rows.halo) == ([], 128, 256)
        assert calls["fmhaScaleBiasSoftmax"] == calls["fmhaScaleBiasSoftmaxBackward"] == 2
