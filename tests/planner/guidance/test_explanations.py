"""What is said about plans: the decision, comparisons, common mistakes, scaling and changes."""

from dataclasses import replace

import pytest
from closed_form import GPT2_MEDIUM, GPT3, ClosedForm

from meshwright.hardware import parse_hardware
from meshwright.planner.estimate.words import compare_plans, time_parts
from meshwright.planner.guidance.anti_patterns import find_anti_patterns, linear_scaling
from meshwright.planner.guidance.why_this_plan import explain_decision, fewer_devices
from meshwright.planner.search.candidates import FixedSettings, PlanTask
from meshwright.planner.search.search import search
from meshwright.planner.search.what_if import (
    device_counts,
    scaling_curve,
    smallest_cluster,
    what_ifs,
)
from meshwright.text.units import human_seconds

pytestmark = pytest.mark.usefixtures("command_line")

LARGE = ClosedForm(blocks=32, hidden=4096, heads=32, tokens=2048)
NARROW = ClosedForm(blocks=64, hidden=256, heads=8, vocabulary=1000)


def task(hardware="8xA100-40GB", batch=32, **fixed):
    return PlanTask(parse_hardware(hardware), batch, FixedSettings(**fixed))


def best(estimator, hardware="8xA100-40GB", batch=32, **fixed):
    return search(estimator, task(hardware, batch, **fixed), top=1).best


def mistakes(estimator, estimate, better=None):
    return {each.name: each.text for each in find_anti_patterns(estimator, estimate, better)}


class Normalizing(ClosedForm):
    """The same with BatchNorm."""

    keeps_statistics = True


@pytest.mark.parametrize(("steps", "said"), [(1, False), (4, True)])
def test_statistics_see_one_microbatch_at_a_time(steps, said):
    fixed = {"mesh": {"data": 8}, "gradient_accumulation_steps": steps}
    model = Normalizing(blocks=4, hidden=256, heads=4)
    found = mistakes(model, best(model, batch=64, **fixed))
    assert ("statistics of microbatches" in found) == said
    if said:
        words = found["statistics of microbatches"]
        assert "see the 16 samples of a microbatch, not the 64 of a step" in words


def test_a_small_model_is_explained_by_its_size():
    words = " ".join(explain_decision(GPT2_MEDIUM, search(GPT2_MEDIUM, task())))
    assert "takes 7.0 GB at least, and fits on one device, which has 36.0 GB for it" in words
    assert "16.0 bytes for each of 353,501,184 parameters" in words
    assert "its own copy and its own samples (data=8)" in words


def test_a_large_model_is_explained_axis_by_axis():
    result = search(LARGE, task("2x8xA100-40GB", 64))
    words = " ".join(explain_decision(LARGE, result))
    assert "does not fit on one device" in words
    for axis, size in result.best.plan.mesh.items():
        assert f"{axis}={size}" in words
    assert "Without it, the best mesh is" in words


def test_an_axis_without_which_nothing_fits_says_so():
    result = search(LARGE, task("8xA100-80GB", 64, mesh={"tensor": 1, "pipe": 1}))
    words = " ".join(explain_decision(LARGE, result))
    assert "Without it, no mesh works: data=8: does not fit: 108.5 GB of 72.0 GB" in words


def test_what_the_user_set_is_not_explained_away():
    words = " ".join(explain_decision(GPT2_MEDIUM, search(GPT2_MEDIUM, task(mesh={"tensor": 4}))))
    assert "tensor=4 shards every layer. You asked for it." in words


def test_a_comparison_adds_up():
    one, other = best(GPT2_MEDIUM), best(GPT2_MEDIUM, mesh={"tensor": 4})
    extra = other.time.step / one.time.step - 1
    assert f"costs {extra:.1%} more than data=8" in compare_plans(one, other)
    assert f"costs {1 - 1 / (1 + extra):.1%} less than data=2 × tensor=4" in compare_plans(
        other, one
    )
    assert sum(time_parts(other).values()) == pytest.approx(other.time.step)


def test_common_mistakes_are_found_by_name():
    good = best(GPT2_MEDIUM)
    assert mistakes(GPT2_MEDIUM, good) == {}
    assert "tensor parallelism where data parallelism fits" in mistakes(
        GPT2_MEDIUM, best(GPT2_MEDIUM, mesh={"tensor": 8}), good
    )
    across = best(GPT2_MEDIUM, "2x8xA100-40GB", mesh={"tensor": 16})
    assert "spans nodes of 8" in mistakes(GPT2_MEDIUM, across)["tensor parallelism across nodes"]
    few = best(GPT2_MEDIUM, mesh={"pipe": 8}, micro_batch_size=8)
    text = mistakes(GPT2_MEDIUM, few)["too few microbatches for the stages"]
    assert "4 microbatches for 8 stages" in text
    use = "training.micro_batch_size=1 training.gradient_accumulation_steps=32"
    assert text.endswith(f"Use 32: {use}")
    slow = best(LARGE, "4x8xA100-40GB", 32, mesh={"fsdp": 32})
    assert "write" not in mistakes(LARGE, slow)["fsdp over a slow network"]
    assert "mesh.fsdp=8" in mistakes(LARGE, slow)["fsdp over a slow network"]
    tiny = best(NARROW, "8x8xA100-40GB", 64, mesh={"fsdp": 64})
    assert "over-sharding" in mistakes(NARROW, tiny)


@pytest.mark.parametrize(
    ("batch", "micro", "advice"),
    [
        (49, 7, "Use 49: training.micro_batch_size=1 training.gradient_accumulation_steps=49"),
        (14, 7, "Use 14: training.micro_batch_size=1 training.gradient_accumulation_steps=14"),
        (7, 1, "training.global_batch_size=32 has enough samples for 32"),
    ],
)
def test_microbatches_that_are_advised_divide_the_batch(batch, micro, advice):
    few = best(GPT2_MEDIUM, batch=batch, mesh={"pipe": 8}, micro_batch_size=micro)
    text = mistakes(GPT2_MEDIUM, few)["too few microbatches for the stages"]
    assert text.endswith(advice)


def test_a_batch_that_does_not_divide_is_named():
    text = mistakes(GPT2_MEDIUM, best(GPT2_MEDIUM, batch=61))["a batch that does not divide"]
    assert "61 samples can be divided over 1 of 8 devices" in text
    assert "training.global_batch_size=56 or 64" in text
    for batch in (4, 8, 24):
        named = mistakes(GPT2_MEDIUM, best(GPT2_MEDIUM, batch=batch))
        assert "a batch that does not divide" not in named


def test_fewer_devices_are_suggested_where_they_are_faster():
    points = scaling_curve(GPT2_MEDIUM, task())
    fastest = points[2].tokens_per_second
    assert fewer_devices(task(), points[-1].estimate, points) == ""
    fast, slow = points[2].estimate, points[0].estimate
    points[-1] = replace(points[-1], estimate=slow, tokens_per_second=fastest / 3, efficiency=0.04)
    words = fewer_devices(task(), slow, points)
    assert words.startswith("4 devices are faster than all 8: ")
    assert (
        f"{human_seconds(fast.time.step)} per step, not {human_seconds(slow.time.step)}, with"
        in words
    )
    assert words.endswith("Write hardware=4xA100-40GB training.global_batch_size=32.")
    assert linear_scaling(points) is None


def test_devices_that_add_no_speed_are_not_needed():
    points = scaling_curve(GPT2_MEDIUM, task())
    same = [replace(points[0], num_devices=n) for n in (1, 2, 4, 8)]
    words = fewer_devices(task(), points[0].estimate, same)
    assert words.startswith("1 device is as fast as all 8: ")
    assert words.endswith("Write hardware=1xA100-40GB training.global_batch_size=32.")
    for chosen in ({"mesh": {"data": 8}}, {"micro_batch_size": 1}):
        assert fewer_devices(task(**chosen), points[0].estimate, same) == ""


def test_a_model_that_does_not_fit_is_not_replicated():
    refused = search(LARGE, task(mesh={"data": 8})).rejected[0].estimate
    text = mistakes(LARGE, refused)["replicating a model that does not fit"]
    assert "more devices do not change that" in text
    assert "mesh.fsdp=8" in text


def test_optimizer_state_is_not_forgotten():
    refused = search(LARGE, task(mesh={"data": 8})).rejected[0].estimate
    assert refused.memory.parameters < 0.9 * refused.capacity < refused.memory.least
    text = mistakes(LARGE, refused)["forgetting optimizer state"]
    assert f"{refused.memory.optimizer / 1e9:.1f} GB for the optimizer" in text
    assert "forgetting optimizer state" not in mistakes(GPT2_MEDIUM, best(GPT2_MEDIUM))


def test_the_curve_has_the_best_plan_of_each_number_of_devices():
    asked = task()
    points = scaling_curve(GPT2_MEDIUM, asked)
    assert [point.num_devices for point in points] == [1, 2, 4, 8]
    for point in points:
        hardware = parse_hardware(f"{point.num_devices}xA100-40GB")
        own = search(GPT2_MEDIUM, replace(asked, hardware=hardware), top=1).best
        assert point.estimate.time.step == pytest.approx(own.time.step, rel=0.01)
        assert point.tokens_per_second == pytest.approx(32 * 1024 / point.estimate.time.step)
    assert points[0].efficiency == 1
    assert "8 times the devices are 7.3 times as fast" in linear_scaling(points).text


def test_a_curve_starts_where_the_model_fits():
    points = scaling_curve(LARGE, task("2x8xA100-40GB", 64))
    assert [point.estimate is not None for point in points] == [False, False, True, True, True]
    assert points[2].efficiency == 1


@pytest.mark.parametrize(
    ("total", "per_node", "counts"),
    [
        (1, 1, [1]),
        (8, 8, [1, 2, 4, 8]),
        (24, 8, [1, 2, 4, 8, 24]),
        (1024, 8, [1, 4, 16, 64, 256, 1024]),
    ],
)
def test_numbers_of_devices_are_parts_of_nodes_or_whole_nodes(total, per_node, counts):
    assert device_counts(total, per_node) == counts


def test_the_nearest_change_that_matters_is_found():
    result = search(GPT2_MEDIUM, task())
    assert [str(each) for each in what_ifs(GPT2_MEDIUM, result)] == [
        "160.0 GB of memory per device: still data=8",
        "1200 GB/s between devices: still data=8",
        "a global batch of 128 samples: still data=8",
    ]
    result = search(LARGE, task())
    changes = [each for each in what_ifs(LARGE, result) if each.after is not None]
    assert changes
    for each in changes:
        assert each.after.plan.mesh != result.best.plan.mesh
        assert each.to_json()["step_time"] == each.after.time.step


@pytest.mark.full
def test_no_smaller_cluster_holds_the_model():
    found = smallest_cluster(GPT3, task("8xA100-40GB", 64))
    assert str(found.task.hardware) == "11x8xA100-40GB"
    fewer = replace(found.task, hardware=parse_hardware("10x8xA100-40GB"), global_batch_size=80)
    assert search(GPT3, fewer).plans == []


def test_a_small_cluster_may_be_a_part_of_a_node():
    found = smallest_cluster(LARGE, task("1xA100-40GB", 8))
    assert str(found.task.hardware) == "4xA100-40GB"
