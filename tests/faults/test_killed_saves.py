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
ATTEMPT_SECONDS = 120


def temporary(run: Path) -> set[str]:
    """Return the saves in progress, or what was left of them."""
    folder = run / "checkpoints"
    try:
        return {name for name in os.listdir(folder) if "orbax-checkpoint-tmp" in name}
    except FileNotFoundError:
        return set()


def kill_in_a_save(running: Launch, chance: random.Random, save: int) -> set[str]:
    """Kill a random process in the attempt's n-th save, or in one after it; return what is left."""
    until = time.monotonic() + ATTEMPT_SECONDS
    before, seen = temporary(running.run), set[str]()
    while time.monotonic() < until:
        found = temporary(running.run) - before
        if not found:
            before &= temporary(running.run)
        new, seen = found - seen, seen | found
        if new and len(seen) >= save:
            workers = running.workers()
            time.sleep(chance.uniform(0, LONGEST_SAVE))
            # Between two saves there is nothing to disturb.
            if temporary(running.run) & found:
                os.kill(workers[chance.choice(sorted(workers))], signal.SIGKILL)
                return wait_until_gone(running, set(workers.values()))
        assert running.process.poll() is None, running.err
        time.sleep(0.002)
    raise AssertionError(f"no save to kill:\n{running.err}")


def wait_until_gone(running: Launch, pids: set[int]) -> set[str]:
    until = time.monotonic() + ATTEMPT_SECONDS
    while pids & set(running.workers().values()):
        assert time.monotonic() < until, running.err
        time.sleep(0.02)
    return temporary(running.run)


def disturb(folder: Path, seed: int) -> Launch:
    """Run a training whose processes are killed in random saves, until it is complete."""
    chance = random.Random(seed)
    folder.mkdir()
    words = ("checkpoint.every=1",)
    flags = (f"--restarts={KILLS}", "--grace=1")
    running = launch(folder, *flags, nprocs=3, steps=STEPS, words=words)
    newest, useless, left = -1, 0, set[str]()
    try:
        for _ in range(KILLS):
            # Three restarts without a new checkpoint would end the launch.
            save = chance.randint(1 if useless == 0 else 2, 3)
            left_before, left = left, kill_in_a_save(running, chance, save)
            listed = checkpoints(running.run)
            assert max(listed, default=-1) >= newest
            useless = 0 if max(listed, default=-1) > newest else useless + 1
            newest = max(listed, default=-1)
            # Whatever is listed is complete, and what the attempt before had left is swept.
            assert sorted(read_all(running.run)) == listed
            assert not left_before & left
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
        assert temporary(done.run) == set()
        undisturbed(3, STEPS).check_same(done)
