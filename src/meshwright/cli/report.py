"""`meshwright report`: a self-contained HTML report about a run, or comparing several."""

import os
from pathlib import Path

from meshwright.cli.arguments import Arguments
from meshwright.cli.output import Output, write_file
from meshwright.errors import ExitCode, UserError
from meshwright.report import find_runs, make_page, read_run

MAX_RUNS = 16
"""Runs on one page; with more, curves are hard to distinguish."""


def run(arguments: Arguments, output: Output) -> int:
    """Write the page and print its path."""
    named = [Path(word) for word in arguments.overrides]
    if not named:
        raise UserError(
            "no run was given",
            why="the report is about a run folder, or compares several",
            fix="write meshwright report outputs/<project>/<date>/<time>",
        )
    runs = find_runs(named)
    shown, left_out = runs[:MAX_RUNS], max(len(runs) - MAX_RUNS, 0)
    if left_out:
        output.say(f"{len(runs)} runs found; the first {MAX_RUNS} are on the page")
    page = make_page([read_run(folder) for folder in shown], left_out=left_out)
    # By default in the run folder, or in the common parent of several.
    inside = named[0] if len(named) == 1 else os.path.commonpath([p.absolute() for p in named])
    path = Path(arguments.flags.get("--out") or Path(inside) / "report.html")
    write_file(path, page, fix="write --out FILE")
    listed = {"report": str(path), "runs": [str(folder) for folder in shown]}
    output.result(listed, text=str(path))
    return ExitCode.DONE
