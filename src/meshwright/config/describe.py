"""Every key of the config: its meaning, its default and its allowed values, from the schema."""

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from meshwright.config.base import nested_schema
from meshwright.config.schema import Config, KindConfig

_ENTRY = re.compile(r"^    (\w+): (.*(?:\n     +.*)*)", re.M)
_TYPES = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "array": "a list",
    "object": "a mapping",
    "null": "null",
}
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
}


@dataclass(frozen=True)
class KeyDescription:
    """One key of the config; its default is empty if it must be given."""

    key: str
    meaning: str
    default: str
    allowed: str


def describe_keys(schema: type[BaseModel] = Config, prefix: str = "") -> list[KeyDescription]:
    """Describe every key of a schema, in its order; sections are described by their keys."""
    keys: list[KeyDescription] = []
    values = schema.model_json_schema()["properties"]
    meanings = _meanings(schema)
    for name, info in schema.model_fields.items():
        nested = nested_schema(info.annotation)
        if nested is not None:
            keys += describe_keys(nested, f"{prefix}{name}.")
        else:
            meaning, allowed = meanings.get(name, ""), _allowed(values[name])
            keys.append(KeyDescription(f"{prefix}{name}", meaning, _default(info), allowed))
    return keys


def settings_page() -> str:
    """Return the page of all settings, as Markdown."""
    lines = [
        "# All settings",
        "",
        "This page is generated from the schema, and `meshwright config --keys` prints the same.",
        "Defaults are those of the schema: the files of [groups](config.md#groups) set others, and",
        "`meshwright config` shows the value in force and where it comes from.",
    ]
    for title, text, keys in _sections():
        lines += ["", f"## {title}", "", text, "", "| key | meaning | default | values |"]
        lines += ["|---|---|---|---|"]
        for key in keys:
            cells = (f"`{key.key}`", key.meaning, f"`{key.default or 'required'}`", key.allowed)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _sections() -> Iterator[tuple[str, str, list[KeyDescription]]]:
    """Yield the title, the summary and the keys of each section; single keys come last."""
    for name, info in Config.model_fields.items():
        nested = nested_schema(info.annotation)
        if nested is not None:
            summary = inspect.getdoc(nested) or ""
            text = summary.partition("\n")[0].replace("``", "`")
            if issubclass(nested, KindConfig):
                text += f" Further keys, `{name}.…`, are arguments of what `{name}.kind` names."
            yield name, text, describe_keys(nested, f"{name}.")
    single = [key for key in describe_keys() if "." not in key.key]
    run_dir = KeyDescription(
        "hydra.run.dir", "the run folder.", "outputs/<project>/<date>/<time>", "a path"
    )
    yield "Single keys", "Keys of no section.", [*single, run_dir]


def _meanings(schema: type[BaseModel]) -> dict[str, str]:
    """Return the meaning of each field, from the ``Attributes:`` of a class and its bases."""
    meanings: dict[str, str] = {}
    for cls in reversed(schema.__mro__):
        text = (inspect.cleandoc(cls.__doc__ or "")).partition("Attributes:\n")[2]
        text = text.replace("``", "`")
        meanings |= {name: " ".join(words.split()) for name, words in _ENTRY.findall(text)}
    return meanings


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return ""
    return json.dumps(info.get_default(call_default_factory=True), ensure_ascii=False).strip('"')


def _allowed(value: Mapping[str, Any]) -> str:
    """Describe the values a key takes, from its JSON schema."""
    if "anyOf" in value:
        return " or ".join(_allowed(option) for option in value["anyOf"])
    if "enum" in value:
        return ", ".join(map(str, value["enum"]))
    bounds = [f"{words} {value[name]}" for name, words in _BOUNDS.items() if name in value]
    return ", ".join([_TYPES[value["type"]], *bounds])


if __name__ == "__main__":
    print(settings_page(), end="")
