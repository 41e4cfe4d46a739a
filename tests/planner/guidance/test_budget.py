"""Budgets: amounts and prices as they are written, and costs against arithmetic by hand."""

import json
from types import SimpleNamespace

import pytest

from meshwright.errors import UserError
from meshwright.planner.estimate.estimate import TimeEstimate
from meshwright.planner.guidance.budget import NO_PRICE, Goal, PlanGoal, parse_goal, parse_price


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("300B", 300e9, "tokens"),
        ("300B tokens", 300e9, "tokens"),
        ("1.4T", 1.4e12, "tokens"),
        ("15t tokens", 15e12, "tokens"),
        (1e9, 1e9, "tokens"),
        (20_000, 20_000, "tokens"),
        ("2e9 tokens", 2e9, "tokens"),
        ("1,000,000 samples", 1e6, "samples"),
        ("10M samples", 10e6, "samples"),
        ("10Msamples", 10e6, "samples"),
        ("1 token", 1, "tokens"),
        ("3 tokens", 3, "tokens"),
        ("3 epochs", 3, "epochs"),
        ("1 epoch", 1, "epochs"),
        ("0.5ep", 0.5, "epochs"),
        ("90 epochs", 90, "epochs"),
        ("5k steps", 5000, "steps"),
        ("1000st", 1000, "steps"),
        ("100 steps", 100, "steps"),
        ("1 update", 1, "steps"),
        ("5k updates", 5000, "steps"),
    ],
)
def test_amounts_are_read(text, amount, unit):
    assert parse_goal(text) == Goal(pytest.approx(amount), unit)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "such as|write 300B"),
        ("many", "positive number"),
        ("0 epochs", "positive number"),
        ("-3 epochs", "positive number"),
        ("3 epoks", "did you mean `epochs`"),
        ("3 hours", "positive number"),
        ("1e400", "positive number"),
        ("nan", "positive number"),
        ("9" * 400, "positive number"),
    ],
)
def test_other_amounts_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_goal(text)


def test_amounts_are_written_as_they_are_read():
    for text in ("300B tokens", "10M samples", "3 epochs", "1 epoch", "1.5T tokens", "500 steps"):
        assert str(parse_goal(text)) == text
        assert parse_goal(str(parse_goal(text))) == parse_goal(text)


def estimate(*, seconds, samples, devices):
    """Return a plan of which only the time, the batch and the devices are known."""
    plan = SimpleNamespace(batch=SimpleNamespace(global_batch_size=samples))
    hardware = SimpleNamespace(count=devices)
    return SimpleNamespace(time=TimeEstimate(seconds), plan=plan, hardware=hardware)


def test_a_run_of_tokens_costs_what_its_steps_cost():
    goal = PlanGoal(parse_goal("300B"), usd_per_device_hour=2.5)
    cost = goal.budget(estimate(seconds=2.0, samples=512, devices=128), 1024)
    steps = -(-300_000_000_000 // (512 * 1024))
    assert cost.steps == steps
    assert cost.seconds == 2 * steps
    assert cost.device_hours == pytest.approx(128 * 2 * steps / 3600)
    assert cost.usd == pytest.approx(2.5 * cost.device_hours)
    assert cost.days == pytest.approx(13.245, rel=1e-3)
    assert str(cost) == ("300B tokens: 572,205 steps in 13d05h, 40,690 device-hours, 101,725 USD")
    assert json.loads(json.dumps(cost.to_json())) == {
        "goal": {"amount": 300e9, "unit": "tokens"},
        "steps": steps,
        "seconds": cost.seconds,
        "devices": 128,
        "device_hours": cost.device_hours,
        "usd": cost.usd,
        "days": cost.days,
    }


def test_epochs_samples_and_steps_are_counted():
    def steps(text, **known):
        goal = PlanGoal(parse_goal(text), **known)
        return goal.budget(estimate(seconds=1.0, samples=64, devices=8), 1).steps

    assert steps("3 epochs", num_samples=1000) == -(-3000 // 64)
    assert steps("7 epochs", num_samples=6400) == 700
    assert steps("1000 samples") == -(-1000 // 64)
    assert steps("17 steps") == 17
    with pytest.raises(UserError, match="how many samples"):
        steps("3 epochs")
    with pytest.raises(UserError, match="no array named tokens, inputs or input_ids"):
        steps("3B")


def test_without_a_price_there_is_no_money():
    goal = PlanGoal(parse_goal("1 step"))
    cost = goal.budget(estimate(seconds=36.0, samples=1, devices=1), 1)
    assert cost.usd is None
    assert str(cost) == f"1 step in 36 s, 0.01 device-hours, {NO_PRICE}"


@pytest.mark.parametrize(("text", "price"), [("2.5", 2.5), (2, 2.0), ("$1.99", 1.99), (0, 0.0)])
def test_prices_are_read(text, price):
    assert parse_price(text) == price


@pytest.mark.parametrize("text", ["", "cheap", "-1", "nan", "inf", True, "2,5"])
def test_other_prices_are_refused(text):
    with pytest.raises(UserError, match="is not a price"):
        parse_price(text)
