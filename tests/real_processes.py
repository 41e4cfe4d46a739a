"""Runs a program in several real processes on this machine."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

HARD_LIMIT_SECONDS = 120


def run_processes(
    program: str,
    arguments: Sequence[str] = (),
    *,
    count: int,
    environments: Sequence[Mapping[str, str]] = (),
) -> list[Any]:
    """Run a Python program ``count`` times at once and return the JSON each prints last.

    Each gets a free coordinator address and its own number as first arguments. A process that
    is still there after the hard limit is killed.
    """
    address = f"127.0.0.1:{free_port()}"
    own = [*environments, *[{}] * (count - len(environments))]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, address, str(number), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu", **own[number]},
        )
        for number in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=HARD_LIMIT_SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
    errors = "\n".join(error for _, error in outputs)
    assert [process.returncode for process in started] == [0] * count, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
