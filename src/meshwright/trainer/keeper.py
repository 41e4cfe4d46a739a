"""The keeper: saves a run's state now and then, without holding it up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from meshwright.checkpoint.store import CheckpointStore, Passport, Saved
from meshwright.errors import EnvironmentProblem, first_line
from meshwright.step.canonical import CanonicalForm
from meshwright.step.state import TrainState

Tell = Callable[[str, int, str, dict[str, Any]], None]
"""Tells an event: its kind, its update, a sentence, and details."""


class Keeper(Protocol):
    """Whoever keeps the states of a run."""

    def due(self, update: int) -> bool:
        """Whether the state after this update is to be saved."""
        ...

    def save(self, state: TrainState, update: int, *, loss: float | None) -> bool:
        """Save the state; False if it is saved already, or not at all."""
        ...

    def poll(self) -> None:
        """Tell of what is on disk since the last call."""
        ...

    def finish(self) -> None:
        """Wait until everything is on disk."""
        ...

    def abandon(self) -> None:
        """Let go after a failure; what is being written is still written."""
        ...


class NullKeeper:
    """Keeps nothing."""

    def due(self, update: int) -> bool:
        """Return False."""
        return False

    def save(self, state: TrainState, update: int, *, loss: float | None) -> bool:
        """Return False."""
        return False

    def poll(self) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        """Do nothing."""


class CheckpointKeeper:
    """Saves checkpoints in the background.

    A save that fails is told as a warning and tried again at the next one; if the last one fails,
    the run fails.

    Args:
        store: where they go.
        form: how states are written.
        passport: gives what goes with the state of an update.
        every: updates between two checkpoints.
        last: the update of the newest checkpoint there is already.
        tell: tells what was saved.
    """

    def __init__(
        self,
        store: CheckpointStore,
        form: CanonicalForm,
        passport: Callable[[int], Passport],
        *,
        every: int,
        last: int | None,
        tell: Tell,
    ) -> None:
        self._store, self._form, self._passport = store, form, passport
        self._every, self._last, self._tell = every, last, tell
        self._blocked: dict[int, float] = {}

    def due(self, update: int) -> bool:
        """Whether it is a multiple of ``every``."""
        return update % self._every == 0

    def save(self, state: TrainState, update: int, *, loss: float | None) -> bool:
        """Copy the state and hand it to the background."""
        self.poll()
        if update == self._last:
            return False
        started = time.perf_counter()
        before = self._store.save(self._form.copy(state), self._passport(update), loss=loss)
        self._blocked[update] = time.perf_counter() - started
        self._report(before)
        self._last = update
        return True

    def poll(self) -> None:
        """Tell of the save that is done."""
        self._report(self._store.finished())

    def finish(self) -> None:
        """Wait for the last save; its failure is the run's."""
        last = self._store.close()
        self._report(last)
        if last is not None and last.error is not None:
            raise EnvironmentProblem(
                f"the state after {last.update} updates could not be saved",
                why=_reason(last.error),
                fix="make room or choose another hydra.run.dir, and resume from the checkpoint "
                "before it",
            )

    def abandon(self) -> None:
        """Wait for what is being written, and say how it went."""
        self._report(self._store.close())

    def _report(self, saved: Saved | None) -> None:
        if saved is None:
            return
        if saved.error is None:
            blocked = self._blocked.pop(saved.update, 0.0)
            self._tell(
                "checkpoint",
                saved.update,
                f"saved update {saved.update} in {saved.seconds:.2f} s, training held up for "
                f"{blocked:.3f} s",
                {"seconds": saved.seconds, "blocked_seconds": blocked},
            )
        else:
            self._last = None
            self._tell(
                "warning",
                saved.update,
                f"update {saved.update} could not be saved: {_reason(saved.error)}",
                {},
            )


def _reason(error: Exception) -> str:
    return first_line(error)
