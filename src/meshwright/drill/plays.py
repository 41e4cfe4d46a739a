"""What most faults have in common: training goes on by itself, or the same command resumes it."""

from __future__ import annotations

from meshwright.drill.fault import Missed
from meshwright.drill.launched import Launched
from meshwright.drill.scene import STOP_SECONDS, Scene

SAME = "losses and state bit-equal"
_RESTART = r"restart 1 of 3 in \d+ s, from the (?:checkpoint of update (\d+)|beginning)"


def restarted(scene: Scene, pattern: str, *flags: str, within: float = STOP_SECONDS) -> str:
    """Play a fault after which all processes start again by themselves.

    Args:
        scene: where it happens.
        pattern: how the launcher names the process, the update and the cause.
        flags: further flags of `launch`.
        within: seconds in which it has to notice.
    """
    launched = scene.train("--restarts=3", *flags, inject=True)
    launched.check_code(0)
    seconds = launched.noticed(pattern, within)
    update = int(launched.find(_RESTART)[1] or 0)
    check_none_lost(launched, update)
    scene.check_same()
    return f"noticed after {seconds:.1f} s, restarted from update {update}, {SAME}"


def resumed(scene: Scene, launched: Launched, happened: str) -> str:
    """Resume a training that ended, and check that it is as if nothing had happened."""
    update = scene.resume()
    check_none_lost(launched, update)
    scene.check_same()
    return f"{happened}, resumed from update {update}, {SAME}"


def check_none_lost(launched: Launched, update: int) -> None:
    """Raise if training went on from an earlier checkpoint than the newest committed one."""
    newest = max((max(note["committed"], default=0) for note in launched.injected), default=0)
    if update < newest:
        raise Missed(f"went on from update {update}, though update {newest} was committed")
