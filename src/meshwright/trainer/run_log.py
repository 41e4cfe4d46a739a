"""What a run records about itself: the facts known at the start, its events, and its end."""

import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.protocols import Data
from meshwright.data.shown_rows import shown_rows
from meshwright.data.token_cache import take_origins
from meshwright.errors import first_line
from meshwright.ledgers import Ledger
from meshwright.mesh.svg_drawing import mesh_svg
from meshwright.pipeline.schedule.timeline_drawing import timeline_svg
from meshwright.plan import Plan
from meshwright.processes import is_main, process_count
from meshwright.profile import Profile
from meshwright.program.flops import count_flops, peak_flops
from meshwright.runtime.attempts import EarlierAttempts
from meshwright.runtime.heartbeat import own_heartbeat
from meshwright.runtime.versions import package_versions
from meshwright.sharding.explain import explain
from meshwright.step.assemble import Assembled
from meshwright.text.masking import mask_words
from meshwright.tracking.tracker import Tracker
from meshwright.trainer.fit_settings import FitSettings
from meshwright.trainer.programs import CompiledStep
from meshwright.trainer.run_progress import Progress, Work
from meshwright.trainer.starting.fewer_processes import fewer_processes_note
from meshwright.trainer.trained.fit_result import summarize
from meshwright.trainer.trainer_settings import TrainerSettings
from meshwright.trees import bytes_on_device, tokens_per_sample

FORMAT = 1


@dataclass(frozen=True)
class RunLog:
    """Logs how a run goes."""

    tracker: Tracker
    run_dir: Path | None

    def start(
        self, facts: Mapping[str, Any], ledger: Ledger | None, plan: Plan, *, before: int, note: str
    ) -> None:
        """Log what is known before the first step; remarks among the facts are warnings."""
        self.tracker.start(dict(facts))
        if ledger is not None:
            self._write_json("ledger.json", ledger.model_dump(mode="json"))
        for warning in facts["remarks"]:
            self.warn(warning)
        for origin in take_origins():
            self.tracker.event("note", 0, origin, {})
        earlier = EarlierAttempts.from_environment()
        if earlier.failure:
            message = f"attempt {earlier.count + 1}, after {earlier.failure}"
            self.tracker.event("restart", before, message, {"attempt": earlier.count + 1})
        if fewer := fewer_processes_note(plan):
            details = {"processes": process_count(), "mesh": dict(plan.mesh)}
            self.tracker.event("processes", before, fewer, details)
        if note:
            self.tracker.event("note", 0, note, {})

    def warn(self, message: str) -> None:
        """Log a warning."""
        self.tracker.event("warning", 0, message, {})

    def profile(self, step: int, profile: Profile) -> None:
        """Log where the time of steps goes."""
        self._write_json("profile.json", profile.to_json())
        shares = ", ".join(f"{n.replace('_', ' ')} {s:.0%}" for n, s in profile.shares.items())
        message = f"{profile.steps} steps of {profile.seconds_per_step:.3f} s: {shares}"
        self.tracker.event("profile", step, message, {"shares": profile.shares})
        for advice in profile.advice:
            self.tracker.event("warning", step, advice, {})

    def samples(self, data: Data) -> None:
        """Write some rows of the data for the report, if only parts of them are learned."""
        if rows := shown_rows(data):
            self._write_json("samples.json", rows)

    def mixture(self, step: int, counts: Mapping[str, tuple[int, float]]) -> None:
        """Log how many rows each source of a mixture gave, and how many it should have given."""
        total = max(sum(count for count, _ in counts.values()), 1)
        each = (
            f"{name} {count:,} ({count / total:.2%}; its share is {share:,.1f})"
            for name, (count, share) in counts.items()
        )
        details = {"rows": {name: list(both) for name, both in counts.items()}}
        self.tracker.event("mixture", step, f"rows so far: {', '.join(each)}", details)

    def stop(self, progress: Progress, seconds: float) -> None:
        """Log the end of a run."""
        stop = progress.stop
        details = {"seconds": seconds, "reason": stop.reason.value}
        self.tracker.event("stop", progress.step, stop.text, details)

    def failed(self, progress: Progress, reason: str) -> None:
        """Log the end of a run by an error."""
        self.tracker.event("stop", progress.step, f"failed: {reason}", {"failed": True})

    def _write_json(self, name: str, content: Any) -> None:
        if self.run_dir is not None and is_main():
            (self.run_dir / name).write_text(json.dumps(content), encoding="utf-8")


def attempts_so_far(seconds: float) -> dict[str, Any]:
    """Return the attempts of this launch, and which share of their time went into kept steps."""
    earlier = EarlierAttempts.from_environment()
    goodput = earlier.goodput(own_heartbeat().useful, seconds)
    return {"goodput": goodput, "attempts": earlier.count + 1}


