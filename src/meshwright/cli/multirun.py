"""`--multirun`: one process per combination of comma-separated values."""

import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.types import Glob, Override
from rich.markup import escape

from meshwright.cli.arguments import Arguments
from meshwright.cli.output import Output
from meshwright.config.base import shorten
from meshwright.config.compose import compose_config, parse_overrides, quoted
from meshwright.config.groups import group_options
from meshwright.errors import ExitCode, UserError
from meshwright.launch.supervise import exit_code
from meshwright.text.columns import Columns
from meshwright.text.json_text import parse_json
from meshwright.text.masking import mask_words
from meshwright.tracking.run_files import read_metrics


def run_sweep(arguments: Arguments, output: Output) -> int:
    """Run the jobs of a sweep one by one and return the exit code of the first failure."""
    jobs = expand_sweep(arguments.overrides, arguments.config_dir)
    sweep_dir = compose_config(jobs[0], arguments.config_dir, arguments.config_file).sweep_dir
    flags = {name: value for name, value in arguments.flags.items() if name != "--multirun"}
    failed = int(ExitCode.DONE)
    results: list[object] = []
    for number, job in enumerate(jobs):
        shown = mask_words(job)
        output.say(f"[bold]job {number + 1} of {len(jobs)}[/bold]: {escape(' '.join(shown))}")
        words = [*job, f"hydra.run.dir={quoted(str(sweep_dir / str(number)))}"]
        command = [sys.executable, "-P", "-m", "meshwright", arguments.command.name, *words]
        command += [f"{name}={value}" if value else name for name, value in flags.items()]
        done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=False)
        code = exit_code(done.returncode)
        if output.as_json:
            results.append(
                {"overrides": shown, "exit_code": code, "result": parse_json(done.stdout)}
            )
        elif done.stdout:
            output.text(done.stdout)
        failed = failed or code
    if output.as_json:
        output.result(results)
    elif arguments.command.name == "train":
        output.result(None, results_table(jobs, sweep_dir))
        output.say(
            f"* the lowest loss; compare all runs: meshwright report {escape(str(sweep_dir))}"
        )
    return failed


def results_table(jobs: Sequence[Sequence[str]], sweep_dir: Path) -> Columns:
    """Return the last and the lowest losses of all jobs; the best job has a star."""
    varying = [n for n, words in enumerate(zip(*jobs, strict=True)) if len(set(words)) > 1]
    losses = [_losses(sweep_dir / str(number)) for number in range(len(jobs))]
    # By held-out data if all jobs have some.
    by = 3 if all(found[3] is not None for found in losses) else 1
    lowest = min((loss for found in losses if (loss := found[by]) is not None), default=None)
    best = [lowest is not None and found[by] == lowest for found in losses]
    rows = [
        (
            f"{number} *" if best[number] else str(number),
            " ".join(mask_words([job[n] for n in varying])) or "–",
            *("–" if loss is None else f"{loss:.4f}" for loss in losses[number]),
            str(sweep_dir / str(number)),
        )
        for number, job in enumerate(jobs)
    ]
    head = ("run", "settings", "loss", "lowest", "held-out loss", "lowest held-out", "folder")
    return Columns(head, rows, head[2:6], styles=["bold" if each else "" for each in best])


def _losses(folder: Path) -> list[float | None]:
    """Return the last and the lowest loss of a run, in training and on held-out data."""
    found: list[float | None] = []
    metrics = read_metrics(folder / "metrics.jsonl")
    for split in ("train", "eval"):
        rows = [values.get("loss") for (name, _), values in metrics.items() if name == split]
        finite = [loss for loss in rows if loss is not None]
        found += [rows[-1] if rows else None, min(finite, default=None)]
    return found


def expand_sweep(overrides: Sequence[str], config_dir: Path | None = None) -> list[list[str]]:
    """Return the overrides of every job: the product of all comma-separated values."""
    choices = [_values(override, config_dir) for override in parse_overrides(overrides)]
    return [list(job) for job in itertools.product(*choices)]


def _values(override: Override, config_dir: Path | None) -> list[str]:
    if not override.is_sweep_override():
        return [override.input_line or ""]
    key, value = override.get_key_element(), override.value()
    try:
        if isinstance(value, Glob):
            values = value.filter(group_options(config_dir).get(override.key_or_group, []))
        else:
            values = list(override.sweep_string_iterator())
    except Exception:
        # Hydra cannot enumerate an interval or an empty range.
        values = []
    if not values:
        raise UserError(
            f"`{shorten(override.input_line)}` has no values to run",
            fix=f"write them out: {key}=a,b or {key}=range(1,5)",
        )
    return [f"{key}={value}" for value in values]
