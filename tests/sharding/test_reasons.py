"""Reasons are records: one block of a stack has its own numbers, and a phrase is made once."""

import jax.numpy as jnp
import pytest

from meshwright.program.trace.model_leaves import Leaf
from meshwright.sharding.placement import Placement, add_pipe
from meshwright.sharding.reasons import (
    ByRule,
    Divided,
    NoDivisibleDim,
    OnEachStage,
    TooSmall,
    UnknownAnnotation,
    render,
)
from meshwright.sharding.tensor_reasons import (
    Column,
    Factor,
    Fused,
    NotDivisible,
    Recurrent,
    Replicated,
    product,
)


@pytest.mark.parametrize(
    ("of_stack", "of_block"),
    [
        (Divided("fsdp", 2, 64, 4), Divided("fsdp", 1, 64, 4)),
        (NoDivisibleDim("fsdp", (4, 7, 9), 2), NoDivisibleDim("fsdp", (7, 9), 2)),
        (TooSmall("fsdp", 12), TooSmall("fsdp", 12)),
        (ByRule("dim 3", "row"), ByRule("dim 3", "row")),
    ],
)
def test_one_block_of_a_stack_has_a_dim_less_in_front(of_stack, of_block):
    assert of_stack.in_one_block() == of_block


@pytest.mark.parametrize(
    ("reasons", "text"),
    [
        ((), "the same on every device"),
        ((OnEachStage(2, even=True),), "2 blocks on each stage"),
        (
            (OnEachStage(1, even=False), TooSmall("fsdp", 1)),
            "up to 1 block on each stage; not divided over fsdp: only 1 element",
        ),
        (
            (UnknownAnnotation(("embed", None)), Divided("fsdp", 0, 8, 2)),
            "annotated (embed, None), no mesh axis; fsdp on dim 0: 8 / 2",
        ),
        ((ByRule("a.*", ("fsdp", None)),), "rule `a.*`: ['fsdp', None]"),
    ],
)
def test_reasons_are_one_line(reasons, text):
    assert render(reasons) == text
    assert Placement("x", (), tuple(reasons)).reason == text


def test_what_only_stages_divide_is_not_called_the_same_on_every_device():
    leaf = Leaf("head", (8, 4), jnp.dtype("float32"), "param", "Param", is_weight=True)
    placed = add_pipe(leaf, Placement("head", ((), ())), sizes={"pipe": 2}, smallest=0)
    assert placed.reason == "pipe on dim 0: 8 / 2"


HEADS = (Factor(4, "heads"), Factor(16))


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (Column(HEADS, "reduced", ""), "column: feeds 4 heads × 16, reduced in the loss"),
        (Column(HEADS, "", ""), "column: feeds 4 heads × 16, never summed"),
        (
            Replicated(NotDivisible((Factor(3, "channels"),), 2)),
            "not divided over tensor: 3 channels are not divisible by tensor=2",
        ),
        (
            Replicated(NotDivisible((Factor(257, "vocabulary"),), 2)),
            "not divided over tensor: vocabulary 257 is not divisible by tensor=2",
        ),
        (
            Replicated(Recurrent("rnn.h")),
            "not divided over tensor: both dims of rnn.h are the same class (recurrent)",
        ),
        (
            Replicated(Fused(HEADS[:1], (Factor(3), *HEADS), None)),
            "not divided over tensor: fused: the factor 4 heads is inside its dim "
            "(3 × 4 heads × 16), which no PartitionSpec can express",
        ),
    ],
)
def test_tensor_reasons_are_phrases(reason, text):
    assert str(reason) == text
    assert product(HEADS) == "4 heads × 16"
