"""Row 4: processes are killed at random moments of 50 saves, and no checkpoint is ever in doubt."""

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faults.harness import Launch, checkpoints, launch, metrics, read_all

pytestmark = [pytest.mark.full, pytest.mark.faults]

SEEDS = (1, 2)
"""Each is a launch of its own; both run at once, because starting is mostly waiting."""
KILLS = 25
LONGEST_SAVE = 0.3
"""Seconds within which a save of the small model is usually complete."""
STEPS = 90
ATTEMPT_SECONDS = 240


def temporary(run: Path) -> set[str]:
    """Return the saves in progress, or what was left of them."""
    folder = run / "checkpoints"
    try:
        return {name for name in os.listdir(folder) if "orbax-checkpoint-tmp" in name}
    except FileNotFoundError:
        return set()


def kill_in_a_save(running: Launch, chance: random.Random, save: int) -> None:
    """Kill a random process in the attempt's n-th save, or in one after it."""
    until = time.monotonic() + ATTEMPT_SECONDS
    before, seen = temporary(running.run), set[str]()
    while time.monotonic() < until:
        there = temporary(running.run)
        before, found = before & there, there - before
        new, seen = found - seen, seen | found
        # What the attempt before had left is swept before anything is saved.
        assert not (before and new), (before, new)
        if new and len(seen) >= save:
            workers = running.workers()
            time.sleep(chance.uniform(0, LONGEST_SAVE))
            # Between two saves there is nothing to disturb.
            if temporary(running.run) & found:
                os.kill(workers[chance.choice(sorted(workers))], signal.SIGKILL)
                wait_until_gone(running, set(workers.values()))
                return
        assert running.process.poll() is None, running.err
        time.sleep(0.002)
    raise AssertionError(f"no save to kill:\n{running.err}")


def wait_until_gone(running: Launch, pids: set[int]) -> None:
    until = time.monotonic() + ATTEMPT_SECONDS
    while pids & set(running.workers().values()):
        assert time.monotonic() < until, running.err
        time.sleep(0.02)


def disturb(folder: Path, seed: int) -> Launch:
    """Run a training whose processes are killed in random saves, until it is complete."""
    chance = random.Random(seed)
    folder.mkdir()
    words = ("checkpoint.every=1",)
    flags = (f"--restarts={KILLS}", "--grace=1")
    running = launch(folder, *flags, nprocs=3, steps=STEPS, words=words)
    newest, useless = -1, 0
    try:
        for _ in range(KILLS):
            # Three restarts without a new checkpoint would end the launch.
            save = chance.randint(1 if useless == 0 else 2, 3)
            kill_in_a_save(running, chance, save)
            listed = checkpoints(running.run)
            assert max(listed, default=-1) >= newest
            useless = 0 if max(listed, default=-1) > newest else useless + 1
            newest = max(listed, default=-1)
            # Whatever is listed is complete.
            assert sorted(read_all(running.run)) == listed
        return running.finish()
    finally:
        running.kill()


def test_sigkill_at_50_random_moments_of_saves(tmp_path, undisturbed):
    reference = undisturbed(3, STEPS).metrics
    with ThreadPoolExecutor(len(SEEDS)) as threads:
        runs = list(threads.map(lambda seed: disturb(tmp_path / str(seed), seed), SEEDS))
    for done in runs:
        assert done.code == 0, done.err
        assert done.err.count("was killed by SIGKILL at update") >= KILLS
        assert f"restart {KILLS} of {KILLS}" in done.err
        assert metrics(done.run) == reference
        assert all(name.isdecimal() for name in os.listdir(done.run / "checkpoints"))
        undisturbed(3, STEPS).check_same(done)
