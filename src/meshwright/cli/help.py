"""The help texts; nothing slow is imported for them."""

import shutil
import textwrap

from meshwright.cli.commands import COMMANDS, Command

_SETTINGS = {
    "simulate=N": "use N virtual CPU devices",
    "hardware=8xA100-40GB": "the machine planned for",
    "hydra.run.dir=DIR": "where a run is written",
}


def general_help() -> str:
    """Return what `meshwright --help` prints."""
    width = max(len(name) for name in COMMANDS)
    lines = [
        "Meshwright trains Flax NNX models on any mesh of devices.",
        "",
        "usage: meshwright COMMAND [flags] [overrides]",
        "",
        "commands:",
        *(_entry(c.name, c.help, width) for c in COMMANDS.values()),
        "",
        "overrides: key=value, group=choice, +experiment=quick_test, ~key; for example",
        *(f"  {c.example}" for c in COMMANDS.values()),
        "",
        "`meshwright COMMAND --help` shows a command's flags and the config groups.",
        "`meshwright --version` prints the version.",
    ]
    return "\n".join(lines)


def command_help(command: Command) -> str:
    """Return what `meshwright COMMAND --help` prints."""
    flags = {f"{flag.name} {flag.value}".strip(): flag.help for flag in command.all_flags}
    width = max(map(len, flags))
    lines = [
        f"meshwright {command.name}: {command.help}",
        "",
        f"usage: meshwright {command.name} {command.usage}",
        f"example: {command.example}",
        "",
        "flags:",
        *(_entry(name, text, width) for name, text in flags.items()),
        *(_config_lines() if command.composes else ()),
    ]
    return "\n".join(lines)


def _config_lines() -> list[str]:
    from meshwright.config.groups import group_options

    options = group_options()
    width = max(len(group) for group in options)
    return [
        "",
        "config groups (write group=choice; `+experiment=choice` overlays several):",
        *(_entry(group, ", ".join(names), width) for group, names in options.items()),
        "",
        "settings: `meshwright config` lists every key; write section.key=value.",
        *(_entry(name, text, 20) for name, text in _SETTINGS.items()),
    ]


def _entry(name: str, text: str, width: int) -> str:
    """Return a name and what it stands for, wrapped beside the name."""
    columns = max(shutil.get_terminal_size((100, 24)).columns, width + 30)
    first = f"  {name:<{width}}  "
    return textwrap.fill(
        text,
        columns,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )
