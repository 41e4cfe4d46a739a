"""What is recommended among plans that are equally good, and whether its reasons are true."""

import re
from dataclasses import replace

import optax
import pytest
from closed_form import GPT2_MEDIUM, ClosedForm

from meshwright.hardware import parse_hardware
from meshwright.models import build_model
from meshwright.planner.estimate.estimate import Estimate, MemoryEstimate, TimeEstimate
from meshwright.planner.estimate.estimator import Estimator
from meshwright.planner.estimate.words import slower_because
from meshwright.planner.guidance.plan_report import make_report
from meshwright.planner.guidance.why_this_plan import does
from meshwright.planner.search.candidates import FixedSettings, PlanTask
from meshwright.planner.search.search import rank, search
from meshwright.tasks import find_task
from meshwright.trainer.starting.run_warnings import over_sharded

pytestmark = pytest.mark.usefixtures("command_line")

TASK = find_task("language_modeling")(vocab_size=514, context_length=16)


@pytest.fixture(scope="module")
def estimator():
    """A model whose dims divide by 2 and 4; by 3 only the projections of queries, keys, values."""

    def model(rngs):
        sizes = {"vocab_size": 514, "context_length": 16, "dropout": 0.0}
        return build_model("gpt", rngs=rngs, num_blocks=2, hidden_size=64, num_heads=4, **sizes)

    return Estimator(model, TASK.loss, optax.adamw(1e-3), TASK.example_batch(8))


def task(hardware, batch, **fixed):
    return PlanTask(parse_hardware(hardware), batch, FixedSettings(**fixed))


def plan_of(estimator, hardware, batch, **mesh):
    return search(estimator, task(hardware, batch, mesh=mesh), top=1).best.plan


def test_an_axis_that_divides_no_dim_is_not_chosen(estimator):
    result = search(estimator, task("3x5xA100-40GB", 60))
    assert result.best.plan.mesh == {"data": 15}
    refused = {tuple(each.mesh.items()): each.reason for each in result.rejected}
    assert "shards nothing" in refused[("fsdp", 15),]


@pytest.mark.parametrize(("axis", "size"), [("fsdp", 4), ("fsdp", 3), ("fsdp", 15), ("tensor", 2)])
def test_what_an_axis_is_said_to_shard_is_what_devices_are_spared(estimator, axis, size):
    hardware = parse_hardware(f"{size}x1xA100-40GB")
    plan = plan_of(estimator, str(hardware), 60, **{axis: size})
    held = estimator.estimate(plan, hardware).memory.state
    single = parse_hardware("1xA100-40GB")
    whole = estimator.estimate(plan_of(estimator, str(single), 60), single).memory.state
    share = (1 - held / whole) / (1 - 1 / size)
    words = does(estimator, plan, axis)
    if said := re.search(r"shards (\d+)% of", words):
        assert int(said[1]) == pytest.approx(100 * share, abs=1)
    else:
        assert share < 0.02 if "shards nothing" in words else share >= 0.9


def test_reasons_hold_for_the_plan_that_they_stand_beside():
    large = ClosedForm(blocks=32, hidden=4096, heads=32, tokens=2048)
    for model, asked in (
        (GPT2_MEDIUM, task("8xA100-40GB", 32)),
        (large, task("2x8xA100-40GB", 64)),
        (large, task("8xA100-80GB", 64)),
        (GPT2_MEDIUM, task("8xA100-40GB", 32, mesh={"tensor": 4})),
        (GPT2_MEDIUM, task("8xA100-40GB", 4)),
    ):
        report = make_report(model, asked, name="model")
        best, others = report.best, report.result.plans[1:]
        single = parse_hardware(f"1x{asked.hardware.chip.name}")
        alone = replace(asked, hardware=single, fixed=FixedSettings())
        copy = search(model, alone, top=1).plans
        first, *reasons = report.reasons
        if "fits on each device" in first:
            assert best.fits(asked.memory_share)
            assert best.plan.num_devices == best.plan.size("data")
        if "does not fit on one device" in first:
            assert not copy
        if "and is fastest" in first:
            assert all(best.time.step <= each.time.step for each in others)
        if "as you asked" in first:
            assert asked.fixed.mesh
        for reason, each in zip(reasons, others, strict=True):
            said = re.match(r"(?:at least )?([\d.]+)% (slower|faster)", reason)
            ratio = each.time.step / best.time.step - 1
            if said:
                sign = 1 if said[2] == "slower" else -1
                assert sign * float(said[1]) / 100 == pytest.approx(ratio, abs=0.006)


