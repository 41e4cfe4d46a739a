"""The `Trainer` of the Python API: a model, a loss, an optimizer and a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optax
from flax import nnx
from flax.nnx.filterlib import Filter

from meshwright.compiled.disk_cache import use_disk_cache
from meshwright.config.argument_checks import (
    check_clip_norm,
    check_count,
    check_kind,
    check_optimizer,
    check_path,
)
from meshwright.config.builders import parameters_of
from meshwright.config.duration import Duration
from meshwright.config.schema import (
    CheckpointConfig,
    KernelChoice,
    OnNonfinite,
    PipelineConfig,
    Precision,
    ShardingConfig,
    TrackingConfig,
)
from meshwright.data.batches import form_of, read_batch
from meshwright.data.elements import Expected
from meshwright.data.protocols import Data
from meshwright.data.user_data import UserData, as_data
from meshwright.errors import UserError
from meshwright.inputs.checks import (
    check_kernels,
    check_loss,
    check_precision,
    check_run_name,
    check_trainable,
)
from meshwright.inputs.user_model import UserModel, exists, model_source
from meshwright.ledgers import Ledger, ledger
from meshwright.mesh.build import Device, check_devices
from meshwright.plan import (
    Plan,
    unused_pipeline,
)
from meshwright.planner.estimate.estimator import Estimator
from meshwright.program.trace.build_model import ModelSource
from meshwright.program.trace.traced_loss import Loss
from meshwright.proof import Certificate, verify
from meshwright.step.assemble import Assembled, assemble
from meshwright.step.canonical import CanonicalForm
from meshwright.step.state import TrainState
from meshwright.tracking.setup import shown_activities
from meshwright.trainer.callbacks import Callback
from meshwright.trainer.ending.end_warnings import warn_of_end
from meshwright.trainer.ending.stop import Stop, StopReason
from meshwright.trainer.incidents.not_finite import NonfinitePolicy, check_policy
from meshwright.trainer.programs import Programs
from meshwright.trainer.resuming.comparable import comparable, optimizer_settings
from meshwright.trainer.resuming.continuing import (
    Memory,
    choose_start,
    continued_state,
    raise_interrupted,
)
from meshwright.trainer.resuming.resume import check_fits, find_resume_point, restore
from meshwright.trainer.run_spec import EvaluationSpec, OutputSpec, RunSpec
from meshwright.trainer.starting.fit_arguments import (
    check_assembled,
    check_compilation_cache,
    check_evaluation,
    check_start,
    first_batch,
    read_callbacks,
    read_duration,
    read_output,
    read_pipeline,
    read_resume,
)
from meshwright.trainer.starting.initial import find_initial, remembered_files
from meshwright.trainer.starting.optax_rate import find_schedule
from meshwright.trainer.starting.plan_settings import PlanSettings
from meshwright.trainer.starting.unknown_arguments import places_unknown
from meshwright.trainer.trained.fit_result import FitResult
from meshwright.trainer.training_run import TrainingRun
from meshwright.trees import Batch, resize_batch
from meshwright.weights.hf_folder import open_folder
from meshwright.weights.hf_model import HfModel, check_one_folder
from meshwright.weights.kept import keep_files

if TYPE_CHECKING:
    from meshwright.trainer.starting.planned_training import PlannedTraining

_POLICY = ("on_nonfinite", "max_skipped", "max_rewinds")


@places_unknown
@dataclass(kw_only=True)
class Trainer:
    """Trains a Flax NNX model on any mesh of devices.

    Attributes:
        model: a function that builds the model, from `nnx.Rngs` if it takes them; or an existing
            model; or a Linen module.
        loss: ``loss(model, batch)``: a scalar mean, or `Weighted(total, weight)`; optionally with
            a dict of metrics.
        optimizer: any optax transformation.
        eval_loss: what evaluations compute instead of the loss, in the same form: for example
            without label smoothing, or with further metrics. Early stopping and the best
            checkpoint go by it.
        mesh: ``"fsdp=4,tensor=2"``, a mapping of axis sizes, or a whole `Plan`; ``"auto"`` lets
            the planner choose, and an empty string puts all devices on ``data``.
        precision: no (float32), bf16 or fp16.
        kernels: what evaluates known parts of the model, such as attention: auto, xla or none.
        gradient_accumulation_steps: microbatches per update.
        sync_gradients_every: microbatches between two gradient reductions.
        clip_norm: largest global gradient norm.
        sharding: what is sharded and how; see `ShardingConfig`.
        pipeline: the schedule of a mesh with pipeline stages: its name, such as ``"zb_h1"``, a
            mapping, or a `PipelineConfig`.
        trainable: NNX filter of what is trained.
        weights: a Hugging Face folder whose weights training starts from; by default that of a
            model from `hf_model`, which takes no other.
        init_from: a run or a checkpoint whose parameters training starts from.
        init_patterns: path patterns of the parameters to take from it, such as ``blocks.**``;
            all by default.
        on_nonfinite: what to do about an update whose loss or gradient is not finite: stop; skip
            it; rewind to the last checkpoint and leave out the batches since; or apply it, for an
            optimizer that handles such gradients itself.
        max_skipped: consecutive updates to skip before training stops.
        max_rewinds: how often training goes back before it stops.
        seed: seed of initialization, dropout and data order.
        log_every: updates between two logged updates.
        run_name: the name of the run in its folder's metadata, in reports and in trackers; by
            default the end of the folder's path.
        devices: the devices to train on; all by default.
        compilation_cache: whether this process keeps compiled programs on disk for later ones, or
            a folder for them; by default on accelerators, in the user's cache folder.
    """

    model: UserModel
    loss: Loss
    optimizer: optax.GradientTransformation
    eval_loss: Loss | None = None
    mesh: str | Mapping[str, int] | Plan = ""
    precision: Precision = "no"
    kernels: KernelChoice = "auto"
    gradient_accumulation_steps: int = 1
    sync_gradients_every: int = 1
    clip_norm: float | None = None
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    pipeline: PipelineConfig | Mapping[str, Any] | str = field(default_factory=PipelineConfig)
    trainable: Filter = nnx.Param
    weights: str | Path | None = None
    init_from: str | Path | None = None
    init_patterns: Sequence[str] | None = None
    on_nonfinite: OnNonfinite = "stop"
    max_skipped: int = 10
    max_rewinds: int = 3
    seed: int = 0
    log_every: int = 10
    run_name: str | None = None
    devices: Sequence[Device] | None = None
    compilation_cache: bool | str | Path | None = None

    def __post_init__(self) -> None:
        self._memory = Memory()
        check_loss(self.loss)
        if self.eval_loss is not None:
            check_loss(self.eval_loss, "eval_loss")
        check_run_name(self.run_name)
        check_optimizer(self.optimizer)
        check_precision(self.precision)
        check_kernels(self.kernels)
        check_count("gradient_accumulation_steps", self.gradient_accumulation_steps)
        check_count("sync_gradients_every", self.sync_gradients_every)
        check_count("log_every", self.log_every)
        check_clip_norm(self.clip_norm)
        check_trainable(self.trainable)
        self._nonfinite()
        check_devices(self.devices)
        check_start(self.sharding, self.seed, self.weights, self.init_from, self.init_patterns)
        check_one_folder(self.model, self.weights)
        check_compilation_cache(self.compilation_cache)
        read_pipeline(self.pipeline)

    def fit(
        self,
        data: UserData,
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
        resume: str = "auto",
        restart: bool = False,
        checkpoint: CheckpointConfig | None = None,
        tracking: TrackingConfig | None = None,
        progress: bool | None = None,
        assembled: Assembled | None = None,
    ) -> FitResult:
        """Train for a number of updates or a duration.

        A second `fit` continues where the last one ended, without compiling again: ``steps`` and
        ``max_duration`` in updates or epochs count from the first update of the run. If the
        batches run out earlier, training stops there with a warning.

        Ctrl-C stops after the current update and raises `KeyboardInterrupt`; SIGTERM and
        SIGUSR1 exit with code 75. With a run_dir the state is saved first, and without one a
        further `fit` continues from memory.

        Args:
            data: a dict of arrays; a dataset of Grain, PyTorch, Hugging Face or tf.data; a list
                or an iterable of global batches (pytrees of arrays, dim 0 being the sample) or of
                samples; a function of (step, batch_size) or (seed, step, batch_size), or one that
                returns an iterator; or a source with ``len`` and ``rows(ids)``.
            steps: number of updates; 0 trains nothing: the initial model is evaluated and saved,
                and is the result.
            max_duration: instead of steps: ``"1000st"``, ``"2ep"``, ``"30min"``.
            epochs: instead of steps: passes over the data.
            batch_size: samples per global batch; given if and only if the data does not come in
                batches.
            eval_data: held-out data in any of these forms.
            eval_every: updates between two evaluations; None for a single one at the end.
            eval_batches: the most batches one evaluation uses, each as large as a training batch;
                None uses every sample exactly once. Data without a known end need a number.
            callbacks: callbacks to call during training.
            on_metrics: called with the number (from 1) and the metrics of every logged update.
            run_dir: the run folder for metrics and checkpoints; None writes nothing.
            resume: auto resumes from the newest checkpoint in run_dir, if there is one; must
                requires one; never starts over; a path names a run or a checkpoint.
            restart: begin anew, whatever this trainer has trained before.
            checkpoint: when to save checkpoints in run_dir, and how many to keep.
            tracking: trackers besides the files in run_dir.
            progress: show progress on stderr; by default with a run_dir or on a terminal. Without
                it, warnings are Python warnings.
            assembled: the result of `assemble` for such batches, to save the time.
        """
        duration = read_duration(steps, max_duration, epochs)
        resume = read_resume(resume, restart)
        callbacks = read_callbacks(callbacks, on_metrics)
        output = read_output(
            run_dir, checkpoint, tracking, progress, log_every=self.log_every, name=self.run_name
        )
        check_assembled(assembled)
        if resume == "never":
            self._memory.result = None
        given = self._read_data(data, batch_size, duration)
        first = first_batch(given, self._batch_size(batch_size))
        with shown_activities(output.run_dir, progress):
            spec = self._spec(
                self._programs(first, assembled),
                first,
                given,
                duration,
                self._evaluation(eval_data, eval_every, eval_batches, first),
                output,
                callbacks,
                resume,
            )
            result = self._memory.result = TrainingRun(spec).run()
        done = result.updates - spec.updates_done
        warn_of_end(result, done, steps, given, form_of(first).num_samples)
        raise_interrupted(result)
        return result

    @property
    def result(self) -> FitResult | None:
        """The result of the last `fit`, also if a signal ended it; None before the first."""
        return self._memory.result

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
        data = self._read_once(data, of)
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
        data = self._read_once(data, of)
        return self._trained(of, data).predict(data, fn)

    def assemble(self, batch: Batch) -> Assembled:
        """Build the step for batches of this shape; nothing is compiled yet."""
        use_disk_cache(self.compilation_cache)
        batch = read_batch(batch)
        source = model_source(self.model, self.loss, lambda: batch)
        return assemble(
            source,
            self.loss,
            self.optimizer,
            self._plan(source, batch),
            batch,
            clip_norm=self.clip_norm,
            trainable=self.trainable,
            devices=self.devices,
            guarded=self._nonfinite().guarded,
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
        from meshwright.trainer.starting.auto_mesh import plan_for

        if data is None:
            given = "" if hardware is None else f', hardware="{hardware}"'
            raise UserError(
                "plan needs data",
                why="a plan depends on the shapes of a batch, and a trainer keeps the batch size "
                "of the last fit, but not its data",
                fix=f"write trainer.plan(data{given}) with the data that fit takes",
            )
        first = read_batch(self._by_update(data, batch_size)(0))
        estimator = self._estimator(first)
        name = getattr(self.model, "__name__", type(self.model).__name__)
        name = "the model" if name == "<lambda>" else name
        samples = form_of(first).num_samples
        return plan_for(self._settings(), estimator, samples, name=name, hardware=hardware)

    def verify(
        self, data: UserData, *, steps: int = 5, batch_size: int | None = None
    ) -> Certificate:
        """Prove that training on the mesh equals training on one device.

        Args:
            data: what `fit` takes, or a function from the number of an update to its batch.
            steps: updates to compare in float64.
            batch_size: samples per global batch; by default those of the data's batches, of the
                trainer's plan or of the last `fit`.
        """
        check_count("steps", steps)
        use_disk_cache(self.compilation_cache)
        batches = self._by_update(data, batch_size)
        first = read_batch(batches(0))
        source = model_source(self.model, self.loss, lambda: first)
        return verify(
            source,
            self.loss,
            self._plan(source, first),
            lambda step: read_batch(batches(step)),
            optimizer=self.optimizer,
            steps=steps,
            clip_norm=self.clip_norm,
            seed=self.seed,
            trainable=self.trainable,
            devices=self.devices,
        )

    def ledger(self, data: Any, *, batch_size: int | None = None) -> Ledger:
        """Compile the step without running it, and list what it sends; see `meshwright.ledger`.

        Args:
            data: a global batch, or its shapes; with a batch_size, what `fit` takes.
            batch_size: samples per global batch; None if the data is one.
        """
        return ledger(self, data if batch_size is None else self._by_update(data, batch_size)(0))

    def _trained(self, of: FitResult | str | Path | None, data: Any) -> FitResult:
        given = self.result if of is None else of
        if given is None:
            raise UserError(
                "there is no trained model yet",
                fix='call fit first, with steps=0 for the model as it is, or write of="runs/first"',
            )
        if isinstance(given, FitResult):
            return given
        check_kind("of", given, (str, Path), "write the result of a fit, or a run folder")
        return self._restored(str(check_path("of", given)), data)

    def _restored(self, run: str, data: Any) -> FitResult:
        """Return the state of a checkpoint as the result of its run."""
        point = find_resume_point(run, None)
        assert point is not None
        size = point.metadata.global_batch_size
        batch = resize_batch(first_batch(data, 1), size)
        programs = self._programs(batch, None)
        form = CanonicalForm(programs.assembled)
        check_fits(point, form)
        return FitResult(
            losses={},
            eval={},
            updates=point.update,
            seconds=0.0,
            stop=Stop(StopReason.RESTORED, f"restored from {point.path}"),
            state=restore(point, form),
            programs=programs,
            metadata=point.metadata,
        )

    def _read_data(self, data: Any, batch_size: int | None, duration: Duration) -> Data:
        """Return data as `Data`; an iterable that is given again goes on where it was."""
        before = self._memory.data
        if before is None or before[0] is not data or not before[1].forward_only:
            expected = Expected(batch_size=batch_size, planned=self._batch_size(None))
            read = as_data(data, self.seed, expected=expected)
            before = self._memory.data = (data, read)
        return before[1].for_training(by_epochs=duration.epochs is not None)

    def _read_once(self, data: Any, of: Any) -> Any:
        """Return what a folder's model is to be evaluated on as `Data`, which is read twice."""
        if not isinstance(of, str | Path):
            return data
        return as_data(data, self.seed, expected=Expected(training=False))

    def _programs(self, batch: Any, assembled: Assembled | None) -> Programs:
        # Of the policy, only whether the step is guarded is part of a program.
        names = [each.name for each in fields(self) if each.name not in _POLICY]
        settings = (*(getattr(self, name) for name in names), self._nonfinite().guarded)
        programs = self._memory.programs(settings, batch)
        if programs is None or assembled not in (None, programs.assembled):
            evaluated = self.eval_loss or self.loss
            programs = Programs(assembled or self.assemble(batch), evaluated)
            self._memory.keep_programs(settings, batch, programs)
        return programs

    def _spec(
        self,
        programs: Programs,
        batch: Any,
        data: Data,
        duration: Duration,
        evaluation: EvaluationSpec,
        output: OutputSpec,
        callbacks: Sequence[Callback],
        resume: str,
    ) -> RunSpec:
        assembled = programs.assembled
        point = find_resume_point(resume, output.run_dir)
        point, result = choose_start(point, self._memory.result, resume)
        initial = find_initial(
            assembled,
            self.seed,
            lambda: self._initial_state(assembled),
            weights=self._weights_folder(),
            init_from=self.init_from,
            init_patterns=self.init_patterns,
            resumed=point is not None or result is not None,
            # What hf_model builds was compared when it was made.
            compare=self.weights is not None,
        )
        return RunSpec(
            assembled=assembled,
            programs=programs,
            loss=self.loss,
            batch=batch,
            data=data,
            duration=duration,
            seed=self.seed,
            initial_state=lambda: (
                initial.state() if result is None else continued_state(result, assembled)
            ),
            weights=initial.source,
            updates_done=0 if result is None else result.updates,
            resume_point=point,
            evaluation=evaluation,
            output=replace(
                output, hf_files=remembered_files(point, output.run_dir, self._hf_files)
            ),
            callbacks=callbacks,
            learning_rate=find_schedule(self.optimizer),
            nonfinite=self._nonfinite(),
            warnings=[
                *unused_pipeline(read_pipeline(self.pipeline), assembled.plan),
                *initial.remarks,
            ],
            settings={
                "optimizer": optimizer_settings(self.optimizer),
                "loss": comparable(self.loss),
                "eval_loss": comparable(self.eval_loss),
                "clip_norm": self.clip_norm,
            },
            code=[self.model, self.loss, self.eval_loss],
            estimator=lambda: self._estimator(batch),
        )

    def _estimator(self, batch: Any) -> Estimator:
        source = model_source(self.model, self.loss, lambda: batch)
        return Estimator(
            source,
            self.loss,
            self.optimizer,
            batch,
            trainable=self.trainable,
            precision=self.precision,
        )

    def _evaluation(
        self, data: Any, every: int | None, batches: int | None, like: Any
    ) -> EvaluationSpec:
        check_evaluation(data, every, batches)
        expected = Expected(like=like, training=False)
        held_out = None if data is None else as_data(data, self.seed, expected=expected)
        return EvaluationSpec(data=held_out, every=every, batches=batches)

    def _by_update(self, data: Any, batch_size: int | None) -> Callable[[int], Any]:
        if callable(data) and len(parameters_of(data)) == 1:
            return data
        given = as_data(data, self.seed, expected=Expected(batch_size=batch_size))
        known = self._batch_size(batch_size)
        known = self._fitted_batch_size() if known is None else known
        size = form_of(first_batch(given, known)).num_samples
        return lambda step: given.batch(step, size)

    def _batch_size(self, given: int | None) -> int | None:
        planned = self.mesh.batch.global_batch_size if isinstance(self.mesh, Plan) else None
        return planned if given is None else given

    def _fitted_batch_size(self) -> int | None:
        return self.result.assembled.plan.batch.global_batch_size if self.result else None

    def _nonfinite(self) -> NonfinitePolicy:
        return check_policy(self.on_nonfinite, self.max_skipped, self.max_rewinds)

    def _weights_folder(self) -> str | Path | None:
        model = self.model
        if self.weights is None and isinstance(model, HfModel) and model.pretrained:
            # Parameters of another run replace the folder's.
            return model.folder.path if self.init_from is None else None
        return self.weights

    def _hf_files(self) -> dict[str, str]:
        if isinstance(self.model, HfModel):
            return keep_files(self.model.folder, config=self.model.config())
        folder = None if self.weights is None else Path(self.weights)
        return keep_files(None if folder is None or not folder.is_dir() else open_folder(folder))

    def _initial_state(self, assembled: Assembled) -> TrainState:
        return assembled.adopt(self.model) if exists(self.model) else assembled.init(self.seed)

    def _settings(self) -> PlanSettings:
        return PlanSettings(
            **{each.name: getattr(self, each.name) for each in fields(PlanSettings)}
        )

    def _plan(self, source: ModelSource, batch: Batch) -> Plan:
        settings = self._settings()
        num_samples = form_of(batch).num_samples
        if not (isinstance(self.mesh, str) and self.mesh == "auto"):
            return settings.plan(num_samples)
        known = self._memory.plans
        if num_samples not in known:
            from meshwright.trainer.starting.auto_mesh import automatic_plan

            known[num_samples] = automatic_plan(
                settings, source, self.loss, self.optimizer, self.trainable, batch, num_samples
            )
        return known[num_samples]
