"""`meshwright config`: every value of the config, and its origin."""

from dataclasses import asdict
from typing import Any

import yaml

from meshwright.cli.arguments import Arguments
from meshwright.cli.output import Output
from meshwright.cli.request import Request, compose
from meshwright.config.describe import describe_keys
from meshwright.config.origins import Origin, trace_origins
from meshwright.errors import ExitCode, UserError
from meshwright.text.columns import Columns

_STYLES = {"default": "dim", "file": "", "override": "bold green"}


def run(request: Request) -> int:
    """Print every value with its origin."""
    if request.arguments.has("--keys"):
        keys = describe_keys()
        rows = [(key.key, key.meaning, key.default, key.allowed) for key in keys]
        table = Columns(("key", "meaning", "default", "values"), rows)
        request.output.result([asdict(key) for key in keys], table)
        return ExitCode.DONE
    from meshwright.recipe import check_sections

    check_sections(request.config)
    origins = trace_origins(request.config, request.composed)
    listed = {
        origin.key: {"value": origin.value, "origin": origin.source, "from": origin.detail}
        for origin in origins
    }
    request.output.result(listed, _as_table(origins))
    return ExitCode.DONE


def print_composed(arguments: Arguments, output: Output) -> int:
    """Print the composed config as YAML, as Hydra's ``--cfg`` does."""
    from meshwright.config.compose import compose_yaml

    part = arguments.flags["--cfg"]
    if part not in ("job", "hydra", "all"):
        raise UserError(
            f"--cfg {part} is not known", fix="write --cfg job, --cfg hydra or --cfg all"
        )
    text = compose_yaml(compose(arguments), part)
    output.result(yaml.safe_load(text), text=text)
    return ExitCode.DONE


def _as_table(origins: list[Origin]) -> Columns:
    rows, styles, section = list[tuple[str, ...]](), list[str](), ""
    for origin in origins:
        head = origin.key.partition(".")[0]
        if section and head != section:
            rows.append(())
            styles.append("")
        section = head
        said = origin.source if origin.source != "file" else ""
        rows.append((origin.key, _text(origin.value), f"{said} {origin.detail}".strip()))
        styles.append(_STYLES[origin.source])
    return Columns(("key", "value", "origin"), rows, styles=styles)


def _text(value: Any) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
