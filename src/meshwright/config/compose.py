"""Composing a config with Hydra: groups, overrides and files, before JAX starts."""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf, open_dict

from meshwright.config.base import field_paths, shorten, unknown_key
from meshwright.config.groups import CONF_DIR, expand_shorthands, group_options, refuse_folder
from meshwright.config.schema import Config, KindConfig
from meshwright.errors import UserError, did_you_mean, first_line, yaml_line
from meshwright.mesh.axes import resolve_alias
from meshwright.text.masking import hidden_names, mask_tree
from meshwright.text.units import a_type
from meshwright.text.yaml_text import read_yaml

_KIND_SECTIONS = tuple(
    name
    for name, info in Config.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, KindConfig)
)


@dataclass(frozen=True)
class Composed:
    """A config composed by Hydra, as plain values that are not validated yet.

    ``choices`` has the file of each group, in the order they apply, and ``read_from`` the file
    that a value was read from after composing. The overrides change ``config_file``, if any.
    """

    values: dict[str, Any]
    choices: dict[str, str]
    overrides: tuple[str, ...]
    run_dir: Path
    sweep_dir: Path
    hydra: dict[str, Any]
    config_dir: Path | None = None
    config_file: Path | None = None
    read_from: Mapping[str, str] = field(default_factory=dict[str, str])


def compose_config(
    overrides: Sequence[str], config_dir: Path | None = None, config_file: Path | None = None
) -> Composed:
    """Compose the config of one job, or change a saved one; every mistake is a UserError."""
    parsed = parse_overrides(overrides)
    options = group_options(config_dir)
    if config_file is not None:
        return _change_saved(config_file, parsed, overrides, options)
    for file in sorted(config_dir.rglob("*.yaml")) if config_dir is not None else ():
        _check_file(file)
    for override in parsed:
        _check_known(override, options)
    keys = {override.key_or_group for override in parsed}
    arguments = [_as_hydra(override, options, keys) for override in parsed]
    own = [f"hydra.searchpath=[{quoted(f'file://{config_dir.resolve()}')}]"] if config_dir else []
    try:
        composed = _compose([*own, *_dropped_files(own, arguments, parsed), *arguments])
        hydra = _plain(composed.hydra, resolve=False)
        run_dir, sweep_dir = Path(composed.hydra.run.dir), Path(composed.hydra.sweep.dir)
        with open_dict(composed):
            del composed["hydra"]
        values = _plain(composed, resolve=True)
    except Exception as error:
        # All input comes from the user's command line or files.
        raise _explain(error, options) from error
    choices = {k: v for k, v in hydra["runtime"]["choices"].items() if not k.startswith("hydra/")}
    return Composed(
        values=values,
        choices={str(key): str(value) for key, value in choices.items()},
        overrides=tuple(overrides),
        run_dir=run_dir,
        sweep_dir=sweep_dir,
        hydra=hydra,
        config_dir=config_dir,
    )


def _change_saved(
    file: Path, parsed: Sequence[Override], overrides: Sequence[str], options: dict[str, list[str]]
) -> Composed:
    """Return a saved config with the changes of overrides."""
    saved = OmegaConf.create(_read_saved(file))
    for override in parsed:
        key = override.key_or_group
        if key in options:
            raise UserError(
                f"`{override.input_line}` chooses a file, but --config {file} has every value",
                fix=f"write single values, such as {key}.kind=…, or leave out --config",
            )
        _check_known(override, options)
        if not _is_hydra(key) and not override.is_delete():
            OmegaConf.update(saved, canonical_key(key), override.value(), merge=False)
    values = _plain(saved, resolve=False)
    _refuse_hidden(file, values)
    project = OmegaConf.select(saved, "run.project", default="meshwright")
    own = [o.input_line or "" for o in parsed if _is_hydra(o.key_or_group)]
    named = compose_config([f"run.project={quoted(str(project))}", *own])
    return replace(named, values=values, choices={}, overrides=tuple(overrides), config_file=file)


