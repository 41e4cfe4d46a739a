"""Refusing to launch inside another launcher: its variables say that there are other processes."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from meshwright.config.environment import read_environment
from meshwright.config.launchers import ENVIRONMENT, LAUNCHERS, Found, Launcher, read_launcher
from meshwright.errors import UserError
from meshwright.text.units import counted


def refuse_outer_launcher(
    nprocs: int, environ: Mapping[str, str], *, is_shared: bool = False
) -> None:
    """Raise if the environment says that this launch is one of several processes.

    The launch would overwrite the variables, and each group of processes would train a model of
    its own. If the run ``is_shared``, the launch follows MASTER_ADDR, RANK and WORLD_SIZE.
    """
    for launcher in LAUNCHERS:
        if (is_shared and launcher is ENVIRONMENT) or not launcher.started(environ):
            continue
        found = read_launcher(launcher, environ)
        if launcher is ENVIRONMENT and "rank" in found.numbers and not found.is_complete:
            # The same message as without launch.
            read_environment({name: environ[name] for name in found.variables.values()})
        if not _says_more(found):
            continue
        given = _variables(launcher, found, environ)
        shown = " ".join(f"{name}={value}" for name, value in given.items())
        raise UserError(
            f"{launcher.title} and --nprocs {nprocs} describe different processes",
            why=f"{shown} says that this is one process among others, and the "
            f"{counted(nprocs, 'process', 'processes')} of --nprocs {nprocs} would not join them: "
            "each launch would train a model of its own",
            fix="leave launch out, and start the command itself as each of these processes; or, "
            f"for processes on this machine only, run `unset {' '.join(given)}` first; or, for a "
            "launch on each of several machines, add --nodes with their number",
        )


def _variables(launcher: Launcher, found: Found, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are set and say where process 0 is, and which process this is."""
    address = () if found.address is None else found.address.variables
    names = (*address, *launcher.rank, *launcher.world_size)
    return {name: text for name in names if (text := environ.get(name, "").strip())}


def _says_more(found: Found) -> bool:
    """Whether a launcher mentions other processes, or a process 0 elsewhere."""
    size, address = found.numbers.get("world_size"), found.address
    return (
        (size or 1) > 1
        or found.numbers.get("rank", 0) > 0
        # One process alone does not connect to anybody, wherever that may be.
        or (size != 1 and address is not None and address.is_given and _is_elsewhere(address.host))
    )


def _is_elsewhere(host: str) -> bool:
    here = {"localhost", "::1", "[::1]", "0.0.0.0", socket.gethostname(), socket.getfqdn()}
    return host not in here and not host.startswith("127.")
