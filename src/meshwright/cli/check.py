"""`meshwright check`: whether the checkpoints of a run are what was saved."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.checkpoint.check import Checked, check_checkpoints
from meshwright.checkpoint.reader import find_store
from meshwright.cli.arguments import Arguments
from meshwright.cli.output import Output
from meshwright.errors import ExitCode
from meshwright.text.columns import Columns
from meshwright.text.units import counted, human_bytes
from meshwright.trainer.rollouts.rollout_files import rollout_missing


def run(arguments: Arguments, output: Output) -> int:
    """Check every checkpoint and print the verdicts."""
    (run_dir,) = arguments.words("one run", example="outputs/<project>/<date>/<time>")
    folder, step = find_store(Path(run_dir))
    checked = [
        replace(each, verdict="damaged", problem=problem)
        if not each.damaged and (problem := rollout_missing(folder.parent, each.step))
        else each
        for each in check_checkpoints(folder, step)
    ]
    report = {"folder": str(folder), "checkpoints": [asdict(each) for each in checked]}
    output.result(report, _picture(checked))
    return ExitCode.CHECK_FAILED if any(each.damaged for each in checked) else ExitCode.DONE


def _picture(checked: Sequence[Checked]) -> RenderableType:
    rows = [
        (
            str(each.step),
            f"{each.arrays:,}",
            human_bytes(each.bytes),
            Text(each.verdict, style="red" if each.damaged else "green"),
            each.problem,
        )
        for each in checked
    ]
    head = ("step", "arrays", "size", "verdict", "problem")
    table = Columns(head, rows, right=("step", "arrays", "size"))
    damaged = sum(each.damaged for each in checked)
    return Group(table, Text(f"{counted(len(checked), 'checkpoint')}, {damaged} damaged"))
