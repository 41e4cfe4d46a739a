"""How long to train: steps, epochs or time."""

import math
import re
from dataclasses import dataclass

from meshwright.config.argument_checks import check_kind
from meshwright.errors import ANY, Setting, UserError

_SECONDS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Duration:
    """How long to train, in steps, passes over the data, or seconds of process 0; one is set."""

    steps: int | None = None
    epochs: float | None = None
    seconds: float | None = None

    def total_steps(self, *, num_samples: int | None, batch_size: int) -> int | None:
        """Return the number of steps, rounded up; None for a duration in time."""
        if self.epochs is None:
            return self.steps
        if num_samples is None:
            raise UserError(
                f"{self.epochs:g} epochs cannot be counted",
                why="the data does not say how many samples it has",
                fix=f"write {Setting('training.steps', ANY)} or "
                f"{Setting('training.max_duration', '30min')}",
            )
        return max(1, math.ceil(self.epochs * num_samples / batch_size))


def parse_duration(text: str) -> Duration:
    """Read ``1000st``, ``2ep``, ``90s``, ``30min``, ``12h`` or ``2d``."""
    check_kind("max_duration", text, str, 'write "1000st", "2ep" or "30min"')
    match = _WRITTEN.fullmatch(text)
    number, unit = (float(match[1]), match[2].lower()) if match else (0.0, "")
    if number > 0 and unit == "st" and number == int(number) and number < 2**31:
        return Duration(steps=int(number))
    if number > 0 and unit == "ep":
        return Duration(epochs=number)
    if number > 0 and unit in _SECONDS:
        return Duration(seconds=number * _SECONDS[unit])
    raise UserError(
        f"max_duration={text:.60} is not a duration",
        why="a duration is a positive number and a unit: st (steps), ep (epochs), s, min, h or d",
        fix="write 1000st, 2ep or 30min",
    )