def _plain(config: DictConfig, *, resolve: bool) -> dict[str, Any]:
    values = OmegaConf.to_container(config, resolve=resolve)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _refuse_hidden(file: Path, values: dict[str, Any]) -> None:
    """Raise if a saved config lacks a secret that was hidden when it was written."""
    if names := hidden_names(values):
        raise UserError(
            f"{' and '.join(names)} in --config {file} {'is' if len(names) == 1 else 'are'} hidden",
            why="passwords and other secrets are not written to files",
            fix=f"write {' and '.join(f'{name}=…' for name in names)} after --config, with the "
            "value or null",
        )


def _read_saved(file: Path) -> dict[str, Any]:
    try:
        values = read_yaml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"cannot read --config {file}", why=yaml_line(error)) from None
    if not isinstance(values, dict):
        raise UserError(
            f"--config {file} is not a config",
            why=f"it holds {a_type(values)}",
            fix="name the config.yaml of a run folder",
        )
    return {str(key): value for key, value in values.items()}


def _check_file(file: Path) -> None:
    """Refuse a file of the user's config directory that Hydra could not read to its end."""
    try:
        read_yaml(file.read_text(encoding="utf-8"))
    except yaml.YAMLError:
        # Hydra says where, if it is chosen.
        return
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file}", why=first_line(error)) from None


def validate(composed: Composed) -> Config:
    """Check composed values against the schema."""
    return Config.parse(composed.values)


def compose_yaml(composed: Composed, part: str) -> str:
    """Return the config as YAML: the ``job`` (validated, every value), ``hydra``'s own, or all.

    Secrets are hidden.
    """
    job = mask_tree(validate(composed).model_dump(mode="json"))
    hydra = mask_tree(composed.hydra)
    if part == "job":
        return OmegaConf.to_yaml(OmegaConf.create(job))
    if part == "hydra":
        return OmegaConf.to_yaml(OmegaConf.create({"hydra": hydra}))
    return OmegaConf.to_yaml(OmegaConf.create({"hydra": hydra, **job}))


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides with Hydra's grammar."""
    parser = OverridesParser.create()
    parsed: list[Override] = []
    for text in (each for given in overrides for each in expand_shorthands(given)):
        try:
            (override,) = parser.parse_overrides([text])
            # A pattern without `*` would be parsed as nested keys.
            if not override.key_or_group or _NESTED_RULE.match(text):
                raise ValueError(text)
        except Exception:
            # Hydra's parser reports most mistakes in its own terms and crashes on some characters.
            raise UserError(
                f"cannot read the override `{shorten(text)}`", **_how_to_write(text)
            ) from None
        parsed.append(override)
    return parsed


_QUOTED_KEY = re.compile(r"""([{,]\s*)(['"])([^'"]*)\2(\s*:)""")
_NESTED_RULE = re.compile(r"\+{0,2}sharding\.rules\.[^=.]+\.")
_RULE = re.compile(r"\+{0,2}sharding\.rules\.([^=]+)=(.+)")


def _how_to_write(text: str) -> dict[str, str]:
    """Return why an override cannot be parsed, if known, and what to write instead."""
    if _QUOTED_KEY.search(text):
        plain = _QUOTED_KEY.sub(r"\1\3\4", text)
        return {
            "why": "keys in braces are written without quotes",
            "fix": f"write '{plain}', with quotes around all of it for the shell",
        }
    if rule := _RULE.fullmatch(text):
        return {
            "why": f"`{rule[1]}` is a pattern, which must be in braces",
            "fix": f"write 'sharding.rules={{{rule[1]}:{rule[2]}}}', with quotes for the shell",
        }
    return {
        "fix": "write key=value, group=choice, +group=choice or ~key; "
        "quote values with spaces or symbols: key='…'"
    }


def quoted(text: str) -> str:
    """Return text as a quoted value of Hydra's grammar."""
    # Backslashes are literal in the grammar, except before a quote or at the end.
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
    return f"'{escaped}'"


