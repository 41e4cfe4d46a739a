"""`--multirun`: one process per combination of comma-separated values."""

from __future__ import annotations

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
from meshwright.text.json_text import parse_json
from meshwright.text.masking import mask_words


def run_sweep(arguments: Arguments, output: Output) -> int:
    """Run the jobs of a sweep one by one and return the exit code of the first failure."""
    jobs = expand_sweep(arguments.overrides, arguments.config_dir)
    sweep_dir = compose_config(jobs[0], arguments.config_dir, arguments.config_file).sweep_dir
    failed = int(ExitCode.DONE)
    results: list[object] = []
    for number, job in enumerate(jobs):
        shown = mask_words(job)
        output.say(f"[bold]job {number + 1} of {len(jobs)}[/bold]: {escape(' '.join(shown))}")
        words = [*job, f"hydra.run.dir={quoted(str(sweep_dir / str(number)))}"]
        command = [sys.executable, "-P", "-m", "meshwright", arguments.command.name, *words]
        command += _own_flags(arguments)
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
    return failed


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


def _own_flags(arguments: Arguments) -> list[str]:
    passed = {name: value for name, value in arguments.flags.items() if name != "--multirun"}
    return [f"{name}={value}" if value else name for name, value in passed.items()]
