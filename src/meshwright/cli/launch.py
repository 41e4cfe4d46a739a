"""`meshwright launch`: a command or a script in several processes, here or on a cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence

from meshwright.launch.merged_output import MergedOutput
from meshwright.launch.options import parse_launch
from meshwright.launch.restarts import Attempts
from meshwright.launch.team import MachinesLeft, ProcessesLeft, Team
from meshwright.launch.whole_run import find_run, refuse_outer_launcher


def launch(words: Sequence[str]) -> int:
    """Start the processes and return the exit code of the last attempt.

    With --slurm or --kubernetes, submit a job that starts them.
    """
    options = parse_launch(words)
    if options.cluster is not None:
        from meshwright.cli.submit import submit

        return submit(options)
    run = find_run(options, os.environ)
    if (options.nodes or 1) == 1:
        refuse_outer_launcher(options.nprocs, os.environ, is_shared=run.is_shared)
    # The file descriptor, because `sys.stderr` may have been replaced by a text-only stream.
    with open(2, "wb", buffering=0, closefd=False) as stderr:
        lines = MergedOutput(stderr)
        team: Team = ProcessesLeft(options, os.environ, run)
        if options.min_nodes is not None:
            team = MachinesLeft(options, os.environ, run, lines.notify)
        return Attempts(options, os.environ, stderr, team, lines.notify).run()
