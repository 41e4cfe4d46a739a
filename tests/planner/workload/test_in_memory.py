"""Arrays in memory at the same time, and where they fit: small cases counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.planner.workload.array_operations import Array, list_operations
from meshwright.planner.workload.in_memory import Lifetime, Timeline, find_lifetimes, peak_of
from meshwright.planner.workload.kernel_schedule import schedule
from meshwright.planner.workload.sizes import DeviceSizes
from meshwright.program.dims.classes import LeafLabel, find_dim_classes
from meshwright.program.dims.factors import DimFactor

WHOLE = DeviceSizes(1.0, frozenset())


def array(nbytes):
    return Array(((DimFactor(0, nbytes),),), 1)


def life(nbytes, start, end):
    return Lifetime(array(nbytes), False, start, end, crosses=False)


def peak(function, *shapes, platform="gpu", dtype=jnp.float32):
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    closed = jax.make_jaxpr(function)(*arguments)
    classes = find_dim_classes(closed, [LeafLabel("batch", "x") for _ in shapes])
    kernels = schedule(list_operations(classes.root), platform)
    return peak_of(Timeline(find_lifetimes(kernels)), WHOLE).nbytes


def test_arrays_that_exist_together_are_added():
    assert peak_of(Timeline([life(100, 0, 2), life(50, 1, 3), life(70, 3, 4)]), WHOLE).nbytes == 150


def test_places_are_used_again():
    lives = [life(60, 0, 1), life(40, 1, 2), life(50, 2, 3)]
    assert peak_of(Timeline(lives), WHOLE).nbytes == 100


def test_elementwise_operations_store_nothing_but_their_result():
    size = 4 * 64 * 64
    assert peak(lambda x: jnp.tanh(x * 2 + 1), (64, 64)) == size


def test_products_store_their_operands_and_results():
    size = 4 * 64 * 64
    assert peak(lambda x, y: (x * 2) @ y @ y, (64, 64), (64, 64)) == 2 * size


def test_what_several_products_need_is_saved_once():
    def run(x, y):
        doubled = x * 2
        saved = [jax.lax.reduce_precision(doubled, 8, 7) for _ in range(3)]
        return sum(each @ y for each in saved)

    matrix, column = 4 * 64 * 64, 4 * 64
    assert matrix <= peak(run, (64, 64), (64, 1)) <= matrix + 4 * column


def test_what_a_loop_saves_in_two_shapes_is_saved_once():
    def run(x, y, different):
        def block(carry, _):
            made = jnp.tanh(carry @ y)
            other = made * 2 if different else made
            return made, (made, other.reshape(-1))

        _, (rows, flat) = jax.lax.scan(block, x, length=10)
        return (rows @ y).sum() + (flat.reshape(rows.shape) @ y).sum()

    matrix = 4 * 64 * 64
    once = peak(lambda x, y: run(x, y, False), (64, 64), (64, 64))
    twice = peak(lambda x, y: run(x, y, True), (64, 64), (64, 64))
    assert twice - once == 10 * matrix


def test_rows_of_a_loop_are_copied_while_they_are_read():
    def run(x, weights):
        def block(carry, own):
            first, second, third = own
            return ((carry @ first) @ second) @ third, None

        return jax.lax.scan(block, x, weights)[0]

    shapes = tuple(jax.ShapeDtypeStruct((10, 64, 64), jnp.float32) for _ in range(3))
    closed = jax.make_jaxpr(run)(jax.ShapeDtypeStruct((1, 64), jnp.float32), shapes)
    classes = find_dim_classes(closed, [LeafLabel("batch", "x")] * 4)
    timeline = Timeline(find_lifetimes(schedule(list_operations(classes.root), "gpu")))
    # Besides one row at a time there are a few vectors.
    assert 1 <= peak_of(timeline, WHOLE).nbytes / (4 * 64 * 64) < 1.1
    once = DeviceSizes(1.0, frozenset(), loops=False)
    assert peak_of(timeline, once).nbytes / (4 * 64 * 64) < 0.1


def test_rows_of_a_loop_that_are_summed_are_not_copied():
    def run(x, stack):
        return jax.lax.scan(lambda carry, row: (carry + row.sum(0), None), x, stack)[0]

    assert peak(run, (64,), (10, 64, 64)) / (4 * 64 * 64) < 0.1


def test_random_bits_are_computed_where_they_are_read():
    def run(x, seed):
        bits = jax.random.bits(jax.random.key(seed), x.shape)
        return jnp.where(bits > 7, x, 0).max(0)

    arguments = (jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((), "uint32"))
    closed = jax.make_jaxpr(run)(*arguments)
    classes = find_dim_classes(closed, [LeafLabel("batch", "x")] * 2)
    kernels = schedule(list_operations(classes.root), "gpu")
    assert peak_of(Timeline(find_lifetimes(kernels)), WHOLE).nbytes / (4 * 64 * 64) < 0.1


@pytest.mark.parametrize(("readers", "stored"), [(2, 0), (4, 1)])
def test_a_sum_is_recomputed_unless_it_has_many_readers(readers, stored):
    def run(x, y):
        added = x + y
        return sum(jnp.tanh(added * n).max(0) for n in range(1, readers + 1))

    found = peak(run, (64, 64), (64, 64))
    assert (found >= 4 * 64 * 64) == bool(stored)


@pytest.mark.parametrize(
    ("platform", "columns", "arrays"), [("gpu", 64, 2), ("gpu", 63, 2), ("tpu", 63, 1)]
)
def test_gpus_do_not_write_over_a_product(platform, columns, arrays):
    """There, tanh has an array of its own."""
    shapes = ((64, 64), (64, columns), (columns, 1))
    found = peak(lambda x, y, z: jnp.tanh(x @ y) @ z, *shapes, platform=platform, dtype="bfloat16")
    column = 2 * 64
    assert found == max(arrays * columns, columns + 1) * column


@pytest.mark.parametrize(
    ("platform", "columns", "arrays"), [("gpu", 64, 1), ("gpu", 63, 2), ("tpu", 63, 1)]
)
def test_gpus_copy_what_products_cannot_read_as_it_is(platform, columns, arrays):
    """Columns that are no multiple of 8 are filled up, so that tanh needs an array of its own."""
    shapes = ((2, 64, columns), (columns, 1))
    found = peak(lambda x, z: jnp.tanh(x.max(0)) @ z, *shapes, platform=platform, dtype="bfloat16")
    column = 2 * 64
    assert found == max(arrays * columns, columns + 1) * column


def test_loops_store_what_they_stack():
    def run(x):
        def step(carry, _):
            return jnp.sin(carry), carry * 2

        return jax.lax.scan(step, x, length=10)

    size = 4 * 64 * 64
    assert 11 * size <= peak(run, (64, 64)) <= 13 * size


def test_sizes_of_arrays_that_are_gone_are_not_those_of_others():
    sizes = DeviceSizes(1.0, frozenset())
    assert [sizes.of(array(nbytes)) for nbytes in range(100)] == list(range(100))


def test_arrays_are_placed_by_size_or_by_life_whichever_needs_less():
    """By size, the one of 5 lies below that of 3, and that of 2 does not fit between: 11."""
    lives = [life(6, 0, 2), life(2, 3, 3), life(5, 3, 5), life(3, 0, 3)]
    assert peak_of(Timeline(lives), WHOLE).nbytes == 10


def test_places_are_those_of_a_search_through_all_gaps():
    draws = np.random.default_rng(0)
    for _ in range(20):
        starts = draws.integers(0, 12, 16)
        ends = starts + draws.integers(0, 6, 16)
        sizes = draws.integers(1, 20, 16)
        triples = list(zip(sizes.tolist(), starts.tolist(), ends.tolist(), strict=True))
        by_size = sorted(triples, key=lambda each: -each[0])
        by_life = sorted(triples, key=lambda each: (each[1] - each[2], -each[0]))
        expected = min(packed_one_by_one(by_size), packed_one_by_one(by_life))
        found = peak_of(Timeline([life(*each) for each in triples]), WHOLE)
        assert found.nbytes == expected


LARGEST = 16 * 20
"""Bytes of a heap that holds all of them side by side."""


def packed_one_by_one(triples):
    """Place arrays in order, each at the lowest place of the smallest gap that holds it."""
    placed = []
    for size, start, end in triples:
        beside = [p for p in placed if p[2] <= end and p[3] >= start]
        taken = [any(low <= byte < high for low, high, *_ in beside) for byte in range(LARGEST)]
        free = [n for n in range(LARGEST) if not taken[n] and (n == 0 or taken[n - 1])]
        gaps = [(taken.index(True, n) - n if True in taken[n:] else np.inf, n) for n in free]
        place = min(gap for gap in gaps if gap[0] >= size)[1]
        placed.append((place, place + size, start, end))
    return max(high for _, high, *_ in placed)
