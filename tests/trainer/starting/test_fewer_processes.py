"""Plans for fewer processes: which mesh, and the same samples in each step."""

import math

import pytest

from meshwright.config.batch import Batch
from meshwright.errors import UserError
from meshwright.plan import Plan
from meshwright.runtime.attempts import PROCESS_RANGE, Fit, ProcessRange, Report
from meshwright.runtime.heartbeat import Heartbeat
from meshwright.trainer.starting.fewer_processes import plan_for_remaining, shrink_plan


def planned(mesh: dict[str, int], samples: int, steps: int = 1, **more) -> Plan:
    replicas = mesh.get("data", 1) * mesh.get("fsdp", 1)
    batch = Batch(
        global_batch_size=samples,
        micro_batch_size=samples // (replicas * steps),
        replicas=replicas,
        gradient_accumulation_steps=steps,
        sync_gradients_every=more.pop("sync", 1),
    )
    return Plan(mesh=mesh, batch=batch, **more)


@pytest.mark.parametrize(
    ("mesh", "count", "smaller"),
    [
        ({"data": 4}, 3, {"data": 3}),
        ({"data": 4}, 1, {}),
        ({"data": 2, "fsdp": 4}, 4, {"fsdp": 4}),
        ({"data": 2, "fsdp": 4}, 6, {"data": 3, "fsdp": 2}),
        ({"data": 2, "fsdp": 4}, 2, {"fsdp": 2}),
        ({"fsdp": 4, "tensor": 2}, 4, {"fsdp": 2, "tensor": 2}),
        ({"data": 4, "tensor": 2}, 6, {"data": 3, "tensor": 2}),
    ],
)
@pytest.mark.parametrize("keep_micro", [False, True])
def test_data_shrinks_before_fsdp_and_the_others_stay(mesh, count, smaller, keep_micro):
    plan = planned(mesh, samples=48, steps=2)
    shrunken = shrink_plan(plan, count, keep_micro=keep_micro)
    assert shrunken.mesh == smaller
    assert shrunken.num_devices == count
    batch = shrunken.batch
    assert batch.global_batch_size == 48
    if keep_micro:
        assert batch.micro_batch_size <= plan.batch.micro_batch_size
    else:
        assert batch.gradient_accumulation_steps == 2


def test_gradients_that_were_reduced_once_per_step_still_are():
    plan = planned({"data": 4}, samples=24, steps=2, sync=2)
    batch = shrink_plan(plan, 2, keep_micro=True).batch
    assert (batch.gradient_accumulation_steps, batch.sync_gradients_every) == (4, 4)


def test_stages_stay_and_get_more_samples_in_a_microbatch():
    more = {"schedule": "1f1b", "num_microbatches": 4}
    shrunken = shrink_plan(planned({"pipe": 2, "data": 4}, 48, 4, **more), 6)
    assert shrunken.mesh == {"pipe": 2, "data": 3}
    assert (shrunken.num_microbatches, shrunken.batch.micro_batch_size) == (4, 4)


@pytest.mark.parametrize(
    ("mesh", "samples", "count", "message"),
    [
        ({"data": 2, "tensor": 2}, 8, 3, "3 devices cannot be divided into groups of 2"),
        ({"data": 4}, 8, 3, "a global batch of 8 samples cannot be divided over 3 replicas"),
    ],
)
def test_a_number_without_a_mesh_says_why(mesh, samples, count, message):
    with pytest.raises(UserError, match=message):
        shrink_plan(planned(mesh, samples), count)


def test_the_plan_is_that_of_all_processes_made_smaller(monkeypatch):
    def make(devices: int) -> Plan:
        return planned({"fsdp": devices}, samples=4 * devices)

    # One process is connected to nobody: it is what is left of four.
    monkeypatch.setenv(PROCESS_RANGE, ProcessRange(4, 1).to_environment()[PROCESS_RANGE])
    plan = plan_for_remaining(make, num_devices=2)
    assert plan.mesh == {"fsdp": 2}
    assert plan.batch.global_batch_size == 4 * 8
    monkeypatch.delenv(PROCESS_RANGE)
    assert plan_for_remaining(make, num_devices=2) == make(2)


def test_a_number_that_would_shard_less_than_a_smaller_one_is_passed_over(monkeypatch, tmp_path):
    def make(devices: int) -> Plan:
        return planned({"fsdp": devices}, samples=math.lcm(*range(1, 9)))

    heartbeat = Heartbeat(tmp_path / "0.beat")
    monkeypatch.setattr(
        "meshwright.trainer.starting.fewer_processes.own_heartbeat", lambda: heartbeat
    )
    monkeypatch.setenv(PROCESS_RANGE, ProcessRange(4, 1).to_environment()[PROCESS_RANGE])
    plan_for_remaining(make, num_devices=1)
    report = Report.read(tmp_path / "0.report")
    assert report.fits[2] == Fit("fsdp=2")
    problem = "it would shard parameters over 1 device, and 2 processes over 2"
    assert problem in report.fits[3].problem
