"""The doctor's warnings: problems and their remedies."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from rich.filesize import decimal

from meshwright.cli.doctor.machine import PACKAGES

LOW_DISK_BYTES = 5_000_000_000
LOW_MEMORY_SHARE = 0.1

Report = Mapping[str, Any]
Warnings = Iterator[tuple[str, str]]
"""Pairs of a problem and its remedy."""


def find_warnings(report: Report) -> list[dict[str, str]]:
    """Return problems with their remedies, the most serious first."""
    checks = (_start, _together, _packages, _kinds, _unused, _virtual, _ranks, _space, _speed)
    found = chain.from_iterable(check(report) for check in checks)
    return [{"problem": problem, "remedy": remedy} for problem, remedy in found]


def disagreements(gathered: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Compare the settings of every process with those of process 0."""
    return [
        {
            "problem": f"processes disagree on {what}: process 0 has "
            f"{gathered[0][what] or 'none'}, process {process} has {value or 'none'}",
            "remedy": "start every process from the same environment",
        }
        for process, settings in enumerate(gathered)
        for what, value in settings.items()
        if value != gathered[0][what]
    ]


def _start(report: Report) -> Warnings:
    if report["jax_error"]:
        yield (
            f"JAX cannot start: {report['jax_error']}",
            "reinstall for this machine: pip install -U meshwright, or meshwright[cuda12], "
            "meshwright[cuda13], meshwright[tpu]",
        )


def _together(report: Report) -> Warnings:
    reduced = report["all_reduce"]
    for wrong in reduced["wrong_devices"]:
        yield (
            f"device {wrong['id']} {wrong['fault']} in an all-reduce",
            "leave this device out and have it checked: it would silently corrupt training",
        )
    if reduced["error"] and not report["jax_error"]:
        yield (
            f"the all-reduce failed: {reduced['error']}",
            "check that every process runs, that they reach each other's network, and drivers; "
            "NCCL_DEBUG=INFO shows more on NVIDIA GPUs",
        )


def _packages(report: Report) -> Warnings:
    versions = report["versions"]
    for name, package in PACKAGES.items():
        if versions[name] is None:
            yield f"{package} is not installed", f"pip install {package}"
    jax, jaxlib = versions["jax"], versions["jaxlib"]
    if jax and jaxlib and jax.split(".")[:2] != jaxlib.split(".")[:2]:
        yield f"jax {jax} and jaxlib {jaxlib} do not match", f"pip install -U jax=={jax}"


def _kinds(report: Report) -> Warnings:
    kinds = report["device_kinds"]
    if len(kinds) > 1:
        counts = ", ".join(f"{count} × {kind}" for kind, count in sorted(kinds.items()))
        yield (
            f"devices of different kinds: {counts}",
            "a mesh runs at the pace of its slowest device; use machines of one kind",
        )


def _unused(report: Report) -> Warnings:
    environment, present = report["environment"], report["accelerators"]
    if not present or report["backend"] not in ("cpu", None):
        return
    what = f"this machine has {' and '.join(present)} devices, but JAX uses the CPU"
    if environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        yield f"{what}: CUDA_VISIBLE_DEVICES hides them", "unset CUDA_VISIBLE_DEVICES"
    elif "cpu" in environment.get("JAX_PLATFORMS", ""):
        yield f"{what}: JAX_PLATFORMS=cpu", "unset JAX_PLATFORMS"
    elif not report["cpu_chosen"]:
        yield what, "install for it: meshwright[cuda12], meshwright[cuda13] or meshwright[tpu]"


def _virtual(report: Report) -> Warnings:
    if "xla_force_host_platform_device_count" in report["environment"].get("XLA_FLAGS", ""):
        yield (
            "XLA_FLAGS makes virtual CPU devices",
            "good for trying a mesh, not for speed; unset it for real runs "
            "(simulate=N does the same for one command)",
        )


def _ranks(report: Report) -> Warnings:
    said = report["ranks"]
    count, index = report["process_count"], report["process_index"]
    # The first is the innermost launcher: others may have started it once for each machine.
    for entry in said[:1]:
        source, rank, size = entry["source"], entry["rank"], entry["world_size"]
        if rank is None or size is None:
            yield (
                f"the rank or size from {source} is missing or not a number",
                "set both or neither",
            )
        elif not 0 <= rank < size:
            yield f"{source} says rank {rank} of {size}", f"ranks run from 0 to {size - 1}"
        elif size != count:
            yield (
                f"{source} says {size} processes, JAX runs {count}",
                "the processes are not connected, so each would train on its own: start them "
                "with meshwright launch, or call meshwright.processes.connect",
            )
        elif rank != index:
            yield (
                f"{source} says rank {rank}, JAX says process {index}",
                "give each process its own rank as process_id",
            )
    same = [entry for entry in said if entry["world_size"] == said[0]["world_size"]]
    if len({entry["rank"] for entry in same}) > 1:
        sources = " and ".join(f"{entry['source']} (rank {entry['rank']})" for entry in same)
        yield f"{sources} disagree", "unset the variables of the launcher you do not use"


def _space(report: Report) -> Warnings:
    free = report["disk"]["free_bytes"]
    if free < LOW_DISK_BYTES:
        yield (
            f"only {decimal(free)} free on the disk of this folder",
            "a checkpoint needs about 12 bytes per parameter; free space or choose another "
            "folder with hydra.run.dir=…",
        )
    total, available = (report["memory"][f"host_{key}_bytes"] for key in ("total", "available"))
    if total and available is not None and available < LOW_MEMORY_SHARE * total:
        yield (
            f"only {decimal(available)} of {decimal(total)} host memory are available",
            "stop other programs on this machine",
        )


def _speed(report: Report) -> Warnings:
    for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE"):
        if report["environment"].get(name) == "1" and report["backend"] != "cpu":
            yield f"{name}=1 turns fast links off", f"unset {name} unless something breaks"
