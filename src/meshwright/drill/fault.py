"""A fault: its name, how it is made to happen in a process, and what has to come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.drill.hooks import Hooks
    from meshwright.drill.scene import Scene


class Missed(Exception):
    """Something did not come out as it has to; the message says what."""


def _nothing(hooks: Hooks) -> None:
    """Inject nothing: the fault is in the files or in the command."""


def _always(scene: Scene) -> str:
    return ""


def several_processes(scene: Scene) -> str:
    """Return why a fault among processes cannot happen here; empty if it can."""
    return "" if scene.nprocs > 1 else "there is one process; --nprocs 2 starts another"


@dataclass(frozen=True)
class Fault:
    """A fault of a drill.

    Attributes:
        name: what ``--only`` calls it.
        what: what happens.
        expected: what has to come of it.
        play: makes it happen, checks what comes of it (`Missed` if something else does), and
            returns what happened.
        inject: called in every process of the training before it starts.
        why_not: why the fault cannot happen to a configuration; empty if it can.
        starts: how often processes are started, to estimate the time.
    """

    name: str
    what: str
    expected: str
    play: Callable[[Scene], str]
    inject: Callable[[Hooks], None] = _nothing
    why_not: Callable[[Scene], str] = _always
    starts: float = 2.0
