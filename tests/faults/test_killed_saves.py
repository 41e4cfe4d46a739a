"""Rows 1, 2 and 4: processes are killed at random moments, and no checkpoint is ever in doubt.

`MESHWRIGHT_KILLS` sets how many are killed at random times, 60 by default.
"""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from faults import forked_training
from faults.forked_training import temporary
from faults.harness import LIMIT_SECONDS, Launch, checkpoints, launch, metrics, read_all

pytestmark = pytest.mark.full

FORKED, SOME, LAUNCHED = 45, 15, 5
"""Kills of processes that are forked, which start within a second, of which the fault tests have
only some, and of those of a launch."""
FORKED_SECONDS = 3600
"""A limit for a machine that is very busy; on two idle cores they take two minutes."""


KILLS = int(os.environ.get("MESHWRIGHT_KILLS", "60"))


def train_forked(folder: Path, kills: int, steps: int, anytime: int = 0) -> str:
    """Train in forked processes of which some are killed; return what the mother says."""
    done = subprocess.run(
        [
            *(sys.executable, forked_training.__file__, str(folder)),
            *map(str, (kills, 1, steps, anytime)),
        ],
        capture_output=True,
        text=True,
        timeout=FORKED_SECONDS,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_NUM_CPU_DEVICES": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kills", [pytest.param(SOME, marks=pytest.mark.faults), FORKED])
def test_sigkill_at_random_moments_of_saves(tmp_path, kills):
    steps = 2 * kills + 10
    said = train_forked(tmp_path / "killed", kills=kills, steps=steps)
    assert said.count("kill ") == kills
    # Most kills leave a part of a checkpoint, or there would be nothing to see.
    assert said.count("tmp") > kills // 2, said
    train_forked(tmp_path / "whole", kills=0, steps=steps)
    found, expected = metrics(tmp_path / "killed"), metrics(tmp_path / "whole")
    assert list(expected) == list(range(1, steps + 1))
    assert found == expected
    assert checkpoints(tmp_path / "killed") == checkpoints(tmp_path / "whole")


@pytest.mark.faults
def test_sigkill_at_random_times_loses_and_changes_nothing(tmp_path):
    # More than are done before the last kill.
    steps = 4 * KILLS
    said = train_forked(tmp_path / "killed", kills=KILLS, steps=steps, anytime=1)
    assert said.count("kill ") == KILLS
    train_forked(tmp_path / "whole", kills=0, steps=steps)
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    killed, whole = (read_all(tmp_path / name) for name in ("killed", "whole"))
    assert killed.keys() == whole.keys()
    for step in whole:
        for group, arrays in whole[step].items():
            for path, array in arrays.items():
                np.testing.assert_array_equal(killed[step][group][path], array, err_msg=path)


def kill_the_next(running: Launch, chance: random.Random) -> None:
    """Kill a random process of a launch in a save that follows a complete one."""
    before, until = max(checkpoints(running.run), default=0), time.monotonic() + LIMIT_SECONDS
    while max(checkpoints(running.run), default=0) == before or not temporary(running.run):
        assert time.monotonic() < until, running.err
        assert running.process.poll() is None, running.err
        time.sleep(0.002)
    workers = running.workers()
    os.kill(workers[chance.choice(sorted(workers))], 9)
    while set(workers.values()) & set(running.workers().values()):
        assert time.monotonic() < until, running.err
        time.sleep(0.02)


@pytest.mark.faults
def test_sigkill_in_5_saves_of_a_launch(tmp_path, undisturbed):
    flags, words = (f"--restarts={LAUNCHED}", "--grace=1"), ("checkpoint.every=1",)
    running = launch(tmp_path, *flags, nprocs=3, steps=60, words=words)
    try:
        for number in range(LAUNCHED):
            kill_the_next(running, random.Random(number))
            assert sorted(read_all(running.run)) == checkpoints(running.run)
        running.finish()
    finally:
        running.kill()
    assert running.code == 0, running.err
    assert f"restart {LAUNCHED} of {LAUNCHED}" in running.err
    assert all(name.isdecimal() for name in os.listdir(running.run / "checkpoints"))
    undisturbed(3, 60).check_same(running)
