"""The user's own hardware file: where it is, and how its entries extend the built-in table."""

import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from meshwright.errors import UserError, did_you_mean, yaml_line
from meshwright.text.yaml_text import read_yaml

VARIABLE = "MESHWRIGHT_HARDWARE"
"""The environment variable that names the file."""

SECTIONS = ("chips", "links")
_OWN = ("aliases", "device_kinds", "batch_sizes")
"""What a chip does not take over from the one it is like."""

Row = dict[str, Any]
Record = TypeVar("Record")


def hardware_file() -> Path | None:
    """Return the user's hardware file; None if there is none.

    That is the file that ``MESHWRIGHT_HARDWARE`` names, else ``meshwright/hardware.yaml`` in the
    user's config folder. A file in the current folder is never read by itself.
    """
    named = os.environ.get(VARIABLE, "").strip()
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise UserError(
                f"{VARIABLE}={named} is not a file",
                fix="write the path of a YAML file with chips or links, or unset it",
            )
        return path
    base = os.environ.get("XDG_CONFIG_HOME", "")
    # The standard says that relative paths are to be ignored.
    root = Path(base) if os.path.isabs(base) else Path("~/.config").expanduser()
    path = root / "meshwright" / "hardware.yaml"
    return path if path.is_file() else None


def read_hardware_file(path: Path) -> dict[str, dict[str, Row]]:
    """Read the sections of a hardware file, each a mapping of names to entries."""
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"cannot read the hardware file {path}", why=yaml_line(error)) from None
    sections = _mapping(content or {}, str(path))
    for name in sections:
        if name not in SECTIONS:
            raise UserError(
                f"{path} has an unknown section `{name}`",
                why=f"the sections are {' and '.join(SECTIONS)}",
                fix=did_you_mean(str(name), SECTIONS),
            )
    return {
        section: {
            str(name): _mapping(row or {}, f"{section}.{name} in {path}")
            for name, row in _mapping(sections.get(section) or {}, f"{section} in {path}").items()
        }
        for section in SECTIONS
    }


def merge_chips(known: Mapping[str, Row], own: Mapping[str, Row], path: Path) -> dict[str, Row]:
    """Return the known entries with the user's, which are new or replace keys of known ones.

    A new entry with ``like: NAME`` takes what it does not give from that chip.
    """
    merged = {name: dict(row) for name, row in known.items()}
    for given, row in own.items():
        row, name = dict(row), _known_name(given, merged) or given
        like = row.pop("like", None)
        if like is not None:
            merged[name] = {**_inherited(str(like), given, merged, path), **row}
        else:
            merged[name] = {**merged.get(name, {}), **row}
    return merged


def checked_row(kind: type[Record], row: Row, where: str, source: str) -> Record:
    """Return an entry, such as ``where="chips.H100"``, as a record, or say which keys are wrong."""
    # YAML has lists, records have tuples; true would be read as 1.
    plain = {str(k): tuple(value) if isinstance(value, list) else value for k, value in row.items()}
    wrong = [key for key, value in plain.items() if isinstance(value, bool)]
    if wrong:
        raise UserError(
            f"`{where}.{wrong[0]}` in {source} is true or false", fix="write a number or a text"
        )
    try:
        return _adapter(kind).validate_python(plain)
    except ValidationError as error:
        known = list(kind.__annotations__)
        raise UserError(
            f"{where} in {source} is not valid",
            why="; ".join(_explain(each, known) for each in error.errors(include_url=False)),
            fix="the keys and their units are in docs/hardware.md",
        ) from None


@cache
def _adapter(kind: type[Record]) -> TypeAdapter[Record]:
    return TypeAdapter(kind)


def _explain(detail: ErrorDetails, known: list[str]) -> str:
    key = str(detail["loc"][0])
    if detail["type"] == "missing":
        return f"`{key}` is missing"
    if detail["type"] == "unexpected_keyword_argument":
        hint = did_you_mean(key, known)
        return f"there is no `{key}`" + (f" ({hint})" if hint else "")
    message = detail["msg"]
    return f"`{key}: {detail['input']!r:.60}`: {message[0].lower()}{message[1:]}"


def plain_name(text: str) -> str:
    """Return a name without what spellings differ in: case, spaces, hyphens and underscores."""
    return re.sub(r"[\s_-]+", "", text).lower()


def _inherited(like: str, name: str, rows: Mapping[str, Row], path: Path) -> Row:
    model = _known_name(like, rows)
    if model is None:
        raise UserError(
            f"chips.{name} in {path} is like `{like}`, which is not known",
            why=f"the chips before it are {', '.join(rows)}",
            fix=did_you_mean(like, rows),
        )
    inherited = {key: value for key, value in rows[model].items() if key not in _OWN}
    return {"family": plain_name(model), **inherited}


def _known_name(text: str, rows: Mapping[str, Row]) -> str | None:
    wanted = plain_name(text)
    for name, row in rows.items():
        aliases = row.get("aliases")
        # An entry that is not in order is reported when it is checked.
        listed = map(str, aliases) if isinstance(aliases, list) else ()
        if wanted in map(plain_name, (name, *listed)):
            return name
    return None


def _mapping(value: object, where: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise UserError(
            f"{where} is {value!r:.60}, not a mapping",
            fix="write chips:, then a name, then its keys, each on a line of its own",
        )
    return value
