"""What a launch has left behind: processes that still run, and ports that are not free."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection
from pathlib import Path

LEAVE_SECONDS = 10.0
"""How long processes may take to be gone after their launcher."""

_GONE = "ZX"
"""States of processes that have ended, though nobody has asked for their exit code yet."""


def running_in(groups: Collection[int]) -> list[int]:
    """Return the process groups in which something still runs, after some time to leave."""
    ends = time.monotonic() + LEAVE_SECONDS
    while (left := [group for group in groups if _runs(group)]) and time.monotonic() < ends:
        time.sleep(0.05)
    return left


def is_free(port: int) -> bool:
    """Whether a port of this machine can be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _runs(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # The number belongs to somebody else by now.
        return False
    stats = list(Path("/proc").glob("[0-9]*/stat"))
    return not stats or any(_is_running_member(path, group) for path in stats)


def _is_running_member(stat: Path, group: int) -> bool:
    try:
        # The name of the program, in parentheses, may contain spaces.
        state, _, its_group, *_ = stat.read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return False
    return int(its_group) == group and state not in _GONE
