"""The Plan: what a config means on so many devices, saved and read back."""

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config.schema import Config, ShardingConfig
from meshwright.errors import UserError
from meshwright.plan import (
    Plan,
    make_plan,
    mesh_sizes,
    precision,
    unused_settings,
)

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("command_line")]

quick = settings(max_examples=100, deadline=None, derandomize=True)


def config_of(**sections: dict[str, object]) -> Config:
    kinds = {s: {"kind": "x"} for s in ("model", "task", "data", "optimizer")}
    return Config.parse({**kinds, **{s: {**kinds.get(s, {}), **v} for s, v in sections.items()}})


def with_shape(sizes: list[int], **mesh: int) -> Config:
    return config_of(model={"mesh_shape": [sizes, ["fsdp", "tp"]]}, mesh=mesh)


@pytest.mark.parametrize("sizes", [[1, 1], [4, 1], [1, 4], [2, 2], [8, 1], [8, 2]])
def test_documented_mesh_shapes_are_valid_on_their_devices(sizes):
    plan = make_plan(with_shape(sizes), sizes[0] * sizes[1])
    assert (plan.size("fsdp"), plan.size("tensor")) == tuple(sizes)
    assert plan.num_devices == sizes[0] * sizes[1]


@pytest.mark.parametrize("sizes", [[4, 2], [8, 1], [1, 8]])
def test_mesh_shape_and_mesh_mean_the_same(sizes):
    by_mesh = config_of(mesh={"fsdp": sizes[0], "tensor": sizes[1]})
    assert make_plan(with_shape(sizes), 8) == make_plan(by_mesh, 8)


def test_two_by_two_is_four_devices_and_not_eight():
    assert make_plan(with_shape([2, 2]), 4).num_devices == 4
    with pytest.raises(UserError, match="fsdp=2 × tensor=2 = 4, not 8"):
        make_plan(with_shape([2, 2]), 8)


@pytest.mark.parametrize("mesh", [{"fsdp": 4, "tensor": 2}, {"fsdp": 4}, {"data": -1}, {"data": 1}])
def test_mesh_shape_beside_an_agreeing_mesh_is_fine(mesh):
    assert make_plan(with_shape([4, 2], **mesh), 8).mesh == {"fsdp": 4, "tensor": 2}


@pytest.mark.parametrize(
    ("mesh", "difference"),
    [
        ({"fsdp": 2}, "fsdp is 4 by model.mesh_shape and 2 by mesh.fsdp"),
        ({"fsdp": 1}, "fsdp is 4 by model.mesh_shape and 1 by mesh.fsdp"),
        ({"fsdp": 4, "tensor": 1}, "tensor is 2 by model.mesh_shape and 1 by mesh.tensor"),
        ({"data": 2}, "data is 1 by model.mesh_shape and 2 by mesh.data"),
    ],
)
def test_mesh_shape_and_a_differing_mesh_are_refused(mesh, difference):
    with pytest.raises(UserError) as caught:
        mesh_sizes(with_shape([4, 2], **mesh))
    assert caught.value.why == difference


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([[4], ["fsdp", "tp"]], "1 sizes and 2 names"),
        ([[4, 2], ["fsdp", "fsdp"]], "names an axis twice"),
        ([[4, 2], ["model", "tp"]], "`tensor` is given twice"),
        ([[4, 2], ["fsdp", "tpu"]], "unknown mesh axis `tpu`"),
        ([[4, 0], ["fsdp", "tp"]], "has size 0"),
    ],
)
def test_impossible_mesh_shapes_are_refused(shape, message):
    with pytest.raises(UserError, match=message):
        make_plan(config_of(model={"mesh_shape": shape}), 8)


def test_data_takes_what_is_left():
    plan = make_plan(config_of(mesh={"tensor": 2}), 8)
    assert plan.mesh == {"data": 4, "tensor": 2}
    assert plan.batch.replicas == 4


def test_axes_are_in_order_and_those_of_size_one_are_not_shown():
    plan = make_plan(config_of(mesh={"tensor": 2, "fsdp": 1, "pipe": 2, "data": 2}), 8)
    assert list(plan.mesh.items()) == [("pipe", 2), ("data", 2), ("tensor", 2)]
    assert make_plan(config_of(), 1).mesh == {}


