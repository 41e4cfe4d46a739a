"""The help texts; nothing slow is imported for them."""

from __future__ import annotations

from meshwright.cli.commands import COMMANDS, Command, Flag


def general_help() -> str:
    """Return what `meshwright --help` prints."""
    width = max(len(name) for name in COMMANDS)
    lines = [
        "Meshwright trains Flax NNX models on any mesh of devices.",
        "",
        "usage: meshwright COMMAND [flags] [overrides]",
        "",
        "commands:",
        *(f"  {c.name:<{width}}  {c.help}" for c in COMMANDS.values()),
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
    lines = [
        f"meshwright {command.name}: {command.help}",
        "",
        f"usage: meshwright {command.name} {command.usage}",
        f"example: {command.example}",
        "",
        "flags:",
        *_flag_lines(command.all_flags),
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
        *(f"  {group:<{width}}  {', '.join(names)}" for group, names in options.items()),
        "",
        "settings: `meshwright config` lists every key; write section.key=value.",
        "  simulate=N  use N virtual CPU devices    hardware=8xA100-40GB  the machine planned for",
        "  hydra.run.dir=DIR  where a run is written",
    ]


def _flag_lines(flags: tuple[Flag, ...]) -> list[str]:
    names = [f"{flag.name} {flag.value}".strip() for flag in flags]
    width = max(map(len, names))
    return [f"  {name:<{width}}  {flag.help}" for name, flag in zip(names, flags, strict=True)]
