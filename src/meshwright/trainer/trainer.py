"""The `Trainer` of the Python API: a model, a loss, an optimizer and a mesh."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from meshwright.compiled.disk_cache import use_disk_cache
from meshwright.config.argument_checks import check_count, check_kind, check_path
from meshwright.config.schema import CheckpointConfig, Config, TrackingConfig
from meshwright.data.batches import form_of, read_batch
from meshwright.data.prompts import as_prompts
from meshwright.data.rollout_data import as_rollouts
from meshwright.data.user_data import UserData
from meshwright.errors import UserError
from meshwright.inputs.user_model import model_source
from meshwright.ledgers import Ledger, ledger
from meshwright.plan import Plan
from meshwright.proof import Certificate, verify
from meshwright.runtime.interrupt import current_interrupt
from meshwright.step.assemble import Assembled, assemble
from meshwright.tracking.setup import shown_activities
from meshwright.trainer.callbacks import Callback
from meshwright.trainer.fit_settings import read_callbacks, read_duration, read_resume
from meshwright.trainer.from_config import read_config
from meshwright.trainer.programs import Programs
from meshwright.trainer.starting.continuing import raise_interrupted, restored_result
from meshwright.trainer.starting.given_data import (
    batches_by_step,
    first_batch,
    read_fit_data,
    read_once,
)
from meshwright.trainer.starting.planning import (
    PlannedTraining,
    automatic_plan,
    data_missing,
    plan_elsewhere,
    trainer_plan,
)
from meshwright.trainer.starting.resume import find_resume_point
from meshwright.trainer.starting.run_warnings import warn_of_end
from meshwright.trainer.starting.start import find_start
from meshwright.trainer.stepping import SteppingTrainer
from meshwright.trainer.trained.fit_result import FitResult, with_rollouts
from meshwright.trainer.trainer_settings import places_unknown
from meshwright.trainer.training_run import TrainingRun
from meshwright.trees import Batch, resize_batch

_POLICY = ("on_nonfinite", "max_skipped", "max_rewinds")


@places_unknown
@dataclass(kw_only=True)
class Trainer(SteppingTrainer):
    """Trains a Flax NNX model on any mesh of devices.

    Attributes:
        model: a function that builds the model, from `nnx.Rngs` if it takes them; or an existing
            model; or a Linen module.
        loss: ``loss(model, batch)``: a scalar mean, or `Weighted(total, weight)`; optionally with
            a dict of metrics.
        task: instead of a loss, what to learn from rewards: `GRPO`.
        optimizer: any optax transformation.
        eval_loss: what evaluations compute instead of the loss, in the same form: for example
            without label smoothing, or with further metrics. Early stopping and the best
            checkpoint go by it.
        mesh: ``"fsdp=4,tensor=2"``, a mapping of axis sizes, or a whole `Plan`; ``"auto"`` lets
            the planner choose, and an empty string puts all devices on ``data``.
        precision: no (float32), bf16 or fp16.
        kernels: what evaluates known parts of the model, such as attention: auto, xla or none.
        gradient_accumulation_steps: microbatches per step.
        sync_gradients_every: microbatches between two gradient reductions.
        clip_norm: largest global gradient norm.
        sharding: what is sharded and how; see `ShardingConfig`.
        pipeline: the schedule of a mesh with pipeline stages: its name, such as ``"zb_h1"``, a
            mapping, or a `PipelineConfig`.
        trainable: NNX filter of what is trained, or path patterns, such as ``["head.**"]``.
        lora: adapters to train instead of the model's parameters: ``mw.LoRA(rank=16)``. With
            adapters, ``trainable`` names what is trained besides them.
        ema_decay: keep a moving average of the weights, of which each step keeps this share;
            None keeps none. `FitResult.averaged` and ``ema=True`` read it.
        eval_ema: whether evaluations during training are of that average.
        weights: a Hugging Face folder whose weights training starts from; by default that of a
            model from `hf_model`, which takes no other.
        init_from: a run or a checkpoint whose parameters training starts from.
        init_patterns: path patterns of the parameters to take from it, such as ``blocks.**``
            or, under another name, ``**:encoder.**``; all by default.
        on_nonfinite: what to do about a step whose loss or gradient is not finite: stop; skip
            it; rewind to the last checkpoint and leave out the batches since; or apply it, for an
            optimizer that handles such gradients itself.
        max_skipped: consecutive steps to skip before training stops.
        max_rewinds: how often training goes back before it stops.
        seed: seed of initialization, dropout and data order.
        log_every: steps between two logged steps.
        run_name: the name of the run in its folder's metadata, in reports and in trackers; by
            default the end of the folder's path.
        devices: the devices to train on; all by default.
        compilation_cache: whether this process keeps compiled programs on disk for later ones, or
            a folder for them; by default on accelerators, in the user's cache folder.
    """

    @classmethod
    def from_config(cls, config: Config, *, run_dir: str | Path | None = None) -> Self:
        """Return the trainer that a config describes; its `fit` needs no arguments.

        Args:
            config: the config.
            run_dir: the run folder for metrics and checkpoints; None writes nothing.
        """
        settings, defaults = read_config(config, run_dir)
        trainer = cls(**settings)
        trainer.defaults = defaults
        return trainer

    def fit(
        self,
        data: UserData | None = None,
        *,
        steps: int | None = None,
        max_duration: str | None = None,
        epochs: float | None = None,
        batch_size: int | None = None,
        eval_data: UserData | None = None,
        eval_every: int | None = None,
        eval_batches: int | None = None,
        callbacks: Sequence[Callback] = (),
        on_metrics: Callable[[int, dict[str, float]], None] | None = None,
        run_dir: str | Path | None = None,
        resume: str | None = None,
        restart: bool = False,
        checkpoint: CheckpointConfig | None = None,
        tracking: TrackingConfig | None = None,
        progress: bool | None = None,
        assembled: Assembled | None = None,
    ) -> FitResult:
        """Train for a number of steps or a duration.

        A second `fit` continues where the last one ended; ``steps`` and ``max_duration`` count from
        the first step of the run. Ctrl-C raises `KeyboardInterrupt` after the current step,
        SIGTERM and SIGUSR1 exit with code 75; the state is saved in run_dir, or kept in memory.

        Args:
            data: a dict of arrays; a dataset of Grain, PyTorch, Hugging Face or tf.data; a list or
                an iterable of global batches or samples; a function of ([seed,] step, batch_size)
                or one that returns an iterator; or a source with ``len`` and ``rows(ids)``.
            steps: number of steps; 0 evaluates and saves the initial model.
            max_duration: instead of steps: ``"1000st"``, ``"2ep"``, ``"30min"``.
            epochs: instead of steps: passes over the data.
            batch_size: samples per global batch, if the data does not come in batches.
            eval_data: held-out data in any of these forms.
            eval_every: steps between two evaluations; None for a single one at the end.
            eval_batches: the most batches of one evaluation; None uses every sample once.
            callbacks: callbacks to call during training.
            on_metrics: called with the number (from 1) and the metrics of every logged step.
            run_dir: the run folder for metrics and checkpoints; None writes nothing.
            resume: auto (the newest checkpoint in run_dir, if any), must, never, or a path to one.
            restart: start over, even if this trainer has trained before.
            checkpoint: when to save checkpoints in run_dir, and how many to keep.
            tracking: trackers besides the files in run_dir.
            progress: show progress on stderr; by default with a run_dir or on a terminal.
            assembled: the result of `assemble` for such batches, to save the time.
        """
        asked = self.defaults.changed(
            duration=read_duration(steps, max_duration, epochs, self.defaults.duration),
            eval_every=eval_every,
            eval_batches=eval_batches,
            callbacks=[*self.defaults.callbacks, *read_callbacks(callbacks, on_metrics)],
            run_dir=run_dir,
            resume=read_resume(resume, restart),
            checkpoint=checkpoint,
            tracking=tracking,
            progress=progress,
        )
        if assembled is not None:
            fix = "write the result of trainer.assemble(batch)"
            check_kind("assembled", assembled, Assembled, fix)
        self._settle()
        asked, first = read_fit_data(self, self._memory, asked, data, batch_size, eval_data)
        if asked.resume == "never":
            self._memory.result = None
        with shown_activities(asked.run_dir, asked.progress):
            programs = self._programs(first, assembled)
            start = find_start(self, asked, programs, self._memory.result)
            run = TrainingRun(self, asked, programs, first, start)
            result = self._memory.result = run.run()
        # A command reports the end of its run itself.
        if current_interrupt() is None:
            warn_of_end(result, start.steps, asked, form_of(first).num_samples)
            raise_interrupted(result)
        return result

    def evaluate(
        self,
        data: Any,
        *,
        eval_batches: int | None = None,
        of: FitResult | str | Path | None = None,
    ) -> dict[str, float]:
        """Evaluate what was trained last; see `FitResult.evaluate`.

        Args:
            data: samples in any form `fit` takes; each counts exactly once.
            eval_batches: the most batches to use; None for all samples.
            of: a result, or the folder of a run or a checkpoint, to evaluate instead.
        """
        data = as_prompts(data, self.task.tokenizer) if self.task else data
        data = read_once(data, self.seed) if isinstance(of, str | Path) else data
        return self._trained(of, data).evaluate(data, eval_batches=eval_batches)

    def predict(
        self,
        data: Any,
        fn: Callable[[Any, Any], Any] | None = None,
        *,
        of: FitResult | str | Path | None = None,
    ) -> Any:
        """Apply what was trained last to every sample in order; see `FitResult.predict`.

        Args:
            data: an array of samples, or samples in any form `fit` takes.
            fn: ``fn(model, batch)``, which returns arrays with one row per sample; by default
                the model itself, for data of a single array.
            of: a result, or the folder of a run or a checkpoint, to predict with instead; for a
                folder the data must have the arrays that the loss reads.
        """
        data = read_once(data, self.seed) if isinstance(of, str | Path) else data
        return self._trained(of, data).predict(data, fn)

    def assemble(self, batch: Batch) -> Assembled:
        """Build the step for batches of this shape; nothing is compiled yet."""
        use_disk_cache(self.compilation_cache)
        batch = read_batch(batch)
        return assemble(
            model_source(self.model, self.loss, lambda: batch),
            self.loss,
            self.whole_optimizer,
            self._plan(batch),
            batch,
            clip_norm=self.clip_norm,
            trainable=self.trained,
            devices=self.devices,
            guarded=self.guarded,
        )

    def plan(
        self,
        data: UserData | None = None,
        *,
        hardware: str | None = None,
        batch_size: int | None = None,
    ) -> PlannedTraining:
        """Find the fastest plan for this model; nothing is allocated or compiled.

        Print it to read why, pass its ``plan`` to another trainer as the mesh, or save it.

        Args:
            data: what `fit` takes; it is needed after a `fit` as well.
            hardware: such as ``8xH100`` or ``2x8xA100-80GB``; by default the trainer's devices.
            batch_size: samples per global batch; by default those of the data's batches, of the
                trainer's plan or of the last `fit`.
        """
        if data is None:
            raise data_missing(hardware)
        batches = batches_by_step(self, data, batch_size, self.result)
        return plan_elsewhere(self, read_batch(batches(0)), hardware)

    def verify(
        self, data: UserData, *, steps: int = 5, batch_size: int | None = None
    ) -> Certificate:
        """Prove that training on the mesh equals training on one device.

        Args:
            data: what `fit` takes, or a function from the number of a step to its batch.
            steps: steps to compare in float64.
            batch_size: samples per global batch; by default those of the data's batches, of the
                trainer's plan or of the last `fit`.
        """
        check_count("steps", steps)
        use_disk_cache(self.compilation_cache)
        batches = batches_by_step(self, data, batch_size, self.result)
        first = read_batch(batches(0))
        return verify(
            model_source(self.model, self.loss, lambda: first),
            self.loss,
            self._plan(first),
            lambda step: read_batch(batches(step)),
            optimizer=self.whole_optimizer,
            steps=steps,
            clip_norm=self.clip_norm,
            seed=self.seed,
            trainable=self.trained,
            devices=self.devices,
            guarded=self.guarded,
        )

    def ledger(self, data: Any, *, batch_size: int | None = None) -> Ledger:
        """Compile the step without running it, and list what it sends; see `meshwright.ledger`.

        Args:
            data: a global batch, or its shapes; with a batch_size, what `fit` takes.
            batch_size: samples per global batch; None if the data is one.
        """
        return ledger(
            self,
            data if batch_size is None else batches_by_step(self, data, batch_size, self.result)(0),
        )

    def _trained(self, of: FitResult | str | Path | None, data: Any) -> FitResult:
        given = self._last() if of is None else of
        if given is None:
            raise UserError(
                "there is no trained model yet",
                fix='call fit first, with steps=0 for the model as it is, or write of="runs/first"',
            )
        if isinstance(given, FitResult):
            return given
        check_kind("of", given, (str, Path), "write the result of a fit, or a run folder")
        point = find_resume_point(str(check_path("of", given)), None)
        assert point is not None
        data = as_rollouts(data, self.task)
        batch = resize_batch(first_batch(data, 1), point.metadata.global_batch_size)
        result = restored_result(point, self._programs(batch, None))
        return result if self.task is None else with_rollouts(result, data, self.seed)

    def _programs(self, batch: Any, assembled: Assembled | None) -> Programs:
        # Of the policy, only whether the step is guarded is part of a program.
        names = [each.name for each in fields(self) if each.name not in _POLICY]
        settings = (*(getattr(self, name) for name in names), self.guarded)
        known = self._memory.programs(settings, batch)
        if known is not None and assembled in (None, known.assembled):
            return known
        programs = Programs(assembled or self.assemble(batch), self.eval_loss or self.loss)
        return self._memory.keep_programs(settings, batch, programs)

    def _plan(self, batch: Batch) -> Plan:
        num_samples = form_of(batch).num_samples
        if not (isinstance(self.mesh, str) and self.mesh == "auto"):
            return trainer_plan(self, num_samples)
        if num_samples not in self._memory.plans:
            self._memory.plans[num_samples] = automatic_plan(self, batch)
        return self._memory.plans[num_samples]
