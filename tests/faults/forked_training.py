"""Trains in three forked processes, and kills them in random saves or at random times.

A mother process imports everything once, and never starts JAX's devices, so that it may fork: the
processes start within a second.

    python forked_training.py FOLDER KILLS SEED STEPS [ANYTIME]
"""

import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import optax
from faults.own_training import Net, data, loss

import meshwright as mw
from meshwright.checkpoint import CheckpointReader
from meshwright.data import loader
from meshwright.distributed import setup_multinode
from meshwright.trainer import trainer as training
from meshwright.trainer import training_run

IMPORTED = (loader, training, training_run)
"""What a training would import only when it begins."""
PROCESSES = 3
LONGEST_SAVE = 0.3
"""Seconds within which a save of the small model is usually complete."""
ATTEMPT_SECONDS = 240
TRAINING = 0.75
"""The share of kills at any time that wait until the processes have saved something."""


def train(folder: Path, steps: int, rank: int, port: int) -> None:
    """Train as one of the processes."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(PROCESSES), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    setup_multinode()
    trainer = mw.Trainer(
        model=lambda rngs: Net(rngs=rngs),
        loss=loss,
        optimizer=optax.adamw(0.01),
        mesh=f"fsdp={PROCESSES}",
        sharding=mw.ShardingConfig(min_shard_size=0),
        log_every=1,
    )
    trainer.fit(
        data, batch_size=12, steps=steps, run_dir=folder, checkpoint=mw.CheckpointConfig(every=1)
    )


def read_all(folder: Path) -> None:
    """Read every checkpoint that is listed, comparing checksums."""
    reader = CheckpointReader(folder / "checkpoints")
    for step in reader.steps():
        reader.metadata(step)
        reader.read(step, reader.shapes(step))


def fork(work: Callable[[], None]) -> int:
    """Return the number of a new process that does the work; its exit code is 0 or 1."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def start(folder: Path, steps: int) -> list[int]:
    """Start all processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [fork(lambda n=n: train(folder, steps, n, port)) for n in range(PROCESSES)]


def succeeds(pid: int) -> bool:
    """Wait for a process, and return whether it has succeeded."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def temporary(folder: Path) -> set[str]:
    """Return the saves in progress, or what was left of them."""
    try:
        names = os.listdir(folder / "checkpoints")
    except FileNotFoundError:
        return set()
    return {name for name in names if not name.isdecimal() and name != "deleted"}


def kill_in_a_save(folder: Path, pids: list[int], chance: random.Random, save: int) -> None:
    """Kill a random process in the n-th save from now, or in one after it, and then the others."""
    until = time.monotonic() + ATTEMPT_SECONDS
    before, seen = temporary(folder), set[str]()
    while True:
        assert time.monotonic() < until, "no save to disturb"
        there = temporary(folder)
        before, found = before & there, there - before
        new, seen = found - seen, seen | found
        # What the attempt before had left is swept before anything is saved.
        assert not (before and new), (before, new)
        if new and len(seen) >= save:
            time.sleep(chance.uniform(0, LONGEST_SAVE))
            # Between two saves there is nothing to disturb.
            if temporary(folder) & found:
                break
        time.sleep(0.002)
    first = chance.choice(pids)
    for pid in (first, *(pid for pid in pids if pid != first)):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        # The others may get further without the first.
        time.sleep(chance.choice((0, 0.1)) if pid == first else 0)


def kill_anytime(folder: Path, pids: list[int], chance: random.Random, after: float) -> None:
    """Kill a random process at a random time after a number of seconds, and then the others."""
    time.sleep(after)
    if chance.random() < TRAINING:
        # Else most kills would hit processes that have not begun yet.
        reader = CheckpointReader(folder / "checkpoints")
        before, until = reader.latest(), time.monotonic() + ATTEMPT_SECONDS
        while reader.latest() == before and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.5))
    first = chance.choice(pids)
    for pid in (first, *(pid for pid in pids if pid != first)):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        time.sleep(chance.choice((0, 0.1)) if pid == first else 0)


def main(folder: Path, kills: int, seed: int, steps: int, anytime: int = 0) -> None:
    """Kill as often as asked for, check what is left each time, and train to the end."""
    chance, newest = random.Random(seed), -1
    reader = CheckpointReader(folder / "checkpoints")
    for number in range(kills):
        if anytime:
            kill_anytime(folder, start(folder, steps), chance, after=chance.uniform(0, 2))
        else:
            kill_in_a_save(folder, start(folder, steps), chance, save=chance.randint(1, 3))
        listed = reader.steps()
        assert max(listed, default=-1) >= newest, (newest, listed)
        newest = max(listed, default=-1)
        assert succeeds(fork(lambda: read_all(folder))), f"a checkpoint of {listed} is damaged"
        print(f"kill {number + 1}: {listed} and {sorted(temporary(folder))}", flush=True)
    assert [succeeds(pid) for pid in start(folder, steps)] == [True] * PROCESSES
    assert temporary(folder) == set()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