def test_batch_is_solved_over_data_and_fsdp_only():
    plan = make_plan(
        config_of(
            mesh={"fsdp": 2, "tensor": 2, "data": 2},
            training={"global_batch_size": 64, "micro_batch_size": 4},
        ),
        8,
    )
    assert (plan.batch.replicas, plan.batch.gradient_accumulation_steps) == (4, 4)
    assert plan.describe() == "data=2 × fsdp=2 × tensor=2, batch 64 = 4 × 4 × 4, precision no"


@pytest.mark.parametrize(
    ("mixed", "compute", "result"),
    [
        (None, None, "no"),
        ("bf16", None, "bf16"),
        (None, "fp16", "fp16"),
        ("bf16", "bf16", "bf16"),
        ("no", None, "no"),
    ],
)
def test_mixed_precision_is_another_spelling_of_precision(mixed, compute, result):
    config = config_of(training={"mixed_precision": mixed}, precision={"compute": compute})
    assert precision(config) == make_plan(config, 1).precision == result


@pytest.mark.parametrize(("mixed", "compute"), [("no", "bf16"), ("bf16", "fp16")])
def test_two_different_precisions_are_refused(mixed, compute):
    config = config_of(training={"mixed_precision": mixed}, precision={"compute": compute})
    with pytest.raises(UserError) as caught:
        make_plan(config, 1)
    assert f"mixed_precision={mixed}, precision.compute={compute}" in caught.value.why


def test_a_pipeline_takes_four_microbatches_per_stage_by_default():
    plan = make_plan(config_of(mesh={"pipe": 4}), 8)
    assert (plan.schedule, plan.num_microbatches) == ("1f1b", 16)
    chosen = config_of(mesh={"pipe": 4}, pipeline={"schedule": "gpipe", "num_microbatches": 6})
    assert make_plan(chosen, 8).num_microbatches == 6
    assert "gpipe with 6 microbatches" in make_plan(chosen, 8).describe()


def test_without_a_pipe_axis_there_is_no_schedule():
    plan = make_plan(config_of(pipeline={"num_microbatches": 6}), 8)
    assert (plan.schedule, plan.num_microbatches) == (None, 1)


axis_sizes = st.sampled_from([1, 2, 4])


@st.composite
def plans(draw):
    mesh = {axis: draw(axis_sizes) for axis in ("pipe", "data", "fsdp", "tensor")}
    steps = draw(axis_sizes)
    rules = st.dictionaries(
        st.text(max_size=6),
        st.sampled_from(["column", "row"]) | st.lists(st.none() | st.text(max_size=3), max_size=3),
        max_size=2,
    )
    config = config_of(
        mesh=mesh,
        training={
            "micro_batch_size": draw(st.integers(1, 9)),
            "gradient_accumulation_steps": steps,
            "sync_gradients_every": 1 if mesh["pipe"] > 1 else draw(st.sampled_from([1, steps])),
        },
        sharding={"zero": draw(st.sampled_from([1, 2, 3])), "rules": draw(rules)},
        precision={"compute": draw(st.sampled_from([None, "no", "bf16", "fp16"]))},
    )
    return make_plan(config, mesh["pipe"] * mesh["data"] * mesh["fsdp"] * mesh["tensor"])


@quick
@given(plan=plans())
def test_a_plan_survives_its_yaml(plan):
    text = plan.to_yaml()
    assert Plan.from_yaml(text) == plan
    assert Plan.from_yaml(text).to_yaml() == text