def canonical_key(key: str) -> str:
    """Return a key with the canonical name of its mesh axis: ``mesh.tensor`` for ``mesh.tp``."""
    section, _, name = key.partition(".")
    return f"mesh.{resolve_alias(name)}" if section == "mesh" and name else key


def _compose(arguments: list[str]) -> DictConfig:
    with initialize_config_dir(str(CONF_DIR), version_base="1.3", job_name="meshwright"):
        return compose("config", overrides=arguments, return_hydra_config=True)


def _dropped_files(own: list[str], arguments: list[str], parsed: Sequence[Override]) -> list[str]:
    """Return overrides that drop a group's default file if only another ``kind`` is given.

    The other keys of the file are arguments of its own kind. A file chosen on the command line
    stays.
    """
    chosen = {override.key_or_group for override in parsed}
    kinds = {
        section: override.value()
        for section in _KIND_SECTIONS
        for override in parsed
        if override.key_or_group == f"{section}.kind" and not override.is_delete()
        if section not in chosen
    }
    if not kinds:
        return []
    choices = [
        argument
        for argument, override in zip(arguments, parsed, strict=True)
        # Single values of other sections change no kind.
        if override.key_or_group.partition(".")[0] not in kinds and not argument.startswith("++")
    ]
    # The user's own files may change from one call to the next.
    files = (_kinds_of_files.__wrapped__ if own else _kinds_of_files)(*own, *choices)
    return [f"~{section}" for section, kind in kinds.items() if files[section] != kind]


@functools.cache
def _kinds_of_files(*arguments: str) -> dict[str, Any]:
    files = _compose([*arguments])
    return {section: OmegaConf.select(files, f"{section}.kind") for section in _KIND_SECTIONS}


def _check_known(override: Override, options: dict[str, list[str]]) -> None:
    key = override.key_or_group
    if _is_hydra(key):
        return
    if override.is_sweep_override():
        raise UserError(
            f"`{override.input_line}` names several values",
            fix="add --multirun to run one job for each",
        )
    if key in options:
        value = override.value()
        if not override.is_delete() and value not in options[key]:
            if key == "model":
                refuse_folder(str(value))
            hint = did_you_mean(str(value), options[key])
            raise UserError(
                f"there is no `{key}={shorten(value)}`" + (f": {hint}" if hint else ""),
                why=f"`{key}` can be: {', '.join(options[key])}",
                fix=f"an optimizer of optax works by its name: optimizer.kind={shorten(value)}"
                if key == "optimizer"
                else "",
            )
        return
    section = key.partition(".")[0]
    known = [*field_paths(Config), *options]
    if section not in known:
        raise unknown_key(key, known)


def _as_hydra(override: Override, options: dict[str, list[str]], keys: set[str]) -> str:
    """Let a plain ``a.b=c`` also set keys that no file has; the schema checks them afterwards."""
    text, key = override.input_line or "", override.key_or_group
    if override.type is not OverrideType.CHANGE or _is_hydra(key):
        return text
    if key in options:
        return f"+{text}" if key == "experiment" else text
    # An axis given under two names stays as it is, so that the schema sees both.
    if canonical_key(key) not in keys:
        text = text.replace(key, canonical_key(key), 1)
    return f"++{text}"


def _is_hydra(key: str) -> bool:
    return key == "hydra" or key.startswith(("hydra.", "hydra/"))


def _explain(error: Exception, options: dict[str, list[str]]) -> UserError:
    text = yaml_line(error)
    missing = re.search(r"Could not (?:find|locate) '(\S+)/(\S+?)'", text)
    if missing:
        group, choice = missing.groups()
        known = ", ".join(options.get(group, []))
        return UserError(
            f"there is no `{group}={choice}`", why=f"`{group}` can be: {known}" if known else ""
        )
    return UserError("the config cannot be composed", why=text)