def failed_summary(
    progress: Progress, error: Exception, *, skipped: int, seconds: float
) -> dict[str, Any]:
    """Return the content of result.json for a run that another attempt would not save."""
    return {
        **summarize(progress.losses, progress.eval),
        "steps": progress.step,
        "skipped": skipped,
        "seconds": seconds,
        **attempts_so_far(seconds),
        "stopped": f"failed: {first_line(error)}",
        "failed": True,
    }


def typed_command(argv: Sequence[str]) -> list[str]:
    """Return a process's arguments as one would type them; none for a notebook or ``python -c``."""
    program, *words = argv or [""]
    path = Path(program)
    if path.name == "__main__.py":
        return ["python", "-m", path.parent.name, *words]
    if path.name == "meshwright":
        return ["meshwright", *words]
    if path.suffix == ".py" and "ipykernel" not in program:
        return ["python", program, *words]
    return []


def describe_run(
    trainer: TrainerSettings,
    asked: FitSettings,
    assembled: Assembled,
    compiled: CompiledStep,
    work: Work,
    *,
    fingerprint: str,
    warnings: Sequence[str],
) -> dict[str, Any]:
    """Return the content of run.json."""
    plan, mesh, data = assembled.plan, assembled.mesh, asked.data
    assert data is not None
    reports = explain(assembled.traced.layout, assembled.decision, plan.mesh)
    return {
        "format": FORMAT,
        "project": asked.project,
        "name": trainer.run_name,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": package_versions(),
        "command": mask_words(typed_command(sys.argv)),
        "devices": describe_devices(mesh.devices),
        "mesh": dict(plan.mesh),
        "mesh_svg": mesh_svg(mesh),
        "plan": plan.describe(),
        "pipeline": describe_pipeline(assembled),
        "parameters": {
            "count": sum(int(np.prod(r.shape)) for r in reports),
            "bytes": sum(r.bytes for r in reports),
            "frozen": sum(leaf.size for leaf in assembled.model_leaves.leaves if leaf.is_frozen),
        },
        "memory_per_device": memory_per_device(assembled, compiled),
        "sharding": [
            {
                "path": r.path,
                "shape": list(r.shape),
                "dtype": r.dtype,
                "spec": list(r.spec),
                "bytes_per_device": r.bytes_per_device,
                "reason": r.reason,
            }
            for r in reports
        ],
        "flops_per_step": work.flops,
        "peak_flops": work.peak_flops,
        "dataset": {
            "fingerprint": fingerprint,
            "num_samples": data.num_samples,
            "description": data.describe(),
        },
        "seed": trainer.seed,
        "global_batch_size": plan.batch.global_batch_size,
        "tokens_per_sample": None if work.tokens is None else work.tokens // work.samples,
        "compile_seconds": round(compiled.seconds, 2),
        "remarks": list(warnings),
    }


def describe_pipeline(assembled: Assembled) -> dict[str, Any] | None:
    """Return the pipeline stages and a drawing of their schedule; None without stages."""
    report, pipeline = assembled.pipeline_report, assembled.step.pipeline
    if report is None or pipeline is None:
        return None
    table = pipeline.schedule.table(pipeline.num_microbatches, pipeline.num_stages)
    return {
        "schedule": report.schedule,
        "waiting": report.waiting(),
        "stages": [asdict(stage) for stage in report.stages],
        "timeline_svg": timeline_svg(table.timeline()),
    }


def describe_devices(devices: Any) -> dict[str, Any]:
    """Return the number and the kind of devices."""
    first = devices.flat[0]
    return {
        "count": int(devices.size),
        "kind": first.device_kind,
        "platform": first.platform,
        "processes": process_count(),
    }


def memory_per_device(assembled: Assembled, compiled: CompiledStep) -> dict[str, int | None]:
    """Return the bytes of one device by purpose."""
    state = assembled.step.abstract_state
    batch = 0
    if compiled.memory is not None:
        batch = compiled.memory.argument - bytes_on_device(state)
    temporary = None if compiled.memory is None else compiled.memory.temp
    return {
        "parameters": bytes_on_device(state.params),
        "optimizer": bytes_on_device(state.optimizer),
        "state": bytes_on_device([state.model_state, state.step, state.loss_scale]),
        "batch": max(batch, 0),
        "temporary": temporary,
        "total": bytes_on_device(state) + max(batch, 0) + (temporary or 0),
    }


def work_per_step(assembled: Assembled, batch: Any) -> Work:
    """Return the work of one step on batches like this one."""
    plan, tokens = assembled.plan, tokens_per_sample(batch)
    samples = plan.batch.global_batch_size
    return Work(
        samples=samples,
        tokens=None if tokens is None else tokens * samples,
        flops=count_flops(assembled.traced) * plan.batch.gradient_accumulation_steps,
        peak_flops=peak_flops(list(assembled.mesh.devices.flat), plan.precision),
    )
