"""Resuming with another number of processes, on the same mesh."""

from __future__ import annotations

from meshwright.drill.fault import Fault, Missed
from meshwright.drill.scene import Scene
from meshwright.text.units import counted

ROUNDING = {"no": 1e-4, "bf16": 3e-2, "fp16": 3e-3}
"""By precision, how much losses may differ: other numbers of processes add up in other orders."""


def _sizes(scene: Scene) -> tuple[int, int] | None:
    """Return another number of processes and their devices; None if there is none."""
    total = scene.num_devices
    if scene.nprocs > 1:
        return 1, total
    return (2, total // 2) if total % 2 == 0 else None


def _why_not(scene: Scene) -> str:
    if _sizes(scene) is not None:
        return ""
    return f"{counted(scene.num_devices, 'device')} cannot be divided over 2 processes"


def _play(scene: Scene) -> str:
    sizes = _sizes(scene)
    assert sizes is not None
    update = scene.prepare(checkpoints=2)
    launched = scene.train(layout=scene.configuration.layout(*sizes))
    launched.check_code(0)
    launched.find(rf"continuing after update {update}\b")
    most = ROUNDING[scene.undisturbed.plan["precision"]]
    difference = scene.run.difference(scene.undisturbed)
    if difference > most:
        raise Missed(f"losses differ by {difference:.1e}, more than {most:g}")
    found = f"within {difference:.1e}" if difference else "equal"
    return f"{scene.nprocs} → {sizes[0]} processes from update {update}, losses {found}"


FAULTS = (
    Fault(
        "resize",
        "the run resumes with another number of processes",
        "the same samples, and losses that differ by rounding",
        _play,
        why_not=_why_not,
        starts=1,
    ),
)
