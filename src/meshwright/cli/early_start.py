"""Devices that start while a command is imported."""

from __future__ import annotations

import threading
from contextlib import suppress

from meshwright.processes import process_count


def start_devices() -> None:
    """Start JAX's devices in a thread, if this is the only process.

    A GPU takes two seconds, and as long again until its first program runs. Whoever asks for
    devices meanwhile waits for them, and sees the error if they do not start. Several processes
    start theirs together, where each of them waits for the others.
    """
    if process_count() == 1:
        # Not a daemon: a command that ends early must not leave in the middle of it.
        threading.Thread(target=_start, name="device-start").start()


def _start() -> None:
    import jax

    with suppress(Exception):
        if jax.default_backend() != "cpu":
            jax.random.key_data(jax.random.key(0)).block_until_ready()
