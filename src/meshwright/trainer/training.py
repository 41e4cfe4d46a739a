"""A training put together: compiled, resumed if it can be, run by the loop, and told about."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax

from meshwright.checkpoint.store import FOLDER, CheckpointStore, Passport
from meshwright.config.duration import Duration
from meshwright.config.schema import CheckpointConfig
from meshwright.data.protocols import Data
from meshwright.errors import first_line
from meshwright.processes import broadcast, is_main, process_count
from meshwright.profile import NoProfiling, Profile, Profiling
from meshwright.program.flops import count_flops, peak_flops
from meshwright.program.trace import Loss
from meshwright.step.assemble import Assembled
from meshwright.step.canonical import CanonicalForm
from meshwright.step.state import TrainState
from meshwright.tracking.run_files import read_metrics
from meshwright.tracking.tracker import NullTracker, Tracker
from meshwright.trainer.callbacks import Callback, Callbacks
from meshwright.trainer.compiled import (
    WORTH_TELLING,
    CompiledStep,
    compile_step,
    refuse_deviations,
)
from meshwright.trainer.evaluation import Evaluator
from meshwright.trainer.facts import describe_run, package_versions, tokens_per_sample
from meshwright.trainer.feed import Feed
from meshwright.trainer.interrupt import Interrupt
from meshwright.trainer.keeper import CheckpointKeeper, Keeper, NullKeeper
from meshwright.trainer.limits import Limits
from meshwright.trainer.loop import Loop, Progress
from meshwright.trainer.meter import Meter, Work
from meshwright.trainer.remarks import other_microbatches, repeated_samples
from meshwright.trainer.resume import Origin, check_fits, check_same_run, restore


@dataclass(frozen=True, repr=False)
class FitResult:
    """What a training run gave.

    Attributes:
        losses: the mean loss of every logged update, by its number from 0.
        eval: the metrics of every evaluation, by updates done.
        updates: how many are done, those before a resume included.
        seconds: time spent, compilation included.
        stopped: why it ended.
        state: the state at the end.
        assembled: the step and what it was made from.
        run_dir: where everything about it is; None if it was not written down.
        interrupted: whether a signal ended it; the state was saved, if there is a run_dir.
    """

    losses: dict[int, float]
    eval: dict[int, dict[str, float]]
    updates: int
    seconds: float
    stopped: str
    state: TrainState
    assembled: Assembled
    run_dir: Path | None = None
    interrupted: bool = False

    def __repr__(self) -> str:
        """Say how it went; states and programs fill pages."""
        last = list(self.losses.values())[-1:]
        shown = f", loss {last[0]:.4f}" if last else ""
        return f"FitResult({self.updates} updates{shown}, {self.seconds:.1f} s, {self.stopped})"

    @property
    def model(self) -> Any:
        """The trained model, as the user wrote it."""
        return self.assembled.model(self.state)

    @property
    def eval_loss(self) -> float | None:
        """The loss of the last evaluation, if there was one."""
        return self.eval[max(self.eval)]["loss"] if self.eval else None


@dataclass(kw_only=True)
class Training:
    """What is asked for.

    Attributes:
        assembled: the step.
        loss: the loss it was made from.
        batch: the shapes of a global batch.
        data: what is trained on.
        duration: how long.
        start: gives the first state, unless a checkpoint does.
        seed: of the run.
        eval_data: what is held out; None for no evaluation.
        eval_every: updates between two evaluations; None for one at the end.
        eval_batches: the most batches one evaluation takes.
        log_every: updates between two looks at the metrics.
        workers: processes that read data; 0 reads on threads.
        prefetch: batches read ahead.
        callbacks: code of the user's.
        run_dir: where the run is written down; None for nowhere.
        make_tracker: from the last update to who is told.
        checkpoint: what is kept, if there is a run_dir.
        origin: the checkpoint to go on from.
        config: the whole config, for the checkpoints.
        project: the name of the project.
        learning_rate: the learning rate by update, if known.
        strict: make a program that deviates from its plan an error.
        profile: find out where the time of a few updates goes.
        finish: from the last state to what else the result should hold.
        remarks: what else there is to say before it starts.
    """

    assembled: Assembled
    loss: Loss
    batch: Any
    data: Data
    duration: Duration
    start: Callable[[], TrainState]
    seed: int
    eval_data: Data | None = None
    eval_every: int | None = None
    eval_batches: int = 16
    log_every: int = 10
    workers: int = 0
    prefetch: int = 4
    callbacks: Sequence[Callback] = ()
    run_dir: Path | None = None
    make_tracker: Callable[[int | None], Tracker] = lambda _: NullTracker()
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    origin: Origin | None = None
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    project: str = "meshwright"
    learning_rate: Callable[[int], Any] | None = None
    strict: bool = False
    profile: bool = False
    finish: Callable[[TrainState], Mapping[str, Any]] = lambda _: {}
    remarks: Sequence[str] = ()

    def check(self) -> None:
        """Refuse a checkpoint that is of another run, before anything is written or compiled."""
        if self.origin is None:
            return
        changes = check_same_run(
            self.origin.passport,
            self.config,
            dataset=self._passport.dataset,
            global_batch_size=self._batch.global_batch_size,
            accept=self.checkpoint.accept_changes,
        )
        check_fits(self.origin, self._form)
        leaves = self.assembled.traced.layout.leaves
        others = other_microbatches(self.origin.passport, self._batch, leaves)
        self.remarks = [*self.remarks, *changes, *others]

    def run(self) -> FitResult:
        """Train; whatever happens, what was begun is ended."""
        started = time.perf_counter()
        updates = self.duration.total_updates(
            num_samples=self.data.num_samples, batch_size=self._batch.global_batch_size
        )
        compiled = compile_step(self.assembled, self.batch)
        deviations = compiled.deviations(from_bytes=WORTH_TELLING)
        repeats = repeated_samples(self._batch.global_batch_size, self.data.num_samples)
        remarks = [*self.remarks, *repeats, *self.assembled.remarks, *deviations]
        if self.strict:
            refuse_deviations([*self.assembled.remarks, *compiled.deviations()])
        tracker = self.make_tracker(updates)
        progress, result, interrupt = Progress(), dict[str, Any](), Interrupt()
        keeper: Keeper = NullKeeper()
        try:
            self._tell_start(tracker, compiled, remarks)
            state = self._first_state(tracker, progress)
            keeper = self._keeper(tracker)
            loop = self._loop(compiled, tracker, updates, keeper, interrupt)
            with interrupt.watch():
                state = loop.train(state, progress)
            seconds = time.perf_counter() - started
            tracker.event("stop", progress.update, progress.stopped, {"seconds": seconds})
            more = {} if progress.interrupted else self.finish(state)
            result = {**self._summary(progress, seconds), **more}
        except BaseException as error:
            keeper.abandon()
            reason = first_line(error)
            tracker.event("stop", progress.update, f"failed: {reason}", {"failed": True})
            raise
        finally:
            tracker.close(result)
        return FitResult(
            losses=progress.losses,
            eval=progress.eval,
            updates=progress.update,
            seconds=seconds,
            stopped=progress.stopped,
            state=state,
            assembled=self.assembled,
            run_dir=self.run_dir,
            interrupted=progress.interrupted,
        )

    @property
    def _batch(self) -> Any:
        return self.assembled.plan.batch

    @cached_property
    def _work(self) -> Work:
        batch, tokens = self._batch, tokens_per_sample(self.batch)
        samples = batch.global_batch_size
        plan = self.assembled.plan
        return Work(
            samples=samples,
            tokens=None if tokens is None else tokens * samples,
            flops=count_flops(self.assembled.traced) * batch.gradient_accumulation_steps,
            peak_flops=peak_flops(list(self.assembled.mesh.devices.flat), plan.precision),
        )

    def _tell_start(self, tracker: Tracker, compiled: CompiledStep, remarks: list[str]) -> None:
        facts = describe_run(
            self.assembled,
            compiled,
            self._work,
            project=self.project,
            seed=self.seed,
            dataset={
                "fingerprint": self._passport.dataset,
                "num_samples": self.data.num_samples,
                "description": self.data.describe(),
            },
            remarks=remarks,
        )
        tracker.start(facts)
        if compiled.ledger is not None:
            self._write("ledger.json", compiled.ledger.model_dump(mode="json"))
        for remark in remarks:
            tracker.event("warning", 0, remark, {})

    def _first_state(self, tracker: Tracker, progress: Progress) -> TrainState:
        if self.origin is None:
            return self.start()
        state = restore(self.origin, self._form)
        progress.update = self.origin.update
        where = self.origin.folder / str(self.origin.update)
        message = f"going on after update {self.origin.update}, from {where}"
        tracker.event("resume", self.origin.update, message, {"checkpoint": str(where)})
        for update, values in self._earlier_evaluations(self.origin):
            Callbacks(self.callbacks).on_recall(update, values)
        return state

    def _earlier_evaluations(self, origin: Origin) -> list[tuple[int, dict[str, float]]]:
        """Return the evaluations before a checkpoint of this very run, oldest first."""
        if not origin.own or self.run_dir is None:
            return []
        rows = read_metrics(self.run_dir / "metrics.jsonl") if is_main() else {}
        found = [
            (update, {k: math.nan if v is None else v for k, v in values.items()})
            for (split, update), values in rows.items()
            if split == "eval" and update <= origin.update
        ]
        return broadcast(found)

    def _loop(
        self,
        compiled: CompiledStep,
        tracker: Tracker,
        updates: int | None,
        keeper: Keeper,
        interrupt: Interrupt,
    ) -> Loop:
        callbacks = Callbacks(self.callbacks)
        mesh = self.assembled.mesh
        evaluate = None
        if self.eval_data is not None:
            evaluate = Evaluator(
                self.assembled,
                self.loss,
                self.eval_data,
                batches=self.eval_batches,
                warn=lambda remark: tracker.event("warning", 0, remark, {}),
            )
        return Loop(
            run=compiled.run,
            feed=Feed(
                self.data,
                batch_size=self._batch.global_batch_size,
                sharding=self.assembled.step.shardings.batch,
                workers=self.workers,
                prefetch=self.prefetch,
            ),
            limits=Limits(updates, self.duration.seconds, callbacks, interrupt),
            meter=Meter(self._work, list(mesh.devices.flat)),
            tracker=tracker,
            callbacks=callbacks,
            keeper=keeper,
            profiling=self._profiling(compiled),
            on_profile=partial(self._keep_profile, tracker),
            evaluate=evaluate,
            eval_every=self.eval_every,
            log_every=self.log_every,
            extra=self._extra,
        )

    def _profiling(self, compiled: CompiledStep) -> NoProfiling:
        if not self.profile or self.run_dir is None:
            return NoProfiling()
        return Profiling(self.run_dir / "trace", self.assembled.mesh, compiled.text)

    def _keep_profile(self, tracker: Tracker, update: int, profile: Profile) -> None:
        self._write("profile.json", profile.to_json())
        shares = ", ".join(f"{n.replace('_', ' ')} {s:.0%}" for n, s in profile.shares.items())
        message = f"{profile.updates} updates of {profile.seconds_per_update:.3f} s: {shares}"
        tracker.event("profile", update, message, {"shares": profile.shares})
        for advice in profile.advice:
            tracker.event("warning", update, advice, {})

    def _write(self, name: str, content: Any) -> None:
        if self.run_dir is not None and is_main():
            (self.run_dir / name).write_text(json.dumps(content), encoding="utf-8")

    def _keeper(self, tracker: Tracker) -> Keeper:
        if self.run_dir is None or not self.checkpoint.enabled:
            return NullKeeper()
        store = CheckpointStore(
            self.run_dir / FOLDER,
            keep_last=self.checkpoint.keep_last,
            keep_best=self.checkpoint.keep_best,
        )
        own = self.origin is not None and self.origin.own
        self._form.prepare()
        return CheckpointKeeper(
            store,
            self._form,
            lambda update: replace(self._passport, update=update),
            every=self.checkpoint.every,
            last=self.origin.update if self.origin is not None and own else None,
            tell=tracker.event,
        )

    @cached_property
    def _form(self) -> CanonicalForm:
        return CanonicalForm(self.assembled)

    @cached_property
    def _passport(self) -> Passport:
        """What goes with every checkpoint of the run; the data are looked at once."""
        return Passport(
            update=0,
            seed=self.seed,
            dataset=self.data.fingerprint(),
            global_batch_size=self._batch.global_batch_size,
            plan=self.assembled.plan.model_dump(mode="json"),
            config=self.config,
            versions=package_versions(),
            processes=process_count(),
        )

    def _extra(self, update: int) -> dict[str, float]:
        if self.learning_rate is None:
            return {}
        # On a CPU, where it does not wait for the step.
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return {"learning_rate": float(self.learning_rate(update - 1))}

    def _summary(self, progress: Progress, seconds: float) -> dict[str, Any]:
        losses = list(progress.losses.values())
        evaluated = progress.eval[max(progress.eval)]["loss"] if progress.eval else None
        return {
            "updates": progress.update,
            "first_loss": losses[0] if losses else None,
            "final_loss": losses[-1] if losses else None,
            "eval_loss": evaluated,
            "seconds": seconds,
            "stopped": progress.stopped,
        }
