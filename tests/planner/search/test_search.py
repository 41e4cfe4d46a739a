"""The search against every combination of settings, and the reasons of what it rejects."""

from dataclasses import dataclass, replace

import pytest
from closed_form import GPT2_MEDIUM, GPT3, ClosedForm

from meshwright.config.schema import ShardingConfig
from meshwright.errors import UserError
from meshwright.hardware import parse_hardware
from meshwright.planner.estimate.estimate import (
    TIE,
    Estimate,
    MemoryEstimate,
    TimeEstimate,
)
from meshwright.planner.search.candidates import (
    REMATS,
    FixedSettings,
    PlanTask,
    Variant,
    all_sizes,
    make_candidate,
    micro_batch_sizes,
    reduces_once,
    schedule_choices,
)
from meshwright.planner.search.obstacles import find_obstacle
from meshwright.planner.search.search import rank, search
from meshwright.planner.search.what_if import what_ifs
from meshwright.program.dims.sample_values import MixedSamplesError
from meshwright.text.units import human_seconds

pytestmark = pytest.mark.usefixtures("command_line")


def task(hardware="8xA100-40GB", batch=32, **fixed):
    return PlanTask(parse_hardware(hardware), batch, FixedSettings(**fixed))


def fastest_of_all(estimator, task):
    """Return the fastest estimate that fits, of all meshes and all settings."""
    found = []
    for sizes in all_sizes(task.hardware.count, task.fixed.mesh):
        if find_obstacle(estimator, task, sizes):
            continue
        schedules = schedule_choices(task, sizes, estimator.num_blocks) or [(None, 1)]
        for remat in REMATS:
            for blocks in ("scan", "unroll"):
                for once in {False, reduces_once(task, sizes)}:
                    for schedule, chunks in schedules:
                        variant = Variant(remat, blocks, once, schedule, chunks)
                        found += [
                            estimator.estimate(
                                make_candidate(task, sizes, variant, micro), task.hardware
                            )
                            for micro in micro_batch_sizes(task, sizes, variant)
                        ]
    return min((e for e in found if e.fits(task.memory_share)), key=lambda e: e.time.step)


