"""Reasons are phrases: one block of a stack has its own numbers, and a placement is one line."""

import jax.numpy as jnp
import pytest

from meshwright.program.trace.model_leaves import Leaf
from meshwright.sharding.placement import Placement, Reason, add_fsdp, add_pipe, on_each_stage
from meshwright.sharding.rules import by_rule


def leaf(*shape: int) -> Leaf:
    return Leaf("head", shape, jnp.dtype("float32"), "param", "Param", is_weight=True)


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
    stack = leaf(*shape)
    (reason,) = add_fsdp(stack, [()] * len(shape), size=4, smallest=smallest, keep=1).reasons
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
