"""What training costs: time, device-hours and money for so many tokens, samples or epochs."""

import math
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from meshwright.errors import UserError, did_you_mean
from meshwright.planner.estimate.estimate import Estimate
from meshwright.text.units import human_count, human_seconds

Unit = Literal["tokens", "samples", "epochs", "steps"]
_FACTORS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_SHORT: dict[str, Unit] = {"": "tokens", "ep": "epochs", "st": "steps", "updates": "steps"}
_WRITTEN = re.compile(
    r"\s*(\d[\d_,]*(?:\.\d+)?(?:e\d+)?)\s*([kmbgt]?)\s*([a-z]*)\s*", re.IGNORECASE
)
_MOST = 1e18
NO_PRICE = "no price known (--price 2.5 sets USD per device and hour)"
"""Stands for the money in budgets without a price."""


@dataclass(frozen=True)
class Goal:
    """How much to train: a number of tokens, samples, epochs or steps."""

    amount: float
    unit: Unit

    def __str__(self) -> str:
        noun = self.unit.removesuffix("s") if self.amount == 1 else self.unit
        return f"{human_count(self.amount).replace('G', 'B')} {noun}"


@dataclass(frozen=True)
class Budget:
    """What it costs to reach a goal; ``usd`` is None without a price."""

    goal: Goal
    steps: int
    seconds: float
    devices: int
    device_hours: float
    usd: float | None

    @property
    def days(self) -> float:
        """How long it takes, in days."""
        return self.seconds / 86400

    def to_json(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {**asdict(self), "days": self.days}

    def __str__(self) -> str:
        steps = f"{self.steps:,} {'step' if self.steps == 1 else 'steps'}"
        amount = steps if self.goal.unit == "steps" else f"{self.goal}: {steps}"
        parts = [
            f"{amount} in {human_seconds(self.seconds)}",
            f"{_figure(self.device_hours)} device-hours",
            f"{_figure(self.usd)} USD" if self.usd is not None else NO_PRICE,
        ]
        return ", ".join(parts)


@dataclass(frozen=True)
class PlanGoal:
    """How much is to be trained, and at which price; a goal in epochs needs ``num_samples``."""

    goal: Goal
    num_samples: int | None = None
    usd_per_device_hour: float | None = None

    def samples(self, samples_per_step: int, tokens_per_sample: int) -> float:
        """Return how many samples the goal is; one that cannot be counted is an error."""
        goal = self.goal
        samples = {
            "steps": goal.amount * samples_per_step,
            "samples": goal.amount,
            "tokens": goal.amount / tokens_per_sample if tokens_per_sample > 1 else None,
            "epochs": goal.amount * self.num_samples if self.num_samples else None,
        }[goal.unit]
        if samples is None:
            raise UserError(
                f"{goal} cannot be counted in steps",
                why="the batch has no array named tokens, inputs or input_ids, and not exactly one "
                "other array with whole numbers in rows"
                if goal.unit == "tokens"
                else "the data does not say how many samples it has",
                fix='write samples or steps instead, as in --tokens "10M samples"',
            )
        return samples

    def budget(self, estimate: Estimate, tokens_per_sample: int) -> Budget:
        """Return what it costs to reach the goal with a plan."""
        batch, devices = estimate.plan.batch.global_batch_size, estimate.hardware.count
        steps = math.ceil(self.samples(batch, tokens_per_sample) / batch)
        seconds = steps * estimate.time.step
        hours, price = devices * seconds / 3600, self.usd_per_device_hour
        usd = None if price is None else hours * price
        return Budget(self.goal, steps, seconds, devices, hours, usd)


def parse_goal(text: str | float) -> Goal:
    """Read ``300B`` (tokens), ``10M samples``, ``3 epochs`` or ``5000 steps``."""
    match = _WRITTEN.fullmatch(str(text))
    word = match[3].lower() if match else ""
    letter = match[2].lower() if match else ""
    # Of `3 tokens`, the t is no trillion.
    unit = _unit(word) or _unit(letter + word)
    factor = _FACTORS[letter] if _unit(word) else 1
    number = float(re.sub("[_,]", "", match[1])) * factor if match else 0.0
    if unit is None or not 0 < number <= _MOST:
        raise UserError(
            f"`{text!s:.60}` is not an amount of training",
            why="an amount is a positive number, with k, M, B or T for thousands to trillions, of "
            f"{', '.join(get_args(Unit))}",
            fix=(unit is None and did_you_mean(word, get_args(Unit)))
            or "write 300B (tokens), 10M samples, 3 epochs or 5000 steps",
        )
    return Goal(number, unit)


def parse_price(price: str | float) -> float:
    """Read a price in USD per device and hour: ``2.5`` or ``$2.50``."""
    try:
        number = float(str(price).strip().removeprefix("$").removesuffix("$"))
    except ValueError:
        number = math.nan
    if isinstance(price, bool) or not 0 <= number < math.inf:
        raise UserError(
            f"`{price!s:.60}` is not a price", fix="write USD per device and hour, such as 2.5"
        )
    return number


def _unit(word: str) -> Unit | None:
    known = {unit: unit for unit in get_args(Unit)} | _SHORT
    return known.get(word) or known.get(f"{word}s" if word else "…")


def _figure(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
