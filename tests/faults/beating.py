"""Processes that beat as a training loop does, without JAX: they start within a second."""

import subprocess
import sys
import textwrap

LIMIT_SECONDS = 60
LOOP = """
import ctypes, os, signal, sys, time
from pathlib import Path
from meshwright.runtime.attempts import EarlierAttempts
from meshwright.runtime.heartbeat import Doing, own_heartbeat

rank, earlier = os.environ["RANK"], EarlierAttempts.from_environment()
attempt = earlier.count + 1
beat = own_heartbeat()
beat.begin()
beat.report(run_dir=str(Path.cwd()))
beat.start_from(0)

def step(number, seconds=0.01):
    beat.mark(Doing.TRAINING, number)
    time.sleep(seconds)

def commit(number):
    beat.saved(number)
    Path(f"checkpoints/{number}").mkdir(parents=True, exist_ok=True)
"""


def launch_beating(folder, script: str, *flags: str) -> tuple[int, str]:
    """Launch two processes that beat as a training loop does."""
    (folder / "work.py").write_text(LOOP + textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, "-m", "meshwright.launch", "--nprocs=2", *flags, "work.py"],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
        cwd=folder,
    )
    return done.returncode, done.stderr
