"""Training by hand: one step on one batch, with the state kept on the devices."""

import time
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from meshwright.checkpoint import CheckpointMetadata
from meshwright.checkpoint.export import choose_checkpoint
from meshwright.data.batches import read_batch
from meshwright.errors import UserError
from meshwright.runtime.versions import package_versions
from meshwright.step.assemble import Assembled
from meshwright.step.state import TrainState, copied
from meshwright.step.train_step import HALTED
from meshwright.trainer.incidents.not_finite import StepValues, bad_step_error, wrong_numbers
from meshwright.trainer.incidents.recovery import cleared
from meshwright.trainer.programs import Programs, compile_step
from meshwright.trainer.run_progress import ALL_DONE
from meshwright.trainer.starting.continuing import Memory, restored_result
from meshwright.trainer.starting.resume import find_resume_point
from meshwright.trainer.starting.same_training import training_facts
from meshwright.trainer.starting.start import Start, find_start
from meshwright.trainer.trained.fit_result import FitResult
from meshwright.trainer.trainer_settings import TrainerSettings
from meshwright.trees import Batch


@dataclass
class Stepping:
    """A run whose batches come one by one; the next step donates the state.

    Steps, those of an earlier `fit` too, are numbered from 1.
    """

    trainer: TrainerSettings
    programs: Programs
    start: Start
    state: TrainState
    done: int
    losses: dict[int, float] = field(default_factory=dict[int, float])
    _started: float = field(default_factory=time.perf_counter)

    def __call__(self, batch: Any) -> dict[str, float]:
        """Train one step, and return its metrics."""
        assembled = self.programs.assembled
        compiled = self.programs.step(batch, lambda: compile_step(assembled, batch))
        self.state, metrics = compiled.run(self.state, assembled.put_batch(batch))
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if values.pop(HALTED, 0.0):
            self.state = replace(self.state, halted=cleared(self.state.halted))
            if self.trainer.on_nonfinite != "skip":
                bad = StepValues(self.done + 1, values["loss"], values["grad_norm"])
                traced = assembled.traced
                numbers = wrong_numbers(traced.batch, jax.tree.leaves(batch))
                indices = "; ".join(traced.wrong_indices(batch))
                raise bad_step_error(bad, indices=indices, numbers=numbers)
            values["skipped"] = 1.0
        self.done += 1
        self.losses[self.done] = values["loss"]
        return values

    def result(self, *, copy: bool = True) -> FitResult:
        """Return what was trained so far; a copy stays alive when training goes on."""
        assembled = self.programs.assembled
        metadata = CheckpointMetadata(
            step=self.done,
            seed=self.trainer.seed,
            global_batch_size=assembled.plan.batch.global_batch_size,
            plan=assembled.plan.model_dump(mode="json"),
            versions=package_versions(),
            training=training_facts(self.trainer, assembled) if copy else {},
        )
        return FitResult(
            losses=dict(self.losses),
            eval={},
            steps=self.done,
            steps_before=self.start.steps,
            seconds=time.perf_counter() - self._started,
            stop=ALL_DONE,
            state=copied(self.state) if copy else self.state,
            programs=self.programs,
            metadata=metadata,
            hf_files=self.start.hf_files,
        )


class SteppingTrainer(TrainerSettings):
    """What a trainer has trained, and how it goes on by hand."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._memory = Memory()
        self._stepping: Stepping | None = None

    def step(self, batch: Batch) -> dict[str, float]:
        """Train one step on a global batch, and return its metrics.

        For batches that depend on the model, as in on-policy training. The state stays on the
        devices, and a `fit` before or after is part of the same run. Nothing is written: save with
        ``trainer.result.save(folder)``. A step that is not finite changes nothing; it raises an
        error unless ``on_nonfinite="skip"``.

        Args:
            batch: the arrays of a batch. Other shapes than before compile another program.
        """
        batch = read_batch(batch)
        programs = self._programs(batch, None)
        if self._stepping is None or self._stepping.programs is not programs:
            self._settle()
            alone = replace(self.defaults, run_dir=None, resume="auto")
            start = find_start(self, alone, programs, self._memory.result)
            self._stepping = Stepping(self, programs, start, start.state(), start.steps)
            assembled = programs.assembled
            for text in (*assembled.remarks, *assembled.traced.wrong_indices(batch)):
                warnings.warn(text, stacklevel=2)
        return self._stepping(batch)

    def snapshot(self) -> Any:
        """Return the trained model as it is now, with arrays that stay alive."""
        trained = self._last()
        if trained is None:
            raise UserError("there is no trained model yet", fix="call step or fit first")
        return trained.assembled.snapshot(trained.state)

    @property
    def result(self) -> FitResult | None:
        """The result of the last `fit`, also if a signal ended it; None before the first.

        After a `step`, it is a copy of what was trained so far.
        """
        return self._memory.result if self._stepping is None else self._stepping.result()

    def best(self) -> FitResult:
        """Return the last run as its best checkpoint has it, with the lowest evaluation loss."""
        last = self._last()
        if last is None or last.run_dir is None:
            raise UserError(
                "there is no best checkpoint, since nothing was saved",
                fix="call fit with a run_dir, eval_data and eval_every first",
            )
        reader, step = choose_checkpoint(last.run_dir, None, "best")
        point = find_resume_point(str(reader.folder / str(step)), None)
        assert point is not None
        return restored_result(point, last.programs)

    def _last(self) -> FitResult | None:
        """Return what was trained last, whose arrays the next step may donate."""
        return self._memory.result if self._stepping is None else self._stepping.result(copy=False)

    def _settle(self) -> None:
        """Make what was trained step by step the last result."""
        self._memory.result, self._stepping = self._last(), None

    def _programs(self, batch: Any, assembled: Assembled | None) -> Programs:
        """Return the programs for such batches."""
        raise NotImplementedError