LARGE = ClosedForm(blocks=32, hidden=4096, heads=32, tokens=2048)
CASES = [
    (GPT2_MEDIUM, "8xA100-40GB", 32),
    pytest.param(GPT2_MEDIUM, "8xV100-16GB", 96, marks=pytest.mark.full),
    (LARGE, "8xA100-80GB", 64),
    (LARGE, "2x8xA100-40GB", 64),
    pytest.param(LARGE, "4x8xA100-40GB", 48, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("estimator", "hardware", "batch"), CASES)
def test_it_finds_what_trying_everything_finds(estimator, hardware, batch):
    asked = task(hardware, batch)
    result = search(estimator, asked)
    wanted = fastest_of_all(estimator, asked)
    steps = [estimate.time.step for estimate in result.plans]
    assert min(steps) == pytest.approx(wanted.time.step, rel=1e-9)
    # The first may be a simpler one that is as good.
    assert steps[0] <= (1 + TIE) * wanted.time.step
    assert steps[1:] == sorted(steps[1:])


@pytest.mark.parametrize(("estimator", "hardware", "batch"), CASES)
def test_every_mesh_is_ranked_or_has_a_reason(estimator, hardware, batch):
    asked = task(hardware, batch)
    result = search(estimator, asked)
    shown = [estimate.plan.mesh for estimate in result.plans]
    rejected = [each.mesh for each in result.rejected]
    every = [
        {a: s for a, s in sizes.items() if s > 1} for sizes in all_sizes(asked.hardware.count, {})
    ]
    assert sorted(map(str, shown + rejected)) == sorted(map(str, every))
    assert all(each.reason for each in result.rejected)
    assert all(estimate.fits(0.9) for estimate in result.plans)


def test_1024_devices_take_few_estimates(monkeypatch):
    estimates = []
    estimate = type(GPT3).estimate
    monkeypatch.setattr(
        type(GPT3), "estimate", lambda *given: estimates.append(given) or estimate(*given)
    )
    best = search(GPT3, task("1024xA100-80GB", 1536)).best
    assert len(estimates) < 5000
    assert best.plan.size("tensor") <= 8
    assert 0.3 < best.time.mfu < 0.65


def test_a_small_model_is_data_parallel():
    assert search(GPT2_MEDIUM, task()).best.plan.mesh == {"data": 8}


def test_reasons_have_the_numbers():
    by_kind = {}
    for each in search(GPT3, task("1024xA100-80GB", 1536)).rejected:
        by_kind.setdefault(each.kind, str(each))
    assert "needs a block for each stage, and the model has 96" in by_kind["blocks"]
    assert "crosses nodes of 8 devices" in by_kind["topology"]
    assert "25 GB/s, against 300 GB/s" in by_kind["topology"]
    assert "heads and features; 2, 4, 8, 16, 32 would" in by_kind["division"]
    assert "cannot be divided over data=1 × fsdp=1024 = 1024 replicas" in by_kind["batch"]
    assert (
        "does not fit: 93.7 GB of 72.0 GB (90% of a device), 21.7 GB too much" in by_kind["memory"]
    )
    assert "slower than fsdp=128 × tensor=8" in by_kind["slower"]


def test_fixed_settings_restrict_the_search():
    fixed = search(
        GPT2_MEDIUM,
        task(
            mesh={"tensor": 4},
            remat="full",
            blocks="scan",
            micro_batch_size=2,
        ),
    )
    assert len(fixed.plans) + len(fixed.rejected) == 3
    for estimate in fixed.plans:
        plan = estimate.plan
        assert plan.size("tensor") == 4
        assert (plan.sharding.remat, plan.sharding.blocks) == ("full", "scan")
        assert plan.batch.micro_batch_size == 2


def test_a_pinned_tensor_axis_may_cross_nodes():
    best = search(GPT2_MEDIUM, task("2x8xA100-40GB", mesh={"tensor": 16})).best
    assert best.plan.mesh == {"tensor": 16}


def test_pinned_schedules_and_chunks_are_kept():
    fixed = {"mesh": {"pipe": 4}, "schedule": "interleaved", "num_chunks": 3}
    best = search(GPT2_MEDIUM, task(**fixed)).best
    assert (best.plan.schedule, best.plan.num_chunks) == ("interleaved", 3)
    assert best.plan.num_microbatches % 4 == 0


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        (
            {"mesh": {"data": 4, "tensor": 4}},
            "mesh.data=4 × mesh.tensor=4 = 16, which does not divide 8",
        ),
        ({"mesh": {"tensor": 5}}, "\nmesh.tensor=5, which does not divide 8\n"),
        ({"mesh": {"data": 3}}, "\nmesh.data=3, which does not divide 8\n"),
        (
            {"mesh": {"pipe": 1, "data": 4, "fsdp": 1, "tensor": 1}},
            "\nmesh.data=4, which is not 8\n",
        ),
        (
            {"mesh": {"pipe": 1, "data": 1, "fsdp": 1, "tensor": 1}},
            "\nevery axis has size 1, which is not 8\n",
        ),
        (
            {"micro_batch_size": 3},
            "do not allow training.micro_batch_size=3, but training.micro_batch_size=2 or 4",
        ),
        ({"mesh": {"pipe": 8}, "schedule": "interleaved", "num_chunks": 4}, "needs 32 blocks"),
    ],
)
def test_contradictory_fixed_settings_are_refused_with_the_numbers(fixed, message):
    with pytest.raises(UserError) as caught:
        search(GPT2_MEDIUM, task(**fixed))
    assert message in str(caught.value)


def test_nothing_fits_is_a_result_with_reasons():
    result = search(GPT3, task("8xA100-40GB", 64))
    assert result.plans == []
    assert {each.kind for each in result.rejected} <= {"memory", "batch", "division", "blocks"}


def test_a_larger_share_of_memory_admits_more():
    tight = search(LARGE, replace(task("8xA100-80GB", 64), memory_share=0.5))
    loose = search(LARGE, replace(task("8xA100-80GB", 64), memory_share=1.0))
    assert all(estimate.share <= 0.5 for estimate in tight.plans)
    assert loose.best.time.step <= tight.best.time.step * (1 + TIE)


@dataclass
class Sums:
    """A model of which only the sums of gradients over microbatches need memory."""

    num_parameters: int = 10**9
    num_blocks: int = 8
    tensor_sizes: frozenset[int] = frozenset()
    keeps_statistics: bool = False
    sample_mixing: MixedSamplesError | None = None
    tokens_per_sample: int = 1

    def sharded_share(self, plan, axis):
        return 1.0

    def estimate(self, plan, hardware):
        steps = plan.batch.gradient_accumulation_steps
        nbytes = 10**9 if steps == 1 else 39 * 10**9
        parallel = plan.size("data") + plan.size("fsdp") / 2
        compute = (0.9 if plan.sharding.blocks == "unroll" else 1.0) / parallel + 0.01 * steps
        memory = MemoryEstimate(nbytes, 0, 0, 0, 0, 0, 0)
        return Estimate(plan, hardware, TimeEstimate(compute), lambda: memory)

    def bound(self, plan, hardware):
        return self.estimate(plan, hardware)


def test_a_whole_batch_may_need_less_memory_than_its_parts():
    result = search(Sums(), task(mesh={"data": 8}))
    assert result.best.plan.batch.gradient_accumulation_steps == 1
    nothing = search(Sums(), task(mesh={"data": 8}, gradient_accumulation_steps=2))
    assert nothing.plans == []
    assert [each.kind for each in nothing.rejected] == ["memory"]


