"""Memory that a device did not have, as CPUs, GPUs and TPUs word it, and the largest buffers."""

import jax
import jax.numpy as jnp
import pytest

from meshwright.compiled.memory import find_shortage, largest_buffers, read_shortage

GIB = 2**30

MESSAGES = {
    "RESOURCE_EXHAUSTED: Out of memory allocating 35184372088832 bytes.": (2**45, None, None),
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes.\n"
    "BufferAssignment OOM Debugging.": (64 * GIB, None, None),
    "RESOURCE_EXHAUSTED: Failed to allocate request for 32.00MiB (33554432B) on device ordinal 3": (
        32 * 2**20,
        None,
        3,
    ),
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2.50GiB with allocator GPU_1_bfc": (
        int(2.5 * GIB),
        None,
        1,
    ),
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.00G of 15.48G hbm. "
    "Exceeded hbm capacity by 4.52G.": (20 * GIB, int(15.48 * GIB), None),
}


@pytest.mark.parametrize("text", MESSAGES)
def test_messages_of_every_platform_are_read(text):
    found = find_shortage(jax.errors.JaxRuntimeError(text))
    assert found == read_shortage(text)
    assert (found.asked, found.limit, found.device) == MESSAGES[text]


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("INTERNAL: cuDNN failed to find an engine"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Received message larger than max"),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes."),
    ],
)
def test_other_failures_are_not_about_memory(error):
    assert find_shortage(error) is None


def test_an_allocation_that_jax_refuses_is_found_behind_other_exceptions():
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        jax.jit(lambda: jnp.zeros(2**45, jnp.uint8))().block_until_ready()
    outer = RuntimeError("while something")
    outer.__cause__ = raised.value
    found = find_shortage(outer)
    assert found is not None
    assert found.asked == 2**45


def test_the_largest_values_of_a_program_with_their_modules():
    def loss(x):
        with jax.named_scope("~blocks.3.wide"):
            wide = jnp.sort(jnp.tile(x, (1, 64)), axis=1)

        def halve(carry, row):
            with jax.named_scope("~loop"):
                return carry + jnp.cumsum(jnp.sort(row)), None

        total, _ = jax.lax.scan(halve, jnp.zeros(64 * 16), wide)
        return total @ wide.T

    text = jax.jit(loss).lower(jnp.ones((32, 16))).compile().as_text()
    found = largest_buffers(text, most=8)
    assert (found[0].bytes, found[0].module) == (32 * 16 * 64 * 4, "blocks.*.wide")
    assert "f32[32,1024]" in {buffer.shape for buffer in found if buffer.module}
    # The values of a loop have a buffer each, however often it runs.
    assert 64 * 16 * 4 in {buffer.bytes for buffer in largest_buffers(text, 99)}
    assert str(found[0]).endswith("in `blocks.*.wide`")
