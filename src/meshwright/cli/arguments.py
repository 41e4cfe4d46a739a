"""Splitting a command line into flags and the overrides that Hydra composes."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from meshwright.cli.commands import COMMANDS, Command, Flag
from meshwright.errors import UserError, did_you_mean

SETTINGS = "SETTINGS"
"""The value of a flag that takes all settings after it."""
_SHORT = {"-h": "--help", "-m": "--multirun", "-c": "--cfg", "-cd": "--config-dir"}


@dataclass(frozen=True)
class Arguments:
    """The parsed command line after ``meshwright``; a switch has an empty value.

    The overrides are plain words for a command without a config.
    """

    command: Command
    overrides: tuple[str, ...]
    flags: dict[str, str] = field(default_factory=dict[str, str])

    def has(self, flag: str) -> bool:
        """Whether a flag was given."""
        return flag in self.flags

    def number(self, flag: str, default: int, *, most: int = 1000, least: int = 1) -> int:
        """Return the value of a flag that takes a whole number from ``least`` to ``most``."""
        text = self.flags.get(flag, str(default))
        if not text.isdecimal() or not least <= int(text) <= most:
            raise UserError(
                f"{flag} {text} is not valid", fix=f"write {flag} N with N from {least} to {most}"
            )
        return int(text)

    def given_number(self, flag: str, *, most: int = 1000, least: int = 1) -> int | None:
        """Return the number of a flag like `number`; None without the flag."""
        return self.number(flag, least, most=most, least=least) if self.has(flag) else None

    @property
    def checkpoint(self) -> dict[str, Any]:
        """Which checkpoint of a run was asked for, and whether its averages."""
        return {
            "step": self.given_number("--step", most=2**31, least=0),
            "which": self.flags.get("--which", "last"),
            "ema": self.has("--ema"),
        }

    def words(self, *names: str, example: str) -> tuple[str, ...]:
        """Return the words of a command without a config; there must be as many as names."""
        if len(self.overrides) != len(names):
            fix = f"write meshwright {self.command.name} {example}"
            if any(map(_is_setting, self.overrides)):
                flags = [flag.name for flag in self.command.flags if flag.value]
                fix += f"; instead of settings it has flags: {', '.join(flags)}"
            raise UserError(
                f"{self.command.name} takes {' and '.join(names)}",
                why=f"given: {' '.join(self.overrides) or 'nothing'}",
                fix=fix,
            )
        return self.overrides

    @property
    def config_dir(self) -> Path | None:
        """The user's own config directory, which must exist."""
        if "--config-dir" not in self.flags:
            return None
        path = Path(self.flags["--config-dir"])
        if not path.is_dir():
            raise UserError(f"--config-dir: there is no directory `{path}`")
        return path

    @property
    def config_file(self) -> Path | None:
        """The saved config to run again, which must exist."""
        if "--config" not in self.flags:
            return None
        path = Path(self.flags["--config"])
        path = path / "config.yaml" if path.is_dir() else path
        if not path.is_file():
            raise UserError(
                f"--config: there is no file `{path}`", fix="name the config.yaml of a run folder"
            )
        return path


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Parse ``command [flags] [overrides]``; flags may be anywhere after the command."""
    name, *rest = argv
    command = find_command(name)
    known = {flag.name: flag for flag in command.all_flags}
    flags: dict[str, str] = {}
    overrides: list[str] = []
    words = list(rest)
    while words:
        word = words.pop(0)
        head, equals, value = word.partition("=")
        head = _SHORT.get(head, head)
        if not head.startswith("-"):
            overrides.append(word)
            continue
        flag = known.get(head)
        if flag is None:
            following = value if equals else next(iter(words), "")
            raise _unknown_flag(head, following, command, known)
        if not flag.value:
            if equals:
                raise UserError(f"{flag.name} takes no value", fix=f"write {flag.name}")
            flags[flag.name] = ""
            continue
        given = bool(equals or words)
        text = value if equals else words.pop(0) if words else ""
        if not text:
            raise UserError(
                f"{flag.name} needs a value",
                why="what was given is empty" if given else "",
                fix=f"write {flag.name} {flag.value}",
            )
        if flag.value == SETTINGS and (more := list(takewhile(_is_setting, words))):
            text, words = shlex.join([text, *more]), words[len(more) :]
        flags[flag.name] = text
    return Arguments(command, tuple(overrides), flags)


def _is_setting(word: str) -> bool:
    return "=" in word and not word.startswith("-")


def find_command(name: str) -> Command:
    """Return a command by name."""
    if name in COMMANDS:
        return COMMANDS[name]
    hint = did_you_mean(name, COMMANDS)
    if "=" in name:
        hint = f"write the command first: meshwright train {name}"
    raise UserError(
        f"there is no command `{name}`" + (f": {hint}" if hint else ""),
        why=f"commands: {', '.join(COMMANDS)}",
        fix="`meshwright --help` describes them",
    )


def _unknown_flag(head: str, following: str, command: Command, known: dict[str, Flag]) -> UserError:
    keys = _keys_called(head) if command.composes else []
    value = following if following and "=" not in following and following[0] != "-" else "…"
    hint = "" if keys else did_you_mean(head, known)
    written = " or ".join(f"{key}={value}" for key in keys) or "key=value"
    return UserError(
        f"`meshwright {command.name}` has no flag `{head}`" + (f": {hint}" if hint else ""),
        why=f"its flags: {', '.join(known)}",
        fix=f"settings are written without dashes: {written}" if command.composes else "",
    )


def _keys_called(flag: str) -> list[str]:
    """Return the keys of the config that are called like a flag, or that others call so."""
    from meshwright.config.base import field_paths, meant_keys
    from meshwright.config.schema import Config

    name, known = flag.lstrip("-").replace("-", "_"), field_paths(Config)
    called = [key for key in known if name in (key, key.rpartition(".")[2])]
    return (called or meant_keys(name, known))[:3]
