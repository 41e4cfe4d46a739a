"""One decision says where leaves, gradients, optimizer state, activations and batches live."""

import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from program.programs import trace
from small_models import (
    SIZES,
    WIDTH,
    Norms,
    Odd,
    Residuals,
    builder,
    odd_batch,
    odd_loss,
    square_loss,
    task_batch,
    vectors,
)

from meshwright.config.schema import ShardingConfig
from meshwright.errors import UserError
from meshwright.sharding.decide import decide

pytestmark = pytest.mark.quick


def decision(build, loss, batch, sizes, *, rolled=False, trainable=nnx.Param, **config):
    _, traced = trace(build, loss, batch, rolled=rolled, trainable=trainable)
    return traced, decide(traced, sizes, ShardingConfig(**{"min_shard_size": 0, **config}))


def by_path(placements):
    return {p.path: p for p in placements}


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_says_what_the_fsdp_axis_divides(zero):
    _, found = decision(Residuals, square_loss, vectors(), {"fsdp": 8}, zero=zero)
    path = "blocks.0.up.kernel"
    divided, whole = PartitionSpec(None, "fsdp"), PartitionSpec()
    assert by_path(found.optimizer)[path].spec == divided
    assert by_path(found.gradients)[path].spec == (whole if zero == 1 else divided)
    assert by_path(found.at_rest)[path].spec == (divided if zero == 3 else whole)
    assert bool(found.gathers) is (zero == 3)


def test_every_divided_parameter_is_gathered_for_use_and_nothing_else():
    traced, found = decision(Norms, square_loss, vectors(), {"fsdp": 8})
    gathered = {traced.leaves[n].path for n in found.gathers}
    divided = {p.path for p in found.at_rest if "fsdp" in p.axes()}
    assert gathered == divided == {leaf.path for leaf in traced.leaves if leaf.role == "param"}
    specs = found.gathers[[leaf.path for leaf in traced.leaves].index("first.kernel")]
    assert (specs.whole, specs.sharded) == (PartitionSpec(), PartitionSpec(None, "fsdp"))


def test_statistics_counters_and_streams_are_the_same_everywhere():
    traced, found = decision(Norms, square_loss, vectors(), {"data": 2, "fsdp": 4})
    for leaf, placement in zip(traced.leaves, found.at_rest, strict=True):
        if leaf.role == "state":
            assert (placement.spec, placement.reason) == (
                PartitionSpec(),
                "the same on every device",
            )


def test_odd_sizes_are_divided_elsewhere_or_not_at_all_with_the_reason():
    _, found = decision(Odd, odd_loss, odd_batch(), {"fsdp": 8}, min_shard_size=100)
    placed = by_path(found.at_rest)
    assert placed["embed.embedding"].spec == PartitionSpec(None, "fsdp")
    assert (
        placed["head.bias"].reason == "not sharded over fsdp: no free dim of 101 is divisible by 8"
    )
    assert placed["temperature"].reason == "not sharded over fsdp: only 1 element"
    assert placed["twice.bias"].reason == "not sharded over fsdp: only 32 elements"


def test_frozen_weights_are_divided_and_gathered_like_trained_ones():
    last = nnx.All(nnx.Param, nnx.PathContains("last"))
    traced, found = decision(Norms, square_loss, vectors(), {"fsdp": 8}, trainable=last)
    assert by_path(found.at_rest)["first.kernel"].spec == PartitionSpec(None, "fsdp")
    assert "first.kernel" in {traced.leaves[n].path for n in found.gathers}


def test_rolled_blocks_are_divided_like_single_ones():
    loss, batch = task_batch("gpt")
    for sizes in ({"fsdp": 4, "tensor": 2}, {"tensor": 4}):
        _, single = decision(builder("gpt"), loss, batch, sizes)
        _, stacked = decision(builder("gpt"), loss, batch, sizes, rolled=True)
        rolled = by_path(stacked.at_rest)
        for path, placement in by_path(single.at_rest).items():
            one = rolled.get(path) or rolled[path.replace(".0.", ".*.").replace(".1.", ".*.")]
            assert one.dims[-len(placement.dims) :] == placement.dims or not placement.dims, path


def test_batches_lie_on_data_and_fsdp():
    for sizes, axes in (
        ({"data": 8}, "data"),
        ({"data": 2, "fsdp": 4}, ("data", "fsdp")),
        ({"fsdp": 4, "tensor": 2}, "fsdp"),
    ):
        _, found = decision(Residuals, square_loss, vectors(), sizes)
        assert found.batch == PartitionSpec(axes)
    _, found = decision(Residuals, square_loss, vectors(), {"tensor": 4})
    assert found.batch == PartitionSpec()


def test_one_device_needs_no_pins_and_no_gathers():
    _, found = decision(Residuals, square_loss, vectors(), {})
    assert (found.activations, found.gathers) == ({}, {})
    assert {p.spec for p in found.at_rest} == {PartitionSpec()}


def test_a_tensor_axis_nothing_can_use_is_refused_unless_a_rule_uses_it():
    class Scales(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.zeros(WIDTH))

        def __call__(self, x):
            return x * self.weight[...]

    with pytest.raises(UserError, match="no parameter can be sharded over tensor=4"):
        decision(Scales, square_loss, vectors(), {"tensor": 4})
    _, found = decision(Scales, square_loss, vectors(), {"tensor": 4}, rules={"weight": "column"})
    assert by_path(found.at_rest)["weight"].spec == PartitionSpec("tensor")


def test_more_devices_than_heads_are_refused():
    loss, batch = task_batch("gpt")
    with pytest.raises(UserError, match=r"tensor=8 is larger than the 4 attention heads"):
        decision(builder("gpt"), loss, batch, {"tensor": 8})


@pytest.mark.parametrize("kind", sorted(SIZES))
def test_every_kind_of_model_is_placed_on_every_axis(kind):
    loss, batch = task_batch(kind)
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    traced, found = decision(builder(kind), loss, batch, sizes)
    for leaf, placement in zip(traced.leaves, found.at_rest, strict=True):
        assert len(placement.dims) == len(leaf.shape)
        assert placement.reason
        for size, axes in zip(leaf.shape, placement.dims, strict=True):
            assert size % (2 ** len(axes)) == 0
    elements = sum(leaf.size for leaf in traced.leaves if leaf.role == "param")
    held = sum(
        leaf.size // placement.shards(sizes)
        for leaf, placement in zip(traced.leaves, found.at_rest, strict=True)
        if leaf.role == "param"
    )
    assert held < 0.6 * elements
