"""What inspect says about every parameter: where it is, how large, and why."""

import pytest
from pipeline.execute.test_pipelined_loss import put
from pipeline.models import VOCABULARY, WIDTH, Tokens, tokens_batch, tokens_loss

from meshwright.sharding.explain import explain

pytestmark = pytest.mark.quick


def reports(mesh, schedule=None):
    assembled = put(lambda: Tokens(4), tokens_loss, tokens_batch(), mesh, schedule, chunks=2)
    found = explain(assembled.traced.layout, assembled.decision, assembled.plan.mesh)
    return {leaf.path: leaf for leaf in found}


@pytest.fixture(scope="module")
def staged():
    return reports({"pipe": 2, "fsdp": 2}, "interleaved")


def test_a_block_is_on_the_stage_that_holds_it(staged):
    stages = [staged[f"blocks.{n}.up.kernel"].stage for n in range(4)]
    assert stages == [0, 1, 0, 1]
    assert staged["embed.embedding"].stage is None


def test_bytes_are_those_of_a_device_that_has_the_parameter(staged):
    kernel = staged["blocks.1.up.kernel"]
    assert kernel.bytes == 4 * WIDTH * 2 * WIDTH
    assert kernel.bytes_per_device == kernel.bytes // 2
    assert staged["embed.embedding"].bytes_per_device == 4 * VOCABULARY * WIDTH // 4


def test_dims_are_counted_without_the_stack(staged):
    assert staged["blocks.0.down.kernel"].spec == ("fsdp", "")
    assert staged["blocks.0.down.kernel"].reason == "2 blocks on each stage; fsdp on dim 0: 16 / 2"
    assert "fsdp on dim 0: 16 / 2" in reports({"fsdp": 2})["blocks.3.down.kernel"].reason


@pytest.mark.parametrize(
    ("mesh", "reason"),
    [
        ({"pipe": 2}, "2 blocks on each stage"),
        ({"pipe": 2, "data": 2}, "2 blocks on each stage; the same on all its devices"),
    ],
)
def test_a_block_of_a_stage_is_not_everywhere(mesh, reason):
    assert reports(mesh, "gpipe")["blocks.0.up.bias"].reason == reason
