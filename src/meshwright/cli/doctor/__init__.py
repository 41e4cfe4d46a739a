"""`meshwright doctor`: is this machine, and this group of processes, ready to train?"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

from meshwright import processes
from meshwright.cli.doctor import machine
from meshwright.cli.doctor.all_reduce import check_all_reduce
from meshwright.cli.doctor.render import render
from meshwright.cli.doctor.warnings import disagreements, find_warnings
from meshwright.errors import ExitCode, typed_line
from meshwright.runtime.activity import activity
from meshwright.runtime.host_machine import host_memory
from meshwright.text.units import counted

if TYPE_CHECKING:
    from meshwright.cli.request import Request

__all__ = ["collect", "render", "run"]


def run(request: Request) -> int:
    """Print the report; fail if the all-reduce fails."""
    report = collect()
    request.output.result(report, render(report))
    return ExitCode.DONE if report["all_reduce_ok"] else ExitCode.CHECK_FAILED


def collect() -> dict[str, Any]:
    """Examine this machine and return a report of plain values.

    With several connected processes, each must call this; they compare their reports.
    """
    report: dict[str, Any] = {
        "versions": machine.versions(),
        **machine.system(),
        **_devices(),
        "accelerators": machine.accelerators(),
        "environment": machine.environment(os.environ),
        "ranks": machine.ranks(os.environ),
        "coordinator": machine.coordinator(os.environ),
        "memory": host_memory(),
        "disk": machine.disk(),
    }
    _compare(report)
    report["warnings"] = [*find_warnings(report), *report.pop("disagreements")]
    return report


def _compare(report: dict[str, Any]) -> None:
    """Combine the all-reduce results of all processes and note where processes differ."""
    settings = {f"{name} version": version for name, version in report["versions"].items()}
    settings |= {
        "XLA_FLAGS": report["environment"].get("XLA_FLAGS", ""),
        "the number of local devices": report["local_devices"],
    }
    gathered = processes.gather({"settings": settings, "reduced": report["all_reduce"]})
    outcomes = [process["reduced"] for process in gathered]
    report["all_reduce_ok"] = all(outcome["ok"] for outcome in outcomes)
    faults = {f["id"]: f for outcome in outcomes for f in outcome["wrong_devices"]}
    report["all_reduce"]["wrong_devices"] = [faults[device] for device in sorted(faults)]
    report["disagreements"] = disagreements([process["settings"] for process in gathered])


def _devices() -> dict[str, Any]:
    """Start JAX, list its devices and check an all-reduce."""
    found: dict[str, Any] = {
        "jax_error": None,
        "backend": None,
        "cpu_chosen": False,
        "devices": 0,
        "local_devices": 0,
        "device_kinds": {},
        "device_list": [],
        "process_index": processes.process_index(),
        "process_count": processes.process_count(),
    }
    try:
        import jax

        devices = jax.devices()
    except Exception as error:
        # A broken installation is part of the report.
        reduced = {"ok": False, "expected": 0, "wrong_devices": [], "error": typed_line(error)}
        return found | {"jax_error": reduced["error"], "all_reduce": reduced}
    with activity(f"checking {counted(len(devices), 'device')}"):
        reduced = check_all_reduce(devices)
    return found | {
        "backend": jax.default_backend(),
        "cpu_chosen": str(getattr(jax.config, "jax_platforms", "")).startswith("cpu"),
        "devices": len(devices),
        "local_devices": jax.local_device_count(),
        "device_kinds": dict(Counter(device.device_kind for device in devices)),
        "device_list": [machine.device(device) for device in devices],
        "process_index": jax.process_index(),
        "process_count": jax.process_count(),
        "all_reduce": reduced,
    }
