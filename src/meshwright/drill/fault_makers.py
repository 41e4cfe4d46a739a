"""How each fault is made: in a process, in a checkpoint on disk, or around a launch.

Nothing here judges the outcome: drills do so in `process_faults`, `file_faults` and
`joining_faults`, and tests/faults with an oracle of its own.
"""

import ctypes
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

from meshwright.checkpoint.reader import METADATA, STATE
from meshwright.drill.process import DrilledProcess
from meshwright.launch.whole_run import free_port

EXCEPTION_TEXT = "an exception that a drill raises"
CRASH_CODE = 9
SEED = 97531
"""The seed of the process that differs from the others."""
SAVE_POINTS = (0.0, 0.4, 0.8)
"""When a process is killed in each attempt, as a share of the time that a save takes."""

Maker = Callable[[DrilledProcess], None]
"""Called in every process of a run before it starts."""


def _send(number: int, *, to_launcher: bool = False) -> None:
    os.kill(os.getppid() if to_launcher else os.getpid(), number)


def _once(action: Callable[[], object], *, in_first: bool = False) -> Maker:
    """Act once at the step, in the last process or in the first."""

    def make(process: DrilledProcess) -> None:
        chosen = process.rank == 0 if in_first else process.is_last
        if chosen and process.attempt == 0:
            process.at_step(action)

    return make


def _kill_saving(process: DrilledProcess) -> None:
    number, given = process.attempt, process.instructions
    if number < len(SAVE_POINTS) and process.rank == number % process.nprocs:
        # A later save in every attempt, so that each of them completes a checkpoint.
        process.during_save(
            (number + 2) * given.every,
            SAVE_POINTS[number] * given.save_seconds,
            lambda: _send(signal.SIGKILL),
        )


def _interrupt() -> None:
    _send(signal.SIGINT, to_launcher=True)
    # Until the launcher has passed it on, so that short steps do not end the run before.
    time.sleep(1)


def _interrupt_twice() -> None:
    _send(signal.SIGINT, to_launcher=True)
    time.sleep(0.5)
    _send(signal.SIGINT, to_launcher=True)
    # A process that does not come back to its loop cannot stop by itself.
    time.sleep(600)


def _hold_interpreter() -> None:
    # Functions of a PyDLL keep the lock, so no other thread of the process runs.
    ctypes.PyDLL(None).sleep(86_400)


def _raise(process: DrilledProcess) -> None:
    # Code outside the package, as the user's is.
    file = Path(process.instructions.notes) / "raises.py"
    if process.is_last:
        text = f"def act():\n    raise RuntimeError({EXCEPTION_TEXT!r})\n"
        file.write_text(text, encoding="utf-8")
        loader = SourceFileLoader(file.stem, str(file))
        module = module_from_spec(ModuleSpec(file.stem, loader, origin=str(file)))
        loader.exec_module(module)
        process.at_step(module.act)


def _crash(process: DrilledProcess) -> None:
    process.note_injected()
    if process.is_last:
        os._exit(CRASH_CODE)


def _fill_disk(process: DrilledProcess) -> None:
    def act() -> None:
        # No file may become larger; a real full disk would need rights that users lack.
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (process.instructions.limit_bytes, hard))

    process.at_step(act)


def _spoil_batch(process: DrilledProcess) -> None:
    if process.is_last:
        process.change_batch(_with_nan)


def _with_nan(batch: Any) -> Any:
    """Return a batch with NaN in the first row of all its floats: the loss may not read some."""
    import jax
    import numpy as np

    def spoil(leaf: Any) -> Any:
        if not np.issubdtype(np.asarray(leaf).dtype, np.floating):
            return leaf
        spoiled = np.array(leaf)
        spoiled[0, ...] = np.nan
        return spoiled

    return jax.tree.map(spoil, batch)


def _differ(process: DrilledProcess) -> None:
    if process.is_last:
        sys.argv.append(f"run.seed={SEED}")


IN_PROCESS: dict[str, Maker] = {
    "sigkill": _once(lambda: _send(signal.SIGKILL)),
    "sigkill-first": _once(lambda: _send(signal.SIGKILL), in_first=True),
    "sigkill-launcher": _once(lambda: _send(signal.SIGKILL, to_launcher=True)),
    "sigkill-save": _kill_saving,
    "preempt": _once(lambda: _send(signal.SIGTERM)),
    "ctrl-c": _once(_interrupt),
    "ctrl-c-twice": _once(_interrupt_twice),
    "sigstop": _once(lambda: _send(signal.SIGSTOP)),
    "gil": _once(_hold_interpreter),
    "exception": _raise,
    "crash-loop": _crash,
    "disk-full": _fill_disk,
    "nan-batch": _spoil_batch,
    "differing": _differ,
}
"""By fault, what makes it in the processes of a run."""


def _flip(checkpoint: Path) -> None:
    shard = _largest_shard(checkpoint)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def _truncate(checkpoint: Path) -> None:
    shard = _largest_shard(checkpoint)
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])


def _largest_shard(checkpoint: Path) -> Path:
    shards = [path for path in (checkpoint / STATE).rglob("d/*") if path.is_file()]
    return max(shards, key=lambda path: path.stat().st_size)


IN_CHECKPOINT: dict[str, Callable[[Path], None]] = {
    "flipped-byte": _flip,
    "truncated-shard": _truncate,
    "no-metadata": lambda checkpoint: (checkpoint / METADATA / "metadata").unlink(),
}
"""By fault, what damages the folder of a checkpoint."""


def missing_peers(seconds: float) -> list[str]:
    """Return flags of a launch that waits for another machine, which never comes."""
    address = f"--coordinator=127.0.0.1:{free_port()}"
    return ["--nodes=2", "--node-rank=0", address, f"--join-timeout={seconds:g}"]


@contextmanager
def taken_port() -> Generator[int]:
    """Yield a port that this process listens on."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]