@quick
@given(text=st.text(max_size=30) | st.text("mesh:batch {}[]-1\n'\"&*!2:0", max_size=30))
def test_no_text_read_as_a_plan_gives_anything_but_a_user_error(text):
    with pytest.raises(UserError):
        Plan.from_yaml(text)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("fsdp: 4", "fsdp: 2", "data=1 × fsdp=2 = 2, but batch.replicas is 4"),
        ("fsdp: 4", "fsdp: -1", "no inferred sizes"),
        ("fsdp: 4", "fsd: 4", "unknown mesh axis `fsd`"),
        ("global_batch_size: 16", "global_batch_size: 17", "= 16, but global_batch_size is 17"),
        ("precision: 'no'", "precision: int8", "`plan.precision=int8` is not valid"),
        ("matmul:", "matmull:", "did you mean `plan.matmul`"),
    ],
)
def test_an_edited_plan_that_contradicts_itself_is_refused(old, new, message):
    text = make_plan(config_of(mesh={"fsdp": 4, "tensor": 2}), 8).to_yaml()
    assert old in text
    with pytest.raises(UserError, match=message.replace("×", ".")):
        Plan.from_yaml(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "fix"),
    [
        (
            "global_batch_size: 16",
            "global_batch_size: 32",
            "write batch.gradient_accumulation_steps: 2 (32 = 4 × 4 × 2); "
            "or batch.global_batch_size: 16 (16 = 4 × 4 × 1)",
        ),
        (
            "global_batch_size: 16",
            "global_batch_size: 17",
            "write batch.global_batch_size: 16 (16 = 4 × 4 × 1)",
        ),
        (
            "fsdp: 4",
            "fsdp: 2",
            "write batch.replicas: 2 and batch.gradient_accumulation_steps: 2 (16 = 4 × 2 × 2); "
            "or batch.replicas: 2 and batch.global_batch_size: 8 (8 = 4 × 2 × 1)",
        ),
        (
            "fsdp: 4",
            "fsdp: 3",
            "write batch.replicas: 3 and batch.global_batch_size: 12 (12 = 4 × 3 × 1)",
        ),
    ],
)
def test_what_is_advised_for_an_edited_batch_is_a_plan(old, new, fix):
    text = make_plan(config_of(mesh={"fsdp": 4, "tensor": 2}), 8).to_yaml().replace(old, new)
    with pytest.raises(UserError) as raised:
        Plan.from_yaml(text)
    assert raised.value.fix == fix
    values = yaml.safe_load(text)
    for change in fix.removeprefix("write ").split("; or ")[0].split(" (")[0].split(" and "):
        key, _, size = change.removeprefix("batch.").partition(": ")
        values["batch"][key] = int(size)
    assert Plan.from_yaml(yaml.safe_dump(values))


def test_a_plan_is_frozen_and_says_what_it_shards():
    plan = make_plan(config_of(sharding={"zero": 2}), 8)
    assert plan.sharding == ShardingConfig(zero=2)
    with pytest.raises(ValueError, match="frozen"):
        plan.precision = "bf16"


def test_gradients_cannot_be_reduced_now_and_then_with_stages():
    training = {"gradient_accumulation_steps": 8, "sync_gradients_every": 4}
    with pytest.raises(UserError, match="cannot be used with pipeline stages"):
        make_plan(config_of(mesh={"pipe": 2, "fsdp": 2, "tensor": 2}, training=training), 8)
    assert make_plan(config_of(mesh={"fsdp": 2, "tensor": 4}, training=training), 8)


def batch_of(stages=2, data=2, microbatches=None, **training):
    config = config_of(
        mesh={"pipe": stages, "data": data},
        training=training,
        pipeline={"num_microbatches": microbatches},
    )
    plan = make_plan(config, stages * data)
    return (
        plan.batch.global_batch_size,
        plan.batch.micro_batch_size,
        plan.batch.gradient_accumulation_steps,
        plan.num_microbatches,
    )


def test_microbatches_of_a_pipeline_are_the_accumulation():
    assert batch_of() == (16, 1, 8, 8)
    assert batch_of(microbatches=6, micro_batch_size=1) == (12, 1, 6, 6)
    assert batch_of(global_batch_size=32, micro_batch_size=1) == (32, 1, 16, 16)
    assert batch_of(global_batch_size=20) == (20, 2, 5, 5)
    assert batch_of(gradient_accumulation_steps=3) == (6, 1, 3, 3)
    assert batch_of(microbatches=4, gradient_accumulation_steps=12) == (24, 1, 12, 4)


