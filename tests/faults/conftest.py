"""What the tests of faults share: one undisturbed run per layout, for the whole session."""

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from faults.harness import (
    STEPS,
    Launch,
    checkpoints,
    launch,
    metrics,
    read_all,
    stop_ignoring_interrupts,
)


@dataclass(frozen=True)
class Undisturbed:
    """A run that nothing happened to.

    Attributes:
        run: its folder.
        metrics: what was computed in each step.
    """

    run: Path
    metrics: dict[int, dict[str, float]]

    def check_same(self, other: Launch) -> None:
        """Check that a disturbed run has come out as this one, bit for bit."""
        assert metrics(other.run) == self.metrics
        last = max(self.metrics)
        assert max(checkpoints(other.run)) == last
        own, found = read_all(self.run)[last], read_all(other.run)[last]
        assert own.keys() == found.keys()
        for group in own:
            assert own[group].keys() == found[group].keys()
            for path in own[group]:
                np.testing.assert_array_equal(own[group][path], found[group][path], err_msg=path)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> Callable[..., Undisturbed]:
    """Return the undisturbed run of a number of processes and steps, made once per session."""
    made: dict[tuple[int, int], Undisturbed] = {}

    def get(nprocs: int = 2, steps: int = STEPS) -> Undisturbed:
        if (nprocs, steps) not in made:
            folder = tmp_path_factory.mktemp(f"undisturbed-{nprocs}-{steps}")
            done = launch(folder, nprocs=nprocs, steps=steps).finish()
            assert done.code == 0, done.err
            found = metrics(done.run)
            assert list(found) == list(range(1, steps + 1))
            made[nprocs, steps] = Undisturbed(done.run, found)
        return made[nprocs, steps]

    return get


@pytest.fixture(autouse=True)
def interrupts():
    """Let Ctrl-C reach what a test starts."""
    before = signal.getsignal(signal.SIGINT)
    stop_ignoring_interrupts()
    yield
    signal.signal(signal.SIGINT, before)
