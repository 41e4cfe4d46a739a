"""The time limit of a SLURM job, compared with the moment at which the job is told to save."""

from __future__ import annotations

import re
from collections.abc import Sequence

from meshwright.errors import UserError
from meshwright.text.units import counted

TIME = re.compile(r"(?P<days>\d+-)?(?P<parts>\d+(:\d{1,2}){0,2})")
"""Minutes, minutes:seconds or hours:minutes:seconds; with days, hours come first."""
_SIGNAL_LEAD = 60
"""How many seconds before the end SLURM sends a signal for which no time is given."""


def limit_seconds(text: str) -> int | None:
    """Return a time limit as SLURM reads it, in whole minutes; None if there is none."""
    written = TIME.fullmatch(text)
    if written is None:
        return None
    parts = [int(part) for part in written["parts"].split(":")]
    if written["days"]:
        hours, minutes, seconds = [*parts, 0, 0][:3]
        hours += 24 * int(written["days"][:-1])
    else:
        first = [0] if len(parts) < 3 else []
        hours, minutes, seconds = [*first, *parts, 0][:3]
    # SLURM rounds up to minutes, and takes zero for no limit.
    return -(-(3600 * hours + 60 * minutes + seconds) // 60) * 60 or None


def check_time_to_save(time: str, save_seconds: int, sbatch: Sequence[str]) -> None:
    """Raise if a job would be told to save before it starts.

    Args:
        time: the time limit; empty for that of the partition.
        save_seconds: how long before its end the job is told to save.
        sbatch: further options of sbatch, which may replace both.
    """
    lead = save_seconds
    for option in sbatch:
        name, _, value = option.partition("=")
        if name == "--time":
            time = value
        elif name == "--signal":
            _, at, seconds = value.partition("@")
            lead = int(seconds) if at and seconds.isdecimal() else _SIGNAL_LEAD
    limit = limit_seconds(time)
    if limit is None or limit > lead:
        return
    raise UserError(
        f"--time {time} is too short for a job that is told to save {lead} seconds before its end",
        why=f"it is {counted(limit, 'second')}, so the job would be told so as soon as it starts",
        fix=f"write a longer --time, or --save-seconds {max(limit // 3, 1)}",
    )