def test_flushes_must_divide_a_step():
    with pytest.raises(UserError, match="num_microbatches=4 or 6"):
        batch_of(microbatches=5, gradient_accumulation_steps=12)


@pytest.mark.parametrize(
    ("microbatches", "training", "fix"),
    [
        (
            3,
            {"global_batch_size": 16},
            "write pipeline.num_microbatches=2 or 4, or use a global batch of 12 or 18 samples "
            "(training.global_batch_size)",
        ),
        (3, {"global_batch_size": 5}, "use a global batch of 6 samples"),
    ],
)
def test_microbatches_that_do_not_divide_the_batch_are_named_with_some_that_do(
    microbatches, training, fix
):
    with pytest.raises(UserError) as caught:
        batch_of(microbatches=microbatches, **training)
    assert "2 replicas (data × fsdp) × pipeline.num_microbatches=3 = 6" in caught.value.why
    assert caught.value.fix.startswith(fix)


def test_chunks_are_told_which_microbatches_go_round():
    def plan(**training):
        pipeline = {"schedule": "interleaved"}
        return make_plan(
            config_of(mesh={"pipe": 4, "data": 2}, training=training, pipeline=pipeline), 8
        )

    assert plan(global_batch_size=16).num_microbatches == 8
    with pytest.raises(UserError) as caught:
        plan(global_batch_size=16, gradient_accumulation_steps=2)
    assert "2 is not a multiple of 4" in caught.value.why
    assert "training.gradient_accumulation_steps=4 or 8" in caught.value.fix
    with pytest.raises(UserError, match="schedule=1f1b, or use a global batch of 8 or 16 samples"):
        plan(global_batch_size=10)
    text = plan().to_yaml().replace("num_microbatches: 16", "num_microbatches: 2")
    with pytest.raises(UserError, match="write num_microbatches: 4 or 8, or schedule: 1f1b"):
        Plan.from_yaml(text)


@pytest.mark.parametrize(
    ("mesh", "devices", "fix"),
    [
        (
            {"pipe": 4, "fsdp": 2},
            1,
            "nearest meshes that work: mesh.data=1\n"
            "or simulate=8, to try this mesh on 8 virtual CPU devices",
        ),
        (
            {"pipe": 16},
            8,
            "nearest meshes that work: mesh.pipe=4 mesh.data=2; mesh.pipe=2 mesh.data=4; "
            "mesh.data=8",
        ),
        ({"fsdp": 3}, 8, "nearest meshes that work: mesh.data=2 mesh.fsdp=4"),
    ],
)
def test_a_mesh_that_does_not_fit_names_some_that_do(mesh, devices, fix):
    config = config_of(model={"num_blocks": 4}, mesh=mesh)
    with pytest.raises(UserError) as caught:
        make_plan(config, devices)
    assert caught.value.fix.startswith(fix)
    assert ("simulate" in caught.value.fix) == ("simulate" in fix)


@pytest.mark.parametrize(
    ("sections", "pipe", "said"),
    [
        ({}, 1, []),
        ({"pipeline": {"schedule": "1f1b"}}, 1, []),
        (
            {"pipeline": {"schedule": "gpipe", "num_microbatches": 4}},
            1,
            ["pipeline.schedule=gpipe pipeline.num_microbatches=4 has no effect: the mesh data=8"],
        ),
        ({"pipeline": {"schedule": "gpipe"}}, 2, []),
        ({"pipeline": {"schedule": "interleaved", "num_chunks": 3}}, 2, []),
        (
            {"pipeline": {"num_chunks": 3}},
            2,
            ["pipeline.num_chunks=3 has no effect with pipeline.schedule=1f1b"],
        ),
        ({"hardware": "8xH100"}, 1, ["hardware=8xH100 has no effect"]),
    ],
)
def test_settings_that_change_nothing_are_named(sections, pipe, said):
    hardware = sections.pop("hardware", None)
    config = config_of(**sections, mesh={"pipe": pipe}).model_copy(update={"hardware": hardware})
    found = unused_settings(config, make_plan(config, 8))
    assert len(found) == len(said)
    assert all(text.startswith(start) for text, start in zip(found, said, strict=True))
