"""The leader of the group of launched processes, which kills the group when the launcher is gone.

This runs as a separate program. Its standard input is a pipe from the launcher; when the launcher
exits for any reason, the pipe closes, and every process of the group is killed, including children
of children. Its argument is the folder of the group's heartbeats, which is removed first.
"""

import os
import signal
import sys


def main() -> None:
    """Wait until the launcher exits, then kill the group, including this process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(sys.stdin.fileno(), 1):
        pass
    if sys.argv[1:]:
        import shutil

        shutil.rmtree(sys.argv[1], ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
