"""A profile's figures and what it advises."""

import json

import pytest

from meshwright.profile import CollectiveTime, DeviceTime, Profile
from meshwright.profile.profile import advise

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("command_line")]


def profile(*devices: tuple[float, float, float], waited: float = 0.0, **more) -> Profile:
    """Make a profile of two steps of a second from compute, communication and hidden time."""
    return Profile(
        steps=2,
        seconds_per_step=1.0,
        devices=tuple(
            DeviceTime(number, compute, communication, hidden, 2 - compute - communication)
            for number, (compute, communication, hidden) in enumerate(devices)
        ),
        collectives=more.pop("collectives", ()),
        input_wait_seconds=waited,
        **more,
    )


def test_shares_are_means_over_devices_and_sum_to_one():
    found = profile((1.0, 0.2, 0.1), (1.4, 0.2, 0.3), waited=0.3)
    assert found.shares == pytest.approx(
        {"compute": 0.6, "communication": 0.1, "input_wait": 0.15, "idle": 0.15}
    )
    assert found.hidden_communication == pytest.approx(0.1)
    assert found.load_balance == pytest.approx(1.4 / 1.2)


def test_waiting_for_data_behind_computing_costs_nothing():
    shares = profile((1.8, 0.1, 0.0), waited=1.5).shares
    assert shares["input_wait"] == pytest.approx(0.05)
    assert shares["idle"] == pytest.approx(0)


def test_json_holds_everything():
    gather = CollectiveTime(("fsdp",), "all-gather", "blocks.0", 2, 0.5, 0.4, 1024)
    one = profile((1.0, 0.8, 0.2), collectives=(gather,), trace="trace")
    found = json.loads(json.dumps(one.to_json()))
    assert found["steps"] == 2
    assert set(found["shares"]) == {"compute", "communication", "input_wait", "idle"}
    assert found["collectives"][0] | {"exposed_seconds": 0} == {
        "axis": "fsdp",
        "kind": "all-gather",
        "module": "blocks.0",
        "count": 2,
        "seconds": 0.5,
        "exposed_seconds": 0,
        "bytes": 1024,
    }
    assert "keep_gathered" in found["advice"][1]


def shares(compute=1.0, communication=0.0, input_wait=0.0, idle=0.0) -> dict[str, float]:
    return {
        "compute": compute,
        "communication": communication,
        "input_wait": input_wait,
        "idle": idle,
    }


@pytest.mark.parametrize(
    ("parts", "exposed", "expected"),
    [
        (shares(0.9, 0.1), {("fsdp",): 0.1}, []),
        (
            shares(0.6, 0.4),
            {("tensor",): 0.3, ("fsdp",): 0.1},
            ["compute 60%", "40% of the time devices wait for communication, more than 30%, "
             "most over tensor (30%); try less tensor parallelism"],
        ),
        (shares(0.5, 0.4, 0.1), {("data",): 0.4}, ["compute 50%", "training.micro_batch_size"]),
        (shares(0.6, 0.4), {(): 0.4}, ["compute 60%", "try more samples per device"]),
        (shares(0.6, 0.0, 0.35, 0.05), {}, ["compute 60%", "35% of the time devices wait for"]),
        (shares(0.6, 0.0, 0.0, 0.4), {}, ["compute 60%", "40% of the time devices are idle"]),
    ],
)  # fmt: skip
def test_advice_names_the_number_and_what_to_try(parts, exposed, expected):
    advice = advise(parts, exposed, load_balance=1.0, virtual=False)
    assert len(advice) == len(expected)
    for line, part in zip(advice, expected, strict=True):
        assert part in line


def test_uneven_devices_are_mentioned_and_virtual_ones_excused():
    (uneven,) = advise(shares(), {}, load_balance=1.5, virtual=False)
    assert "1.50 times the mean" in uneven
    assert advise(shares(0.95), {}, load_balance=1.0, virtual=True) == []
    assert "virtual" in advise(shares(0.5, 0.5), {}, load_balance=1.0, virtual=True)[-1]
