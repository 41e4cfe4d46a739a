"""The guard: leads the group of launched processes and kills it when the launcher is gone.

Run as a program of its own. Its standard input is a pipe from the launcher; that pipe closes when
the launcher ends, however it ends, and with it goes every process of the group, children of
children included.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Wait for the launcher's end, then end the group, this process included."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
