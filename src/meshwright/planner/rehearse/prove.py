"""Proofs of estimates: plans are compiled, and compared with what was predicted."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.errors import EnvironmentProblem
from meshwright.hardware import Hardware
from meshwright.inputs.plan_file import without_planned
from meshwright.planner.devices.absent_gpus import INSTALL
from meshwright.planner.estimate.estimate import Estimate
from meshwright.planner.rehearse.rehearsal import CPU_PROGRAM, Figure, percent
from meshwright.runtime.activity import activity
from meshwright.text.columns import Columns
from meshwright.text.units import human_bytes

Compile = Callable[[Estimate], Mapping[str, Any]]
"""Compiles the plan of an estimate, and returns the report of a rehearsal."""


_DEVICES = ("hardware", "simulate")
"""Settings that a proof replaces by the devices to compile for."""


@dataclass(frozen=True)
class ProvedPlan:
    """A plan that was predicted and compiled; bytes are per device.

    Programs for CPUs are compared in what is the same on all devices: state and what is sent.
    """

    estimate: Estimate
    report: Mapping[str, Any]
    for_gpus: bool

    def figures(self) -> list[Figure]:
        """Return what was compiled, with what was predicted."""
        memory, traffic = self.estimate.memory, self.estimate.time.traffic
        compiled = self.report["memory"]
        state, whole = compiled["state_bytes"], compiled["total_bytes"]
        total = memory.compiled if self.for_gpus else None
        rest = memory.compiled - memory.state if self.for_gpus else None
        sent = {axis: own.sent_bytes for axis, own in traffic.items()}
        return [
            Figure("state", state, "bytes", "compiled", memory.state),
            Figure("rest", whole - state, "bytes", "compiled", rest),
            Figure("total", whole, "bytes", "compiled", total),
            *(
                Figure(f"sent over {axis}", own, "bytes", "compiled", sent.get(axis, 0.0))
                for axis, own in self.report["sent_bytes"].items()
            ),
        ]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "plan": self.estimate.plan.model_dump(mode="json"),
            "compiled_for": self.report["compiled_for"],
            "compile_seconds": self.report["compile_seconds"],
            "figures": {
                each.name: {
                    "predicted": each.predicted,
                    "compiled": each.value,
                    "error": each.error,
                }
                for each in self.figures()
            },
        }


def prove(
    estimates: Sequence[Estimate],
    overrides: Sequence[str],
    *,
    for_gpus: bool,
    compile_plan: Compile | None = None,
) -> list[ProvedPlan]:
    """Compile the plans of estimates, each in a process of its own.

    ``overrides`` are the settings that describe the model and the task. Programs are for the GPUs
    of the estimates, or for virtual CPU devices.
    """
    compile_plan = compile_plan or partial(rehearse_apart, overrides=overrides, for_gpus=for_gpus)
    proved: list[ProvedPlan] = []
    for number, estimate in enumerate(estimates, start=1):
        with activity(f"compiling plan {number} of {len(estimates)}"):
            proved.append(ProvedPlan(estimate, compile_plan(estimate), for_gpus))
    return proved


def rehearse_apart(
    estimate: Estimate, overrides: Sequence[str], *, for_gpus: bool
) -> Mapping[str, Any]:
    """Rehearse a plan in another process, which has enough virtual CPU devices if it needs them."""
    kept = [w for w in without_planned(overrides) if w.partition("=")[0] not in _DEVICES]
    with tempfile.TemporaryDirectory(prefix="meshwright-prove-") as folder:
        file = Path(folder) / "plan.yaml"
        plan = estimate.plan
        file.write_text(plan.to_yaml(), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "meshwright", "rehearse", *kept, f"plan={file}"]
        devices = f"hardware={estimate.hardware}" if for_gpus else f"simulate={plan.num_devices}"
        done = subprocess.run(
            [*command, devices, "--on", "gpu" if for_gpus else "cpu", "--json"],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise EnvironmentProblem(
            f"the plan {plan.describe()} could not be compiled",
            why=done.stderr.strip()[-2000:],
            fix="`meshwright rehearse` with the same settings shows more",
        )
    return json.loads(done.stdout)


def proof_table(proved: Sequence[ProvedPlan]) -> Columns:
    """Return predicted and compiled figures side by side, a row for each."""
    rows = [
        (
            plan.estimate.plan.describe() if not number else "",
            each.name,
            "" if each.predicted is None else human_bytes(each.predicted),
            human_bytes(each.value),
            percent(each.error),
        )
        for plan in proved
        for number, each in enumerate(plan.figures())
    ]
    shown = 5 if any(plan.for_gpus for plan in proved) else 4
    head = ("plan", "per device", "predicted", "compiled", "error")[:shown]
    return Columns(head, [row[:shown] for row in rows], right=head[2:])


def cpu_note(planned: Hardware) -> str:
    """Return what a proof by programs for CPUs says about other hardware; CPUs need no note."""
    chip = planned.chip
    if chip.platform == "cpu":
        return ""
    compiler = (
        f" JAX's compiler for {chip.name} is not installed; {INSTALL} to compare with programs for "
        "it."
        if chip.cores is not None
        else ""
    )
    return (
        f"{CPU_PROGRAM} The rest and the total are therefore not compared with what is predicted "
        f"for {chip.name}.{compiler}"
    )
