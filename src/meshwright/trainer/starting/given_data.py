"""The data that a trainer is given, as `Data`, and its first batch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meshwright.config.argument_checks import MOST_SAMPLES, check_count
from meshwright.config.builders import parameters_of
from meshwright.data.batches import form_of, read_batch
from meshwright.data.elements import Expected
from meshwright.data.initial_fields import task_of, with_initial_fields
from meshwright.data.prompts import as_prompts
from meshwright.data.protocols import Data, OutOfData
from meshwright.data.rollout_data import as_rollouts
from meshwright.data.user_data import as_data
from meshwright.errors import UserError
from meshwright.plan import Plan
from meshwright.runtime.activity import activity
from meshwright.runtime.user_code import doing
from meshwright.trainer.fit_settings import FitSettings
from meshwright.trainer.rollouts.rollout import held_out_prompts
from meshwright.trainer.starting.continuing import Memory
from meshwright.trainer.trained.fit_result import FitResult
from meshwright.trainer.trainer_settings import TrainerSettings


def read_fit_data(
    trainer: TrainerSettings,
    memory: Memory,
    asked: FitSettings,
    data: Any,
    batch_size: int | None,
    eval_data: Any,
) -> tuple[FitSettings, Any]:
    """Return the settings of a `fit` with its data, and the first batch.

    Data that is given replaces that of a config, which is held out only with its own.
    """
    planned = planned_batch_size(trainer)
    if data is None and asked.recipe is not None:
        given, held_out = asked.recipe.data, asked.recipe.eval_data
    elif data is None:
        raise UserError("fit needs data", fix="write trainer.fit(data, …)")
    else:
        data = as_prompts(data, trainer.task.tokenizer) if trainer.task else data
        expected = Expected(batch_size=batch_size, planned=planned)
        given, held_out = _continued(memory, data, trainer.seed, expected), None
        _check_evaluation(eval_data, asked.eval_every, asked.eval_batches)
        by_epochs = asked.duration is not None and asked.duration.epochs is not None
        given = as_rollouts(given.for_training(by_epochs=by_epochs), trainer.task)
    task = task_of(trainer.loss)
    given = with_initial_fields(given, task, memory.tables)
    first = first_batch(given, planned if batch_size is None else batch_size)
    if eval_data is not None and trainer.task:
        held_out = held_out_prompts(eval_data, trainer.task, trainer.seed)
    elif eval_data is not None:
        held_out = as_data(eval_data, trainer.seed, expected=Expected(like=first, training=False))
        held_out = with_initial_fields(held_out, task, memory.tables)
    return replace(asked, data=given, eval_data=held_out), first


def read_once(data: Any, seed: int) -> Data:
    """Return data to evaluate on as `Data`, which can be read again."""
    return as_data(data, seed, expected=Expected(training=False))


def batches_by_step(
    trainer: TrainerSettings, data: Any, batch_size: int | None, last: FitResult | None
) -> Callable[[int], Any]:
    """Return the batches of data that is given, as a function of the step.

    Their size is by default that of the plan or of the last `fit`.
    """
    if callable(data) and len(parameters_of(data)) == 1:
        return data
    data = as_prompts(data, trainer.task.tokenizer) if trainer.task else data
    given = as_data(data, trainer.seed, expected=Expected(batch_size=batch_size))
    given = as_rollouts(given, trainer.task)
    given = with_initial_fields(given, task_of(trainer.loss))
    known = planned_batch_size(trainer) if batch_size is None else batch_size
    if known is None and last is not None:
        known = last.assembled.plan.batch.global_batch_size
    size = form_of(first_batch(given, known)).num_samples

    def batch(step: int) -> Any:
        try:
            return given.batch(step, size)
        except OutOfData as error:
            raise UserError(
                f"the data has no batch {step}, counting from 0",
                why=str(error),
                fix=f"pass more batches, or steps={step}, or a function from a step to its batch",
            ) from None

    return batch


def planned_batch_size(trainer: TrainerSettings) -> int | None:
    """Return the global batch size of a trainer whose mesh is a plan; None for another mesh."""
    return trainer.mesh.batch.global_batch_size if isinstance(trainer.mesh, Plan) else None


def _continued(memory: Memory, data: Any, seed: int, expected: Expected) -> Data:
    """Return data as `Data`; an iterable that is given again continues where it was."""
    before = memory.data
    if before is None or before[0] is not data or not before[1].forward_only:
        before = memory.data = (data, as_data(data, seed, expected=expected))
    return before[1]


def _check_evaluation(data: Any, every: int | None, batches: int | None) -> None:
    """Refuse settings of evaluations if there is no data to evaluate on."""
    if data is None and (every is not None or batches is not None):
        name = "eval_every" if every is not None else "eval_batches"
        raise UserError(
            f"{name} is given, and there is no data to evaluate on",
            fix="write eval_data=… with held-out data, or leave it out",
        )


def first_batch(data: Data, batch_size: int | None) -> Any:
    """Return the first global batch, whose shapes all others must have."""
    if data.any_batch_size:
        if batch_size is None:
            raise UserError(
                "the size of a global batch is not known",
                why=f"the data ({data.describe()}) can be read in batches of any size",
                fix="write batch_size=64, or as many samples as one step takes",
            )
        check_count("batch_size", batch_size, MOST_SAMPLES)
    with activity("reading the data"), doing("reading batch 0"):
        first = data.first_batch(batch_size)
        if first is None:
            raise UserError(
                "there are no batches to train on",
                why="the iterable is empty",
                fix="give at least one batch; a generator can only be read once",
            )
        return read_batch(first)
