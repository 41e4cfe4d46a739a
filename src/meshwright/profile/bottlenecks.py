"""Advice from a profile: a sentence with the measured share, and what to try."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from meshwright.errors import Setting, Spelling, current_spelling
from meshwright.mesh.axes import AXES, MESH_AXES

ENOUGH_COMPUTE = 0.8
MOST_COMMUNICATION = 0.3
NOTICEABLE = 0.1
"""Shares of the time above this are mentioned, if anything is wrong."""
EVEN = 1.2
"""Compute time of the busiest device over the mean; more is uneven."""

_SAMPLES = Setting("training.micro_batch_size")


def axes_text(axes: Sequence[str]) -> str:
    """Return mesh axes as text, such as ``data×fsdp``; ``unknown`` without any."""
    return "×".join(axes) or "unknown"


def advise(
    shares: Mapping[str, float],
    exposed: Mapping[tuple[str, ...], float],
    *,
    load_balance: float,
    virtual: bool,
) -> list[str]:
    """Return advice; nothing if devices compute nearly all the time.

    Args:
        shares: shares of the wall time.
        exposed: the share of the wall time spent waiting for communication, by mesh axes.
        load_balance: compute time of the busiest device over the mean.
        virtual: whether the devices are virtual, so that their times mean little.
    """
    advice = [*_parts(shares, exposed), *_balance(load_balance)]
    if advice and virtual:
        advice.append(
            "these are virtual devices that share one processor: waiting for a turn counts as "
            "communication, and only real devices show real shares"
        )
    return advice


def _parts(shares: Mapping[str, float], exposed: Mapping[tuple[str, ...], float]) -> Iterator[str]:
    compute, communication = shares["compute"], shares["communication"]
    if compute >= ENOUGH_COMPUTE and communication <= MOST_COMMUNICATION:
        return
    if compute < ENOUGH_COMPUTE:
        yield f"devices compute {compute:.0%} of the time, less than {ENOUGH_COMPUTE:.0%}"
    if communication > NOTICEABLE:
        yield _communication(communication, exposed)
    if shares["input_wait"] > NOTICEABLE:
        yield (
            f"{shares['input_wait']:.0%} of the time devices wait for data; try {_faster_data()}"
        )
    if shares["idle"] > NOTICEABLE:
        yield (
            f"{shares['idle']:.0%} of the time devices are idle; try more samples per "
            f"device ({_SAMPLES}), and logging less often ({Setting('tracking.log_every')})"
        )


def _communication(share: float, exposed: Mapping[tuple[str, ...], float]) -> str:
    limit = f", more than {MOST_COMMUNICATION:.0%}" if share > MOST_COMMUNICATION else ""
    text = f"{share:.0%} of the time devices wait for communication{limit}"
    if not exposed:
        return text
    axes = max(exposed, key=lambda axes: exposed[axes])
    innermost = [MESH_AXES[axis] for axis in reversed(AXES) if axis in axes]
    remedy = next((axis.remedy() for axis in innermost if axis.remedy), "")
    if not remedy:
        return f"{text}; try more samples per device ({_SAMPLES})"
    return f"{text}, most over {axes_text(axes)} ({exposed[axes]:.0%}); try {remedy}"


def _faster_data() -> str:
    if current_spelling() is Spelling.PYTHON:
        # Data from Python is read as its own code reads it.
        return "data prepared beforehand"
    return "more data.workers, a larger data.prefetch, or data prepared beforehand"


def _balance(load_balance: float) -> Iterator[str]:
    if load_balance > EVEN:
        yield (
            f"the busiest device computes {load_balance:.2f} times the mean; look for experts, "
            "stages or samples of uneven size, or a device that is slower than the others"
        )