def test_all_plans_are_compared_with_blocks_that_run_alike():
    result = search(Sums(), task(), top=2)
    assert {each.plan.sharding.blocks for each in result.plans} == {"unroll"}
    staged = [each for each in result.rejected if "pipe" in each.mesh]
    slower = [each for each in result.rejected if each.kind == "slower" and each not in staged]
    best = human_seconds(result.best.time.step)
    assert slower
    assert all(f"not {best}" in each.reason for each in slower)
    for each in slower:
        alone = search(Sums(), task(mesh=each.mesh)).best
        assert each.estimate.time.compute == pytest.approx(alone.time.compute, rel=0.02)


class Reducing(Sums):
    """A model that mostly waits for its gradients to be reduced."""

    def estimate(self, plan, hardware):
        batch = plan.batch
        reductions = batch.gradient_accumulation_steps // batch.sync_gradients_every
        memory = MemoryEstimate(10**9, 0, 0, 0, 0, 0, 0)
        return Estimate(plan, hardware, TimeEstimate(1.0 + reductions), lambda: memory)


@pytest.mark.parametrize(("zero", "every"), [(1, 4), (2, 1), (3, 1)])
def test_gradients_that_fsdp_shards_are_reduced_after_each_microbatch(zero, every):
    fixed = {"mesh": {"fsdp": 8}, "micro_batch_size": 2}
    asked = replace(task(batch=64, **fixed), sharding=ShardingConfig(zero=zero))
    assert search(Reducing(), asked).best.plan.batch.sync_gradients_every == every
    seldom = replace(asked, fixed=FixedSettings(**fixed, sync_gradients_every=4))
    if every == 1:
        with pytest.raises(UserError, match=r"do not allow .*sync_gradients_every=4"):
            search(Reducing(), seldom)
    else:
        assert search(Reducing(), seldom).plans


@dataclass
class Normalizing(Reducing):
    """The same with BatchNorm, whose statistics need the samples of all devices."""

    keeps_statistics: bool = True


COMPARING = Reducing(sample_mixing=MixedSamplesError("its dot_general combines samples"))
MIXING = [(Reducing(), 4), (Normalizing(), 1), (COMPARING, 1)]


@pytest.mark.parametrize(("model", "every"), MIXING, ids=["mean", "statistics", "comparisons"])
def test_statistics_are_reduced_with_each_microbatch(model, every):
    asked = task(batch=64, mesh={"data": 8}, micro_batch_size=2)
    assert search(model, asked).best.plan.batch.sync_gradients_every == every


class Equal(Sums):
    """A model that is about as fast on all meshes; a larger batch slows the simplest one down."""

    def estimate(self, plan, hardware):
        simple = plan.size("data") == 8
        slower = 1.005 if simple and plan.batch.global_batch_size > 32 else 1.0
        memory = MemoryEstimate(10**9, 0, 0, 0, 0, 0, 0)
        return Estimate(plan, hardware, TimeEstimate(slower), lambda: memory)


def test_a_mesh_that_is_as_good_as_another_stays():
    result = search(Equal(), task())
    assert result.best.plan.mesh == {"data": 8}
    assert all(each.after is None for each in what_ifs(Equal(), result))


@pytest.mark.parametrize(
    ("fixed", "simplest"),
    [
        ({}, {"data": 8}),
        ({"mesh": {"data": 1}}, {"fsdp": 8}),
        ({"mesh": {"data": 2}}, {"data": 2, "fsdp": 4}),
        ({"mesh": {"data": 1, "fsdp": 1}}, {"pipe": 8}),
        ({"mesh": {"pipe": 2}}, {"pipe": 2, "data": 4}),
    ],
)
def test_of_meshes_that_tie_the_one_with_the_fewest_axes_is_recommended(fixed, simplest):
    assert search(Equal(), task(**fixed)).best.plan.mesh == simplest


def test_remat_is_left_out_where_it_gains_nothing():
    plain = search(Equal(), task()).best
    again = ShardingConfig(remat="full")
    other = replace(plain, plan=plain.plan.model_copy(update={"sharding": again}))
    assert rank([other, plain])[0] is plain


def test_a_device_by_itself_has_no_links_to_change():
    result = search(Equal(), task("1xA100-40GB", batch=4))
    changes = [each.change for each in what_ifs(Equal(), result)]
    assert changes == ["160.0 GB of memory per device", "a global batch of 16 samples"]


def test_a_change_with_which_nothing_fits_says_so():
    result = search(Sums(), task(micro_batch_size=4, mesh={"data": 8}))
    assert [str(each) for each in what_ifs(Sums(), result)][-1] == (
        "a global batch of 128 samples: no plan fits"
    )
    assert what_ifs(Sums(), result)[-1].to_json()["step_time"] is None
