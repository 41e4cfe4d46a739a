"""What kernels do on a device: small programs counted by hand."""

import jax
import jax.numpy as jnp
import pytest

from meshwright.planner.workload.array_operations import list_operations
from meshwright.planner.workload.kernel_schedule import schedule
from meshwright.planner.workload.sizes import DeviceSizes
from meshwright.planner.workload.work_table import WorkTable
from meshwright.program.dims.classes import LeafLabel, find_dim_classes

ROWS, INNER, COLUMNS = 64, 32, 16
PRODUCT = 2 * ROWS * INNER * COLUMNS


def works(function, *shapes, rows=1.0, tensor=1):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    closed = jax.make_jaxpr(function)(*arguments)
    labels = [LeafLabel("batch", "x"), *(LeafLabel("param", "w") for _ in shapes[1:])]
    classes = find_dim_classes(closed, labels)
    table = WorkTable(schedule(list_operations(classes.root), "gpu"))
    parts = {classes.leaves[1].dims[1][0].id: tensor} if tensor > 1 else {}
    return table.on(DeviceSizes(rows, classes.batch, parts))


def test_a_product_reads_its_operands_and_writes_its_result():
    found = works(jnp.matmul, (ROWS, INNER), (INNER, COLUMNS))
    assert list(found.kind) == ["product"]
    assert found.flops[0] == PRODUCT
    assert found.nbytes[0] == 4 * (ROWS * INNER + INNER * COLUMNS + ROWS * COLUMNS)


def test_sums_of_rows_and_convolutions_have_kinds_of_their_own():
    assert list(works(lambda x: x.sum(0), (ROWS, INNER)).kind) == ["sum"]
    assert list(works(lambda x: x.sum(1), (ROWS, INNER)).kind) == ["memory"]

    def convolve(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
        )

    found = works(convolve, (2, ROWS, INNER), (3, INNER, COLUMNS))
    assert list(found.kind) == ["convolution"]
    assert found.flops[0] == 2 * 2 * (ROWS - 2) * 3 * INNER * COLUMNS


def test_work_follows_the_samples_and_the_parts_of_a_device():
    found = works(jnp.matmul, (ROWS, INNER), (INNER, COLUMNS), rows=3.0, tensor=4)
    assert found.flops[0] == pytest.approx(3 * PRODUCT / 4)
    read = 3 * ROWS * INNER + INNER * COLUMNS / 4
    assert found.nbytes[0] == pytest.approx(4 * (read + 3 * ROWS * COLUMNS / 4))


def test_kernels_of_a_loop_run_as_often_as_it_does():
    def run(x, w):
        return jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ w), None), x, length=10)[0]

    found = works(run, (ROWS, INNER), (INNER, INNER))
    assert set(found.times[found.kind == "product"]) == {10}
    assert list(found.times[found.kind == "loop"]) == [10]
    assert found.in_loop.all()


def test_of_several_branches_the_one_with_most_work_counts():
    def run(x, w):
        return jax.lax.cond(x.sum() > 0, lambda: x @ w @ w, lambda: x * 2)

    found = works(run, (ROWS, INNER), (INNER, INNER))
    assert found.flops.sum() == 2 * 2 * ROWS * INNER * INNER
