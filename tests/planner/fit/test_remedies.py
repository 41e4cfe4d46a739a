"""Changes to a plan that need less memory: which apply, and in which order."""

from dataclasses import dataclass

import pytest

from meshwright.config.batch import solve_batch
from meshwright.config.schema import ShardingConfig
from meshwright.errors import UserError
from meshwright.hardware import parse_hardware
from meshwright.plan import Plan
from meshwright.planner.estimate.estimate import Estimate, MemoryEstimate, TimeEstimate
from meshwright.planner.fit.remedies import find_remedies, rank_remedies, unranked

pytestmark = pytest.mark.usefixtures("command_line")


def plan(mesh, batch, *, micro=None, **settings):
    replicas = mesh.get("data", 1) * mesh.get("fsdp", 1)
    solved = solve_batch(replicas=replicas, global_batch_size=batch, micro_batch_size=micro)
    return Plan(mesh=mesh, batch=solved, **settings)


def texts(plan, **facts):
    facts = {"has_blocks": True, "rolls_blocks": True, **facts}
    return [remedy.text for remedy in find_remedies(plan, **facts)]


def test_every_remedy_of_a_plain_plan_keeps_the_global_batch():
    start = plan({"data": 4, "tensor": 2}, 48)
    found = find_remedies(start, has_blocks=True, rolls_blocks=True)
    assert [remedy.text for remedy in found] == [
        "training.micro_batch_size=6 training.gradient_accumulation_steps=2",
        "training.micro_batch_size=3 training.gradient_accumulation_steps=4",
        "training.micro_batch_size=1 training.gradient_accumulation_steps=12",
        "sharding.remat=dots",
        "sharding.remat=full",
        "sharding.blocks=scan",
        "mesh.fsdp=4 mesh.tensor=2 instead of mesh.data=4",
        "precision=bf16",
        "mesh.data=4 mesh.fsdp=2 mesh.tensor=2 on 16 devices",
    ]
    assert {remedy.plan.batch.global_batch_size for remedy in found} == {48}
    # Devices that share the memory of a host gain nothing by being more.
    assert texts(start, shared_memory=True) == texts(start)[:-1]
    assert start not in [remedy.plan for remedy in found]


def test_nothing_that_is_on_or_cannot_be_done():
    on = ShardingConfig(remat="full", blocks="scan")
    assert texts(plan({"fsdp": 8}, 8, sharding=on, precision="bf16")) == []
    stages = plan({"pipe": 2}, 8, micro=1, schedule="1f1b", num_microbatches=8)
    assert texts(stages, same_results=True) == ["sharding.remat=dots", "sharding.remat=full"]
    sharded = plan({"fsdp": 8}, 8, sharding=ShardingConfig(zero=1, keep_gathered=True))
    assert texts(sharded, has_blocks=False, rolls_blocks=False, same_results=True) == [
        "sharding.zero=3",
        "sharding.keep_gathered=false",
    ]
    assert texts(plan({}, 1), has_blocks=False, rolls_blocks=False) == ["precision=bf16"]


@dataclass
class Samples:
    """Needs a gigabyte for every sample that is in memory, and one for the state."""

    def estimate(self, plan, hardware):
        if plan.precision != "no":
            raise UserError("this model has no half precision")
        state = 10**9 // plan.size("fsdp")
        memory = MemoryEstimate(state, 0, 0, 0, 0, plan.batch.micro_batch_size * 10**9, 0)
        return Estimate(plan, hardware, TimeEstimate(1.0), lambda: memory)


def test_remedies_are_ranked_by_what_fits_and_what_they_save():
    start, hardware = plan({"data": 8}, 800), parse_hardware("8xA100-40GB")
    found = find_remedies(start, has_blocks=False, rolls_blocks=False)
    ranked = rank_remedies(found, start, hardware, Samples())
    assert list(map(str, ranked)) == [
        "training.micro_batch_size=25 training.gradient_accumulation_steps=4: "
        "75.0 GB less, which fits",
        "mesh.data=8 mesh.fsdp=2 on 16 devices: 50.5 GB less, which is not enough",
        "mesh.fsdp=8 instead of mesh.data=8: 875.0 MB less, which is not enough",
    ]


def test_the_smallest_microbatch_is_named_if_no_size_is_enough():
    start, hardware = plan({"fsdp": 2}, 16), parse_hardware("2xA100-40GB")

    class Tiny(Samples):
        def estimate(self, plan, hardware):
            found = super().estimate(plan, hardware)
            more = MemoryEstimate(10**12, 0, 0, 0, 0, plan.batch.micro_batch_size * 10**9, 0)
            return Estimate(plan, hardware, found.time, lambda: more)

    found = find_remedies(start, has_blocks=False, rolls_blocks=False)
    ranked = rank_remedies(found, start, hardware, Tiny())
    assert [remedy.samples for remedy in ranked if remedy.samples] == [1]
    assert not any(remedy.fits for remedy in ranked)


def test_without_predictions_there_are_the_largest_and_the_smallest_microbatch():
    found = find_remedies(plan({"fsdp": 2}, 64), has_blocks=True, rolls_blocks=True)
    assert [remedy.samples for remedy in found if remedy.samples] == [16, 8, 4, 2, 1]
    assert [remedy.samples for remedy in unranked(found) if remedy.samples] == [16, 1]
    assert len(unranked(found)) == len(found) - 3
