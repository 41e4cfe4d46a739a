"""`meshwright report`: one HTML page about a run, or one that compares several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from meshwright.cli.arguments import Arguments
from meshwright.cli.output import Output, write_file
from meshwright.errors import ExitCode, UserError
from meshwright.report import find_runs, make_page, read_run

MAX_RUNS = 16
"""Runs on one page; beyond, nobody can tell the curves apart."""


def run(arguments: Arguments, output: Output) -> int:
    """Write the page and print where it is."""
    named = [Path(word) for word in arguments.overrides]
    if not named:
        raise UserError(
            "which run?",
            why="the page is about a run's folder, or compares those of several",
            fix="write meshwright report outputs/<project>/<date>/<time>",
        )
    runs = find_runs(named)
    shown, left_out = runs[:MAX_RUNS], max(len(runs) - MAX_RUNS, 0)
    if left_out:
        output.say(f"{len(runs)} runs found; the first {MAX_RUNS} are on the page")
    page = make_page([read_run(folder) for folder in shown], left_out=left_out)
    path = Path(arguments.flags.get("--out") or _default_path(named))
    write_file(path, page, fix="write --out FILE")
    if output.as_json:
        output.result({"report": str(path), "runs": [str(folder) for folder in shown]})
    else:
        output.text(str(path))
    return ExitCode.DONE


def _default_path(named: Sequence[Path]) -> Path:
    """Return where a page about these goes: into the folder, or the one that holds them all."""
    if len(named) == 1:
        return named[0] / "report.html"
    return Path(os.path.commonpath([path.absolute() for path in named])) / "report.html"
