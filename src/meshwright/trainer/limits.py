"""When a run ends: after a number of steps, a time, a signal, or when a callback asks."""

import itertools
import json
import logging
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from meshwright.errors import EnvironmentProblem, Setting
from meshwright.processes import TIMEOUT_SECONDS, gather, is_main, process_count, process_index
from meshwright.runtime.interrupt import Interrupt
from meshwright.runtime.jax_internals import distributed_state
from meshwright.text.units import numbered
from meshwright.trainer.callbacks import Callbacks
from meshwright.trainer.run_progress import ALL_DONE, Stop, StopReason

POLL_SECONDS = 0.2
"""How often a thread looks whether another process asks to stop."""

logger = logging.getLogger("meshwright.trainer")

_numbers = itertools.count()


@dataclass
class Limits:
    """Decides when a run ends, identically in every process; process 0 has the clock.

    With ``whole_data``, the run is complete when the data ends.
    """

    steps: int | None
    seconds: float | None
    callbacks: Callbacks
    interrupt: Interrupt = field(default_factory=Interrupt)
    whole_data: bool = False

    def __post_init__(self) -> None:
        self._together = StopTogether(self.interrupt) if process_count() > 1 else None
        self._started = time.monotonic()

    @contextmanager
    def watching(self) -> Generator[None]:
        """Listen for signals to other processes inside the block."""
        if self._together is None:
            yield
            return
        with self._together.listening():
            yield

    def end_of_data(self, last: int) -> None:
        """Note that this process has no batch after a step; all processes then stop there."""
        if self._together is not None:
            self._together.end_of_data(last)

    @property
    def urgent(self) -> bool:
        """Whether to call `stop` at once; several processes agree in `before_step`."""
        return process_count() == 1 and bool(self.interrupt.reason)

    def before_step(self, step: int) -> Stop | None:
        """Return why not to begin this step; the same in every process."""
        if self._together is not None:
            return self._together.before_step(step)
        return self._signalled()

    def stop(self) -> Stop | None:
        """Return why to stop now, identically in every process; None to continue.

        Every process must call it after the same step. A signal to one of them stops all.
        """
        own = self._signalled() or self._asked() or self._out_of_time()
        if process_count() == 1:
            return own
        sent = None if own is None else [own.reason.value, own.text]
        stops = [Stop(StopReason(each[0]), each[1]) for each in gather(sent) if each]
        return next((each for each in stops if each.interrupted), next(iter(stops), None))

    def _signalled(self) -> Stop | None:
        reason = self.interrupt.reason
        return Stop(StopReason.SIGNAL, reason) if reason else None

    def _asked(self) -> Stop | None:
        reason = self.callbacks.should_stop()
        return Stop(StopReason.CALLBACK, reason) if reason else None

    def _out_of_time(self) -> Stop | None:
        if self.seconds is None or not is_main():
            return None
        if time.monotonic() - self._started < self.seconds:
            return None
        return Stop(StopReason.OUT_OF_TIME, f"{self.seconds:g} s have passed")


