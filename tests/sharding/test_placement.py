"""Leaves are divided on their best dim, small and odd ones stay whole, and each says why."""

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from meshwright.program.trace.model_leaves import Leaf
from meshwright.sharding.placement import (
    Placement,
    Reason,
    add_fsdp,
    add_pipe,
    bytes_per_device,
    on_each_stage,
    to_spec,
)
from meshwright.sharding.rules import by_rule

pytestmark = pytest.mark.quick

SIZES = {"data": 2, "fsdp": 4, "tensor": 2}


def leaf(*shape):
    return Leaf("layer.kernel", shape, jnp.dtype("float32"), "param", "Param", is_weight=True)


def fsdp(*shape, tensor=None, size=4, smallest=0, keep=0):
    dims = [("tensor",) if d == tensor else () for d in range(len(shape))]
    placed = Placement("layer.kernel", tuple(dims))
    return add_fsdp(leaf(*shape), placed, size=size, smallest=smallest, keep=keep)


@pytest.mark.parametrize(
    ("shape", "tensor", "spec", "reason"),
    [
        ((64, 16), None, ("fsdp",), "fsdp on dim 0: 64 / 4"),
        ((16, 64), None, (None, "fsdp"), "fsdp on dim 1: 64 / 4"),
        ((32, 32), None, (None, "fsdp"), "fsdp on dim 1: 32 / 4"),
        ((50257, 768), None, (None, "fsdp"), "fsdp on dim 1: 768 / 4"),
        ((64, 16), 0, ("tensor", "fsdp"), "fsdp on dim 1: 16 / 4"),
        ((64, 7), 0, ("tensor",), "not sharded over fsdp: no free dim of 64×7 is divisible by 4"),
        ((7, 9), None, (), "not sharded over fsdp: no free dim of 7×9 is divisible by 4"),
        ((), None, (), "not sharded over fsdp: a scalar"),
    ],
)
def test_the_largest_dim_that_divides_is_divided(shape, tensor, spec, reason):
    placed = fsdp(*shape, tensor=tensor)
    assert placed.spec == PartitionSpec(*spec)
    assert placed.reason == reason


def test_small_leaves_stay_whole():
    assert fsdp(8, 16, smallest=129).reason == "not sharded over fsdp: only 128 elements"
    assert fsdp(8, 16, smallest=128).axes() == {"fsdp"}


def test_the_blocks_of_a_stack_are_never_divided_and_do_not_count_as_size():
    assert fsdp(64, 4, 16, keep=1).spec == PartitionSpec(None, None, "fsdp")
    assert fsdp(64, 7, keep=1).axes() == set()
    assert fsdp(64, 4, 16, keep=1, smallest=65).axes() == set()


def test_specs_have_no_trailing_dims_and_no_tuples_of_one():
    assert to_spec([("fsdp",), ()]) == PartitionSpec("fsdp")
    assert to_spec([(), ("data", "fsdp"), ()]) == PartitionSpec(None, ("data", "fsdp"))
    assert to_spec([(), ()]) == PartitionSpec()


def test_bytes_per_device_are_those_of_the_shard():
    placement = Placement("x", (("fsdp",), ("tensor",)))
    assert placement.shards(SIZES) == 8
    assert bytes_per_device(leaf(64, 16), placement, SIZES) == 64 * 16 * 4 // 8
    assert bytes_per_device(leaf(64, 16), Placement("x", ((), ())), SIZES) == 64 * 16 * 4


def test_gathering_leaves_the_other_axes():
    placement = Placement("x", (("fsdp",), ("tensor",)))
    assert placement.without("fsdp") == PartitionSpec(None, "tensor")
    assert placement.without("fsdp", "tensor") == PartitionSpec()


@pytest.mark.parametrize(
    ("shape", "smallest", "of_stack", "of_block"),
    [
        ((4, 3, 64), 0, "fsdp on dim 2: 64 / 4", "fsdp on dim 1: 64 / 4"),
        (
            (4, 7, 9),
            0,
            "not sharded over fsdp: no free dim of 4×7×9 is divisible by 4",
            "not sharded over fsdp: no free dim of 7×9 is divisible by 4",
        ),
        (
            (4, 12),
            100,
            "not sharded over fsdp: only 12 elements",
            "not sharded over fsdp: only 12 elements",
        ),
    ],
)
def test_one_block_of_a_stack_lacks_the_leading_dim(shape, smallest, of_stack, of_block):
    (reason,) = fsdp(*shape, smallest=smallest, keep=1).reasons
    assert (str(reason), str(reason.in_one_block())) == (of_stack, of_block)


@pytest.mark.parametrize(
    ("reasons", "text"),
    [
        ((), "the same on every device"),
        ((on_each_stage(2, even=True),), "2 blocks on each stage"),
        (
            (on_each_stage(1, even=False), Reason("like head")),
            "up to 1 block on each stage; like head",
        ),
        ((by_rule("a.*", ("fsdp", None)),), "rule `a.*`: ['fsdp', None]"),
    ],
)
def test_reasons_are_one_line(reasons, text):
    assert Placement("x", (), tuple(reasons)).reason == text


def test_what_only_stages_shard_is_not_called_the_same_on_every_device():
    placed = add_pipe(leaf(8, 4), Placement("head", ((), ())), sizes={"pipe": 2}, smallest=0)
    assert placed.reason == "pipe on dim 0: 8 / 2"
