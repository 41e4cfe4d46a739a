"""Proving estimates: the plans are compiled, and what was predicted is compared with the result."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import EnvironmentProblem
from meshwright.hardware import Hardware
from meshwright.inputs.plan_file import without_planned
from meshwright.planner.devices.absent_gpus import INSTALL
from meshwright.planner.estimate.estimate import Estimate
from meshwright.planner.rehearse.figures import percent, relative_error
from meshwright.planner.rehearse.rehearsal import CPU_PROGRAM
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

    Attributes:
        estimate: the prediction.
        state: bytes of the training state in the compiled program.
        total: bytes of the whole program.
        sent: bytes that a device sends per update, by axis.
        compiled_for: the devices it was compiled for.
        compile_seconds: how long that took.
    """

    estimate: Estimate
    state: int
    total: int
    sent: Mapping[str, int]
    compiled_for: str
    compile_seconds: float

    @property
    def errors(self) -> dict[str, float | None]:
        """How far each prediction is off, as a share of the compiled figure."""
        return {name: relative_error(*pair) for name, pair in self.pairs().items()}

    def pairs(self) -> dict[str, tuple[float, float]]:
        """Return what was predicted and what was compiled, by name."""
        memory, traffic = self.estimate.memory, self.estimate.time.traffic
        predicted = {axis: own.sent_bytes for axis, own in traffic.items()}
        sent = {f"sent over {a}": (predicted.get(a, 0.0), own) for a, own in self.sent.items()}
        return {
            "state": (memory.state, self.state),
            "rest": (memory.compiled - memory.state, self.total - self.state),
            "total": (memory.compiled, self.total),
            **sent,
        }

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "plan": self.estimate.plan.model_dump(mode="json"),
            "compiled_for": self.compiled_for,
            "compile_seconds": self.compile_seconds,
            "figures": {
                name: {"predicted": guess, "compiled": found, "error": relative_error(guess, found)}
                for name, (guess, found) in self.pairs().items()
            },
        }


def prove(
    estimates: Sequence[Estimate], overrides: Sequence[str], compile_plan: Compile | None = None
) -> list[ProvedPlan]:
    """Compile the plans of estimates, each in a process of its own, for their hardware.

    Args:
        estimates: the estimates, such as those of the best plans.
        overrides: the settings of the command line that describe the model and the task.
        compile_plan: compiles a plan instead.
    """
    compile_plan = compile_plan or (lambda estimate: rehearse_apart(estimate, overrides))
    proved: list[ProvedPlan] = []
    for number, estimate in enumerate(estimates, start=1):
        with activity(f"compiling plan {number} of {len(estimates)}"):
            proved.append(read_report(estimate, compile_plan(estimate)))
    return proved


def rehearse_apart(estimate: Estimate, overrides: Sequence[str]) -> Mapping[str, Any]:
    """Rehearse a plan in another process, which has enough virtual CPU devices if it needs them."""
    kept = [w for w in without_planned(overrides) if w.partition("=")[0] not in _DEVICES]
    with tempfile.TemporaryDirectory(prefix="meshwright-prove-") as folder:
        file = Path(folder) / "plan.yaml"
        file.write_text(estimate.plan.to_yaml(), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "meshwright", "rehearse", *kept, f"plan={file}"]
        done = subprocess.run(
            [*command, *_target(estimate), "--json"], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise EnvironmentProblem(
            f"the plan {estimate.plan.describe()} could not be compiled",
            why=done.stderr.strip()[-2000:],
            fix="`meshwright rehearse` with the same settings shows more",
        )
    return json.loads(done.stdout)


def _target(estimate: Estimate) -> list[str]:
    """Return what to compile for: the GPUs of the estimate, or virtual CPU devices."""
    if estimate.hardware.chip.platform == "cpu":
        return [f"simulate={estimate.plan.num_devices}", "--on", "cpu"]
    return [f"hardware={estimate.hardware}", "--on", "gpu"]


def read_report(estimate: Estimate, report: Mapping[str, Any]) -> ProvedPlan:
    """Return what the report of a rehearsal says about an estimate."""
    memory = report["memory"]
    return ProvedPlan(
        estimate=estimate,
        state=memory["state_bytes"],
        total=memory["total_bytes"],
        sent=report["sent_bytes"],
        compiled_for=report["compiled_for"],
        compile_seconds=report["compile_seconds"],
    )


def proof_table(proved: Sequence[ProvedPlan]) -> Columns:
    """Return predicted and compiled figures side by side, a row for each."""
    rows = [
        (
            plan.estimate.plan.describe() if not number else "",
            name,
            human_bytes(guess),
            human_bytes(found),
            percent(relative_error(guess, found)),
        )
        for plan in proved
        for number, (name, (guess, found)) in enumerate(plan.pairs().items())
    ]
    head = ("plan", "per device", "predicted", "compiled", "error")
    return Columns(head, rows, right=head[2:])


def cpu_note(planned: Hardware) -> str:
    """Return what a proof by programs for CPUs says about the hardware of its plans.

    Args:
        planned: the hardware, for which nothing can be compiled here; CPUs need no note.
    """
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
        f"{CPU_PROGRAM} Predictions for CPUs are compared here, and how far they are off says "
        f"little about {chip.name}.{compiler}"
    )
