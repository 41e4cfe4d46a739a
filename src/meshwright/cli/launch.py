"""`meshwright launch`: a command or a script in several processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence

from meshwright.launch.environments import environments
from meshwright.launch.options import parse_launch
from meshwright.launch.supervise import Supervisor


def launch(words: Sequence[str]) -> int:
    """Start the processes and return the exit code of the first failure, or 0."""
    asked = parse_launch(words)
    places = environments(asked, os.environ)
    # The descriptor itself: `sys.stderr` may be a stream of somebody else's that takes no bytes.
    with open(2, "wb", buffering=0, closefd=False) as stderr:
        supervisor = Supervisor(asked.command, stderr=stderr, grace_seconds=asked.grace_seconds)
        return supervisor.run(places)