def estimated(seconds, hardware="4x8xH100", **mesh):
    asked = task(hardware, 4096, mesh={"pipe": 1, "tensor": 1, "fsdp": 1, **mesh})
    plan = search(ClosedForm(hidden=256, heads=64), asked, top=1).best.plan
    memory = MemoryEstimate(10**9, 0, 0, 0)
    return Estimate(plan, asked.hardware, TimeEstimate(seconds), lambda: memory)


@pytest.mark.parametrize(
    ("times", "first"),
    [
        # Sharded within a node, and replicated beyond it, unless that is clearly slower.
        ({"fsdp=32": 1.00, "fsdp=8": 1.02, "fsdp=16": 1.0}, "fsdp=8"),
        ({"fsdp=32": 1.00, "fsdp=8": 1.20, "fsdp=16": 1.03}, "fsdp=16"),
        ({"fsdp=32": 1.00, "fsdp=8": 1.20, "fsdp=16": 1.10}, "fsdp=32"),
        # Inside of a node, one axis is simpler than two.
        ({"fsdp=8": 1.00, "fsdp=4": 0.99}, "fsdp=8"),
        # What divides less is simpler, whatever the number of axes.
        ({"fsdp=8": 1.00, "data": 1.03}, "data"),
        ({"tensor=8": 1.00, "fsdp=8": 1.03}, "fsdp=8"),
        # Microseconds are lost in what the host takes.
        ({"tensor=8": 0.00010, "fsdp=8": 0.0002, "data": 0.0003}, "data"),
    ],
)
def test_the_simplest_of_equally_good_plans_is_recommended(times, first):
    single = {"fsdp=4", "tensor=8"} & set(times) or set(times) == {"fsdp=8", "data"}
    hardware = "8xH100" if single else "4x8xH100"
    plans = {}
    for name, seconds in times.items():
        axis, _, size = name.partition("=")
        plans[name] = estimated(seconds, hardware, **({} if not size else {axis: int(size)}))
    assert rank(list(plans.values()))[0] is plans[first]


def test_a_mesh_is_not_advised_against_that_a_search_has_found_best():
    large = ClosedForm(blocks=80, hidden=8192, heads=64, tokens=2048)
    free = make_report(large, task("16x8xA100-40GB", 128), name="model")
    waits = free.best.time.traffic["fsdp"].exposed_seconds / free.best.time.step
    assert waits > 0.1
    assert "fsdp over a slow network" not in [each.name for each in free.mistakes]
    asked = task("16x8xA100-40GB", 128, mesh=free.best.plan.mesh)
    chosen = make_report(large, asked, name="model")
    assert "fsdp over a slow network" in [each.name for each in chosen.mistakes]


def test_the_overhead_of_stages_is_said_to_be_ours(estimator):
    asked = task("8xA100-40GB", 64)
    whole, staged = (
        search(estimator, replace(asked, fixed=FixedSettings(mesh=mesh)), top=1).best
        for mesh in ({"data": 8}, {"pipe": 2, "data": 4})
    )
    time = staged.time
    parts = time.compute + time.staging + time.exposed + time.bubble
    assert time.step == pytest.approx(parts)
    assert time.staging > 0.3 * (time.compute + time.staging) / 1.4
    assert "of what Meshwright's stages add to computing" in slower_because(staged, whole)


def test_a_tensor_axis_that_leaves_little_of_a_model_is_warned_of(estimator):
    sharded, whole = (
        plan_of(estimator, "8xA100-40GB", 64, **{axis: 4}) for axis in ("tensor", "data")
    )
    (text,) = over_sharded(sharded, 4_000_000)
    assert "tensor=4" in text
    assert "1,000,000 of 4,000,000 parameters" in text
    assert "mesh.data=8" in text
    assert over_sharded(sharded, 8 * 2**20) == over_sharded(whole, 4) == []
