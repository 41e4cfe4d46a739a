"""`meshwright config`: every value of the config, and its origin."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import yaml
from rich.table import Table
from rich.text import Text

from meshwright.cli.arguments import Arguments
from meshwright.cli.output import Output
from meshwright.cli.request import Request
from meshwright.config.describe import describe_keys
from meshwright.config.origins import Origin, trace_origins
from meshwright.errors import ExitCode, UserError

_STYLES = {"default": "dim", "file": "", "override": "bold green"}


def run(request: Request) -> int:
    """Print every value with its origin."""
    if request.arguments.has("--keys"):
        return _print_keys(request.output)
    from meshwright.recipe import check_sections

    check_sections(request.config)
    origins = trace_origins(request.config, request.composed)
    request.output.result(_as_json(origins), _as_table(origins))
    return ExitCode.DONE


def _print_keys(output: Output) -> int:
    keys = describe_keys()
    table = Table(box=None, pad_edge=False)
    table.add_column("key", no_wrap=True)
    for name in ("meaning", "default", "values"):
        table.add_column(name, overflow="fold")
    for key in keys:
        table.add_row(*(Text(cell) for cell in (key.key, key.meaning, key.default, key.allowed)))
    output.result([asdict(key) for key in keys], table)
    return ExitCode.DONE


def print_composed(arguments: Arguments, output: Output) -> int:
    """Print the composed config as YAML, as Hydra's ``--cfg`` does."""
    from meshwright.config.compose import compose_config, compose_yaml

    part = arguments.flags["--cfg"]
    if part not in ("job", "hydra", "all"):
        raise UserError(
            f"--cfg {part} is not known", fix="write --cfg job, --cfg hydra or --cfg all"
        )
    composed = compose_config(arguments.overrides, arguments.config_dir, arguments.config_file)
    text = compose_yaml(composed, part)
    if output.as_json:
        output.result(yaml.safe_load(text))
    else:
        output.text(text)
    return ExitCode.DONE


def _as_json(origins: list[Origin]) -> dict[str, Any]:
    return {
        origin.key: {"value": origin.value, "origin": origin.source, "from": origin.detail}
        for origin in origins
    }


def _as_table(origins: list[Origin]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("key", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("origin", overflow="fold")
    section = ""
    for origin in origins:
        head = origin.key.partition(".")[0]
        if section and head != section:
            table.add_row()
        section = head
        source = f"{origin.source} {origin.detail}".strip()
        # As Text, because rich would parse the brackets of a list as markup.
        cells = (Text(cell) for cell in (origin.key, _text(origin.value), source))
        table.add_row(*cells, style=_STYLES[origin.source])
    return table


def _text(value: Any) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
