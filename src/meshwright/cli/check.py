"""`meshwright check`: whether the checkpoints of a run are what was saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.checkpoint.check import Checked, check_checkpoints
from meshwright.checkpoint.reader import find_store
from meshwright.cli.arguments import Arguments
from meshwright.cli.output import Output
from meshwright.errors import ExitCode, UserError
from meshwright.units import counted, human_bytes


def run(arguments: Arguments, output: Output) -> int:
    """Check every checkpoint and print the verdicts."""
    words = arguments.overrides
    if len(words) != 1:
        raise UserError(
            "check takes one run",
            why=f"given: {' '.join(words) or 'nothing'}",
            fix="write meshwright check outputs/<project>/<date>/<time>",
        )
    folder, update = find_store(Path(words[0]))
    checked = check_checkpoints(folder, update)
    report = {"folder": str(folder), "checkpoints": [asdict(each) for each in checked]}
    output.result(report, _picture(checked))
    return ExitCode.CHECK_FAILED if any(each.damaged for each in checked) else ExitCode.DONE


def _picture(checked: Sequence[Checked]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("update", "arrays", "size"):
        table.add_column(title, justify="right")
    table.add_column("verdict")
    table.add_column("problem", overflow="fold")
    for each in checked:
        style = "red" if each.damaged else "yellow" if each.verdict == "no checksums" else "green"
        table.add_row(
            str(each.update),
            f"{each.arrays:,}",
            human_bytes(each.bytes),
            Text(each.verdict, style=style),
            Text(each.problem),
        )
    damaged = sum(each.damaged for each in checked)
    return Group(table, Text(f"{counted(len(checked), 'checkpoint')}, {damaged} damaged"))
