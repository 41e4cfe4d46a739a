"""The settings of this process, combined from the variables of all launchers."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from meshwright.config.launchers import ENVIRONMENT, JAX, SLURM, Environ, Found, detect, first
from meshwright.errors import UserError

_NUMBERS = ("world_size", "rank", "local_rank", "num_processes_per_node", "num_nodes")
_SLURM_TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


def read_environment(environ: Environ, known: Collection[str] = ()) -> dict[str, Any]:
    """Return the process settings that the environment gives.

    Launchers that contradict each other are refused, and so are missing settings, unless they are
    ``known`` from elsewhere.
    """
    found = detect(environ)
    _refuse_contradictions(found, environ)
    settings: dict[str, Any] = {}
    for one in found:
        own = _even_nodes(one, environ)
        if one.is_complete and not _same_process(settings, own):
            # Runs inside another launcher, whose node counts do not describe these processes.
            settings = {}
        settings |= own
    _refuse_incomplete(found, settings, environ, known)
    settings |= _whole_node(found, settings)
    settings |= _address(found)
    if "rank" in settings:
        settings.setdefault("local_rank", 0)
    return settings


def run_name(environ: Environ) -> str:
    """Return a name that the processes of this run share, and those of other runs do not.

    It is empty if the environment has no such name.
    """
    jobs = [one.job for one in detect(environ) if one.job]
    return environ.get("MESHWRIGHT_LAUNCH_ID", "").strip() or (jobs[-1] if jobs else "")


def _same_process(settings: Mapping[str, Any], own: Mapping[str, int]) -> bool:
    return all(settings.get(key, own[key]) == own[key] for key in ("world_size", "rank"))


def _even_nodes(found: Found, environ: Environ) -> dict[str, int]:
    """Return the numbers, without node counts of uneven allocations.

    These have no single number of tasks per node. SLURM writes ``4(x2)`` for 4 tasks on each of 2
    nodes, and ``4,3`` where they differ.
    """
    own = {key: found.numbers[key] for key in _NUMBERS if key in found.numbers}
    tasks = first(_SLURM_TASKS, environ)[1] if found.launcher is SLURM else ""
    world = own.get("world_size", 0)
    counts = [own[key] for key in ("num_nodes", "num_processes_per_node") if own.get(key)]
    if "," in tasks or (
        found.launcher is not ENVIRONMENT and any(world % count for count in counts)
    ):
        return {k: v for k, v in own.items() if k not in ("num_nodes", "num_processes_per_node")}
    return own


def _whole_node(found: Sequence[Found], settings: Mapping[str, Any]) -> dict[str, int]:
    """Return one process per node if that is how the launcher works and nothing else is known."""
    counts = {"num_nodes", "num_processes_per_node", "local_rank"}
    complete = [one for one in found if one.is_complete]
    if not complete or not complete[-1].launcher.whole_node or counts & set(settings):
        return {}
    return {"num_processes_per_node": 1}


def _address(found: Sequence[Found]) -> dict[str, Any]:
    """Return the address of process 0; one that was set explicitly takes precedence."""
    settings: dict[str, Any] = {}
    for one in sorted(found, key=lambda one: one.address is not None and one.address.is_given):
        if one.address is None:
            continue
        if one.address.host:
            settings["master_addr"] = one.address.host
        if one.address.port is not None:
            settings["master_port"] = one.address.port
    return settings


def _refuse_contradictions(found: Sequence[Found], environ: Environ) -> None:
    """Raise if two launchers describe different processes, or different addresses of process 0."""
    for number, strong in enumerate(found):
        for weak in found[:number]:
            if not _agree(weak.numbers, strong.numbers):
                raise _contradiction(weak, strong, environ, "world_size", "rank")
            if _is_elsewhere(weak, strong):
                raise _contradiction(weak, strong, environ, "address")


def _agree(outer: Mapping[str, int], inner: Mapping[str, int]) -> bool:
    """Whether two launchers can both be right: they say the same, or one runs inside the other."""
    shared = [key for key in ("world_size", "rank") if key in outer and key in inner]
    if outer.get("world_size") == 1 or all(outer[key] == inner[key] for key in shared):
        return True
    each = inner.get("num_processes_per_node", 0)
    return (
        len(shared) == 2
        and each > 0
        and inner["world_size"] == outer["world_size"] * each
        and inner["rank"] // each == outer["rank"]
    )


def _is_elsewhere(weak: Found, strong: Found) -> bool:
    one, other = weak.address, strong.address
    if one is None or other is None or not (one.is_given and other.is_given):
        return False
    alone = 1 in (weak.numbers.get("world_size"), strong.numbers.get("world_size"))
    ports = {one.port, other.port} - {None}
    return not alone and (one.host != other.host or len(ports) > 1)


def _contradiction(weak: Found, strong: Found, environ: Environ, *keys: str) -> UserError:
    what = "the address of process 0" if "address" in keys else "this process"
    names = [strong.variables[key] for key in keys if key in strong.variables]
    one, other = weak.launcher.title, strong.launcher.title
    return UserError(
        f"{one} and {other} disagree about {what}",
        why=f"{one} says {weak.shown(environ, *keys)}, and {other} says "
        f"{strong.shown(environ, *keys)}",
        fix="unset the variables of the one that does not apply, such as "
        f"`unset {' '.join(names)}`",
    )


def _refuse_incomplete(
    found: Sequence[Found], settings: Mapping[str, Any], environ: Environ, known: Collection[str]
) -> None:
    """Raise if the environment mentions other processes, but not how to join them."""
    mentioning = [
        one
        for one in found
        if one.numbers.get("world_size", 1) > 1
        or (one.launcher is JAX and one.variables)
        or (one.launcher is ENVIRONMENT and "rank" in one.numbers)
    ]
    missing = [key for key in ("world_size", "rank") if key not in settings and key not in known]
    if not mentioning or not missing or settings.get("world_size") == 1:
        return
    one = mentioning[-1]
    names = [one.launcher.numbers[key][0] for key in missing]
    given = [name for name in dict.fromkeys(one.variables.values()) if name in environ]
    shown = one.shown(environ, "world_size", "rank", "address")
    raise UserError(
        f"{shown} means that there are other processes, but {' and '.join(names)} "
        f"{'is' if len(names) == 1 else 'are'} not set",
        why="without joining them, each process would train a model of its own",
        fix=f"export {' '.join(f'{name}=…' for name in names)} in each process, "
        f"or run `unset {' '.join(given)}` to train in this process alone",
    )
