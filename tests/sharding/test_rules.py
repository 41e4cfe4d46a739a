"""What a user says about where parameters live is done, or refused with the numbers."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from program.programs import trace
from small_models import (
    WIDTH,
    Odd,
    Residuals,
    builder,
    fill,
    odd_batch,
    odd_loss,
    square_loss,
    task_batch,
    vectors,
)
from step.runs import by_hand, on_mesh, put_together

from meshwright.config.compose import compose_config
from meshwright.config.schema import Config, ShardingConfig
from meshwright.errors import UserError
from meshwright.program.blocks.to_scan import roll_program
from meshwright.program.trace.build_model import describe_model
from meshwright.program.trace.traced_loss import trace_loss
from meshwright.sharding.decide import decide
from meshwright.sharding.explain import explain
from meshwright.sharding.rules import check_rules, matches

pytestmark = pytest.mark.quick

SIZES = {"fsdp": 2, "tensor": 2}


def place(rules, *, build=Residuals, loss=square_loss, batch=None, sizes=None, rolled=False):
    """Return spec and reason of every leaf."""
    _, traced = trace(build, loss, vectors() if batch is None else batch, rolled=rolled)
    config = ShardingConfig(rules=rules, min_shard_size=0)
    decision = decide(traced, SIZES if sizes is None else sizes, config)
    return {p.path: (p.spec, p.reason) for p in decision.at_rest}


@pytest.mark.parametrize(
    ("rule", "spec"),
    [
        ("column", (("fsdp", "tensor"))),
        ("row", (("tensor", "fsdp"))),
        ("replicate", ()),
        (["tensor", "fsdp"], ("tensor", "fsdp")),
        (["tp", None], ("tensor",)),
        ([None, "model"], (None, "tensor")),
        (["fsdp"], ("fsdp",)),
        ([], ()),
    ],
)
def test_rules_place_kernels(rule, spec):
    placed = place({"blocks.*.up.kernel": rule})
    for block in (0, 1):
        found, reason = placed[f"blocks.{block}.up.kernel"]
        assert found == PartitionSpec(*spec)
        assert reason.startswith(f"rule `blocks.*.up.kernel`: {rule}")


TWO_ON_ONE = [
    {"blocks.*.up.kernel": [["fsdp", "tensor"], None]},
    {"blocks.*.up.kernel": PartitionSpec(("fsdp", "tp"), None)},
    {"blocks.*.up.kernel": (("fsdp", "tensor"),)},
    [("blocks.*.up.kernel", PartitionSpec(("fsdp", "model"), None))],
]


@pytest.mark.parametrize("rules", TWO_ON_ONE)
def test_two_axes_can_divide_one_dim(rules):
    spec, reason = place(rules)["blocks.1.up.kernel"]
    assert spec == PartitionSpec(("fsdp", "tensor"))
    assert reason.startswith("rule `blocks.*.up.kernel`: [['fsdp', '")
    rolled = place(rules, rolled=True)["blocks.*.up.kernel"][0]
    assert rolled == PartitionSpec(None, ("fsdp", "tensor"))


def test_two_axes_that_do_not_divide_a_dim_are_multiplied():
    with pytest.raises(UserError, match=r"size 16, which 12 parts \(fsdp=6 × tensor=2\)"):
        place(TWO_ON_ONE[0], sizes={"fsdp": 6, "tensor": 2})
    with pytest.raises(UserError, match="names an axis twice"):
        place({"blocks.*.up.kernel": [["fsdp", "tensor"], "fsdp"]})


@pytest.mark.full
@pytest.mark.parametrize("axes", [["fsdp", "tensor"], ["tensor", "fsdp"]])
def test_training_with_two_axes_on_one_dim_equals_one_device(axes):
    model, rules = fill(Residuals), {"blocks.*.up.kernel": [axes, None]}
    step = put_together(Residuals, square_loss, vectors(), {"data": 2, **SIZES}, rules=rules)
    found = {leaf.path: leaf for leaf in explain(step.traced.layout, step.decision, SIZES)}
    kernel = found["blocks.0.up.kernel"]
    assert kernel.spec == (",".join(axes), "")
    assert kernel.bytes_per_device == kernel.bytes // 4
    assert not kernel.whole_over
    batches = [vectors(seed=seed) for seed in range(2)]
    with jax.enable_x64(True):
        on_eight = on_mesh(step, model, batches)
        by_itself = by_hand(model, square_loss, batches)
    np.testing.assert_allclose(on_eight.losses, by_itself.losses, rtol=1e-12)
    for path, value in by_itself.leaves.items():
        np.testing.assert_allclose(on_eight.leaves[path], value, rtol=1e-10, atol=1e-13)


def test_the_command_line_writes_two_axes_as_a_list():
    rule = "sharding.rules={blocks.*.up.kernel:[[fsdp,tensor],null]}"
    rules = Config.parse(compose_config([rule]).values).sharding.rules
    assert rules == ShardingConfig(rules=TWO_ON_ONE[0]).rules


@pytest.mark.parametrize("rule", ["column", ["fsdp", "tensor"]])
def test_a_rule_means_the_same_for_rolled_blocks(rule):
    placed = place({"blocks.*.up.kernel": rule}, rolled=True)
    assert placed["blocks.*.up.kernel"][0] == PartitionSpec(None, "fsdp", "tensor")


def test_a_rule_for_one_of_several_rolled_blocks_is_refused():
    with pytest.raises(UserError, match=r"`blocks\.0\.up\.kernel` names only some blocks"):
        place({"blocks.0.up.kernel": "column"}, rolled=True)
    placed = place({"blocks.0.up.kernel": "replicate"})
    assert placed["blocks.0.up.kernel"][0] == PartitionSpec()
    assert placed["blocks.1.up.kernel"][0] != PartitionSpec()


def on_stages(rules, build=Residuals, sizes=None):
    """Return where leaves live if stages hold the blocks of a rolled model."""
    _, traced = trace(build, square_loss, vectors(), rolled=True)
    staged = [n for n, step in enumerate(traced.layout.step_leaves) if step.stacked]
    config = ShardingConfig(rules=rules, min_shard_size=0)
    decision = decide(traced, sizes or {"pipe": 2, "fsdp": 2}, config, staged=staged)
    return {p.path: p.spec for p in decision.at_rest}


def test_a_rule_for_one_block_of_a_stage_is_refused_without_unrolling():
    with pytest.raises(UserError, match="with pipe=2 a stage holds its blocks") as caught:
        on_stages({"blocks.0.up.kernel": "column"})
    assert "the rule names 1 of 2" in caught.value.why
    assert caught.value.fix == "write `blocks.*.up.kernel`"


@pytest.mark.parametrize(
    ("rule", "instead"),
    [
        (["pipe", "fsdp"], "[null, fsdp]"),
        (["fsdp", "pp"], "[fsdp, null]"),
        (["pipe"], "[null]"),
    ],
)
def test_blocks_of_stages_are_not_divided_over_pipe_once_more(rule, instead):
    with pytest.raises(UserError, match=r"`blocks\.\*\.up\.kernel` cannot be sharded") as caught:
        on_stages({"blocks.*.up.kernel": rule})
    assert "its 2 blocks are already sharded over pipe=2" in caught.value.why
    assert caught.value.fix == f"leave `pipe` out: {instead}"


def test_pipe_in_a_rule_is_for_leaves_outside_of_blocks_or_meshes_without_stages():
    class Framed(Residuals):
        def __init__(self):
            super().__init__()
            self.first = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(2))

        def __call__(self, x):
            return super().__call__(self.first(x))

    placed = on_stages({"first.kernel": ["pipe", "fsdp"]}, Framed)
    assert placed["first.kernel"] == PartitionSpec("pipe", "fsdp")
    placed = on_stages({"blocks.*.up.kernel": ["pipe", "fsdp"]}, sizes={"fsdp": 2})
    assert placed["blocks.*.up.kernel"] == PartitionSpec(None, None, "fsdp")


def test_column_and_row_follow_the_computation_not_the_order_of_dims():
    loss, batch = task_batch("gpt")
    build = builder("gpt", tied_embeddings=False, qkv="fused")
    rules = {
        "vocabulary.tokens.embedding": "row",
        "blocks.*.attention.out.*": "row",
        "blocks.*.attention.qkv.*": "column",
    }
    placed = place(rules, build=build, loss=loss, batch=batch)
    assert placed["vocabulary.tokens.embedding"][0] == PartitionSpec("tensor", "fsdp")
    assert placed["blocks.1.attention.out.kernel"][0] == PartitionSpec("tensor", "fsdp")
    assert placed["blocks.1.attention.out.bias"][0] == PartitionSpec("fsdp")
    assert placed["blocks.1.attention.qkv.kernel"][0] == PartitionSpec("fsdp", None, "tensor")


def test_a_rule_may_cover_scalars_and_biases():
    placed = place({"**": "column"}, build=Odd, loss=odd_loss, batch=odd_batch(), sizes={})
    assert placed["temperature"][0] == PartitionSpec()
    placed = place({"blocks.**": "row"}, rolled=True)
    assert placed["blocks.*.up.bias"][0] == PartitionSpec(None, "fsdp")
    placed = place({"blocks.**": "column"}, rolled=True)
    assert placed["blocks.*.up.bias"][0] == PartitionSpec(None, "tensor")


def test_the_last_matching_rule_wins_and_others_are_left_to_the_model():
    rules = {"**.kernel": "replicate", "blocks.1.**": ["fsdp"]}
    placed = place(rules)
    assert placed["blocks.0.down.kernel"][0] == PartitionSpec()
    assert placed["blocks.1.down.kernel"][0] == PartitionSpec("fsdp")
    assert placed["blocks.0.up.bias"][0] == PartitionSpec("tensor")


def test_axes_the_mesh_does_not_have_are_left_out():
    rules = {"blocks.*.up.kernel": ["fsdp", "tensor"]}
    assert place(rules, sizes={"fsdp": 2})["blocks.0.up.kernel"][0] == PartitionSpec("fsdp")
    assert place(rules, sizes={})["blocks.0.up.kernel"][0] == PartitionSpec()


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"blocks.*.upp.kernel": "row"}, r"matches no parameter\n.* 6 parameters.*\ndid you mean"),
        ({"nothing": "row"}, r"`nothing` matches no parameter"),
        (
            {"blocks.*.up.kernel": "colum"},
            r"no sharding rule `colum` \(for `blocks",
        ),
        ({"blocks.*.up.kernel": ["tensr"]}, r"unknown mesh axis `tensr`"),
        ({"blocks.*.up.kernel": [None, None, "fsdp"]}, r"3 entries\n.*the parameter has 2 dims"),
        ({"blocks.*.up.kernel": ["fsdp", "fsdp"]}, r"names an axis twice"),
    ],
)
def test_rules_that_cannot_be_followed_are_refused(rules, message):
    with pytest.raises(UserError, match=message):
        place(rules)


def test_a_rule_whose_size_does_not_divide_shows_the_numbers():
    with pytest.raises(UserError, match=r"dim 0 has size 16, which 3 parts \(fsdp=3\) do not"):
        place({"blocks.*.up.kernel": ["fsdp"]}, sizes={"fsdp": 3})


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("blocks.*.kernel", "blocks.0.kernel", True),
        ("blocks.*.kernel", "blocks.0.up.kernel", False),
        ("blocks.**.kernel", "blocks.0.up.kernel", True),
        ("**.kernel", "blocks.0.up.kernel", True),
        ("blocks.*", "blocks.12", True),
        ("block", "blocks", False),
        ("layer_*.w", "layer_3.w", True),
        ("a.b", "aXb", False),
    ],
)
def test_patterns(pattern, path, expected):
    assert matches(pattern, path) is expected


def test_no_rules_need_no_parameters():
    check_rules({}, [])


class Annotated(nnx.Module):
    """Two layers whose author wrote where they live."""

    def __init__(self, names):
        init = nnx.with_partitioning(nnx.initializers.normal(0.1), names)
        self.first = nnx.Linear(WIDTH, WIDTH, kernel_init=init, rngs=nnx.Rngs(0))
        self.last = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.last(self.first(x))


def annotated(names, sizes=None, **rules):
    model_leaves = describe_model(lambda _: Annotated(names))
    traced = trace_loss(square_loss, model_leaves, vectors())
    config = ShardingConfig(rules=rules, min_shard_size=0)
    decision = decide(traced, SIZES if sizes is None else sizes, config)
    return {p.path: (p.spec, p.reason) for p in decision.at_rest}


@pytest.mark.parametrize(
    ("names", "spec"),
    [
        (("fsdp", "tensor"), ("fsdp", "tensor")),
        (("mp", None), ("tensor",)),
        ((None, ("fsdp", "tp")), (None, ("fsdp", "tensor"))),
    ],
)
def test_annotations_of_the_author_are_respected(names, spec):
    placed = annotated(names)
    assert placed["first.kernel"] == (PartitionSpec(*spec), "annotated in the model")
    assert placed["last.kernel"][0] != PartitionSpec()


def test_a_rule_comes_before_an_annotation():
    placed = annotated(("fsdp", "tensor"), **{"first.kernel": "replicate"})
    assert placed["first.kernel"][0] == PartitionSpec()


def test_annotations_that_name_no_mesh_axis_are_mentioned():
    spec, reason = annotated(("embed", "mlp"))["first.kernel"]
    assert spec != PartitionSpec()
    assert reason.startswith("annotated (embed, mlp), no mesh axis; ")


def test_an_annotation_of_blocks_that_names_pipe_is_refused_on_stages():
    class Blocks(nnx.Module):
        def __init__(self):
            init = nnx.with_partitioning(nnx.initializers.normal(0.1), ("pipe", ("fsdp", "tp")))
            self.blocks = nnx.List(
                nnx.Linear(WIDTH, WIDTH, kernel_init=init, rngs=nnx.Rngs(n)) for n in range(2)
            )

        def __call__(self, x):
            for block in self.blocks:
                x = nnx.tanh(block(x))
            return x

    model_leaves = describe_model(lambda _: Blocks())
    traced = roll_program(trace_loss(square_loss, model_leaves, vectors())).traced
    with pytest.raises(UserError, match="annotated in the model; its 2 blocks") as caught:
        decide(traced, {"pipe": 2}, ShardingConfig(), staged=range(2))
    assert caught.value.fix == "leave `pipe` out: [null, [fsdp, tp]]"


def test_an_annotation_whose_size_does_not_divide_is_refused():
    with pytest.raises(UserError, match=r"`first\.kernel` cannot be sharded.*\n.*3 parts"):
        annotated(("fsdp", None), sizes={"fsdp": 3})