class StopTogether:
    """Agrees with the other processes on the last step once one of them gets a signal.

    The process with the signal asks the others through the coordinator's key-value store, which a
    thread of each process reads now and then; steps themselves never wait for it. Once asked,
    each process publishes the last step it has begun and begins no other until all have
    published theirs. The run then ends after the largest of these numbers. The threads do not
    depend on the training loops, so they answer even while a loop waits for a step that another
    process has not begun.

    A process whose data end asks in the same way, and the run ends after its last batch. It has as
    many batches in hand as the others can run ahead of it, so none of them has begun a later step.

    Every process must make these objects in the same order: they meet under their number.
    """

    def __init__(self, interrupt: Interrupt, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._interrupt, self._timeout = interrupt, timeout_seconds
        self._prefix = f"meshwright-stop/{next(_numbers)}"
        self._client: Any = distributed_state().client
        self._closed = threading.Event()
        self._changed = threading.Condition()
        # Under the condition: the last step begun here, whether it has been published, and what
        # all have agreed on.
        self._begun = 0
        self._end: int | None = None
        self._published = False
        self._last: int | None = None
        self._reason = ""

    @contextmanager
    def listening(self) -> Generator[None]:
        """Listen in a thread until the block ends."""
        thread = threading.Thread(target=self._listen, name="stop-together", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._closed.set()
            thread.join()

    def end_of_data(self, last: int) -> None:
        """Note that this process has no batch after a step, and begin none until all know it."""
        text = "process %d has no batch after step %d: all processes stop there at the latest"
        logger.warning(text, process_index(), last)
        with self._changed:
            self._end = last
            self._check_end()

    def before_step(self, step: int) -> Stop | None:
        """Return why not to begin this step; None to begin it.

        Waits if the last step is being agreed on.
        """
        with self._changed:
            until = time.monotonic() + self._timeout
            while (self._published or self._end is not None) and self._last is None:
                if time.monotonic() > until:
                    raise self._not_agreed()
                self._changed.wait(1.0)
            self._check_end()
            if self._last is not None and step > self._last:
                return Stop(StopReason.SIGNAL, self._reason) if self._reason else ALL_DONE
            self._begun = step
        return None

    def _check_end(self) -> None:
        """Raise if others have begun steps, or agreed on some, for which this one has no batch."""
        if self._end is None or self._last is None or self._end >= self._last:
            return
        raise EnvironmentProblem(
            f"process {process_index()} has no batch for step {self._end + 1}",
            why=f"the other processes have batches up to step {self._last}",
            fix="give all processes the same number of batches, or write "
            f"{Setting('training.steps', self._end)}",
        )

    def _listen(self) -> None:
        try:
            reason = self._wait_for_request()
            if reason is None:
                return
            with self._changed:
                self._published = True
                answer = json.dumps([self._begun, self._end])
            self._client.key_value_set(f"{self._prefix}/begun/{process_index()}", answer)
            last = self._wait_for_others(signalled=bool(reason))
        except RuntimeError:
            # The coordinator is gone, and so is the run.
            return
        with self._changed:
            self._last, self._reason = last, reason
            self._changed.notify_all()

    def _wait_for_request(self) -> str | None:
        """Return the reason to stop once a process has one; None if the run ends before.

        It is empty if the data of a process end.
        """
        while not self._closed.wait(POLL_SECONDS):
            if self._interrupt.reason or self._end is not None:
                self._request(self._interrupt.reason)
            for _, text in self._client.key_value_dir_get(f"{self._prefix}/request"):
                return json.loads(text)
        return None

    def _request(self, reason: str) -> None:
        try:
            self._client.key_value_set(f"{self._prefix}/request/0", json.dumps(reason))
        except RuntimeError as error:
            # Another process was faster.
            if "ALREADY_EXISTS" not in str(error):
                raise

    def _wait_for_others(self, *, signalled: bool) -> int | None:
        """Return the last step: begun by any, or with a batch in all; None if the run ends."""
        while not self._closed.wait(POLL_SECONDS / 10):
            texts = self._client.key_value_dir_get(f"{self._prefix}/begun")
            if len(texts) == process_count():
                answers = [json.loads(text) for _, text in texts]
                begun = max(begun for begun, _ in answers)
                ends = [end for _, end in answers if end is not None]
                return begun if signalled or not ends else max(begun, min(ends))
        return None

    def _not_agreed(self) -> EnvironmentProblem:
        texts = self._client.key_value_dir_get(f"{self._prefix}/begun")
        heard = {int(key.rpartition("/")[2]) for key, _ in texts}
        absent = numbered("process", [n for n in range(process_count()) if n not in heard])
        return EnvironmentProblem(
            f"{absent} did not confirm within {self._timeout:g} s that it stops",
            why="all processes were asked to stop after the same step",
            fix=f"look at the output of {absent}",
        )
