"""Data that the model itself makes: completions of prompts, a batch for each step."""

from collections.abc import Callable
from typing import Any

import numpy as np

from meshwright.data.indexed_data import SyntheticData, take_rows
from meshwright.data.protocols import Data, HostBatch, Rows
from meshwright.errors import Setting, UserError


def as_rollouts(prompts: Data, task: Any) -> Data:
    """Return the completions of prompts for a task that learns from them; other data as it is."""
    wanted = getattr(task, "for_prompts", False) and not isinstance(prompts, SyntheticData)
    return RolloutData(prompts, task) if wanted else prompts


MakeBatch = Callable[[int, int], HostBatch]
"""From the number of a rollout and the size of a batch to the batch."""


class RolloutData(Data):
    """Completions of prompts, with what a task learns from.

    A batch has the completions of ``batch_size / num_generations`` prompts, those of one prompt
    next to each other, and ``num_iterations`` steps have the same one. Outside training, where no
    model is there to complete prompts, batches are random ones of the same shapes.

    Args:
        prompts: the prompts; see `PromptSource`.
        task: has the numbers, and makes random batches.

    Attributes:
        make: makes the batch of a rollout; None outside training.
        resume: returns the batch of a rollout that an earlier attempt began.
    """

    read_ahead = False

    def __init__(self, prompts: Data, task: Any) -> None:
        self.prompts, self.task = prompts, task
        self.make: MakeBatch | None = None
        self.resume: Callable[[int], HostBatch] | None = None
        self._made: tuple[int, HostBatch] | None = None

    def batch(self, step: int, batch_size: int, rows: Rows | None = None) -> HostBatch:
        """Return the batch of one step, or these rows of it; it may generate it first."""
        if self.make is None:
            return take_rows(self.task.synthetic_batch(step, batch_size), rows)
        self.num_prompts(batch_size)
        number, inside = divmod(step, self.task.num_iterations)
        if self._made is None and inside and self.resume is not None:
            self._made = (number, self.resume(number))
        if self._made is None or self._made[0] != number:
            self._made = (number, self.make(number, batch_size))
        return take_rows(self._made[1], rows)

    def num_prompts(self, batch_size: int) -> int:
        """Return the prompts of a batch."""
        each = self.task.num_generations
        if batch_size % each:
            raise UserError(
                f"a batch of {batch_size} completions has no whole groups",
                why=f"every prompt has {Setting('grpo.num_generations', each)} completions",
                fix=f"write {Setting('training.global_batch_size', -(-batch_size // each) * each)}",
            )
        return batch_size // each

    def ids(self, step: int, batch_size: int, rows: Rows | None = None) -> Rows | None:
        """Return the number of the prompt of each completion."""
        own = self.prompts.ids(step // self.task.num_iterations, self.num_prompts(batch_size))
        if own is None:
            return None
        each = np.repeat(own, self.task.num_generations)
        return each if rows is None else each[rows]

    @property
    def num_samples(self) -> int | None:
        """Completions of all prompts, each as often as it is used."""
        prompts, task = self.prompts.num_samples, self.task
        return None if prompts is None else prompts * task.num_generations * task.num_iterations

    @property
    def sequential(self) -> bool:
        """True: a rollout needs the model after the step before."""
        return True

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the prompts."""
        own = self.task.tokenizer
        return self.prompts.tokenizer if own is None else own

    def fingerprint(self) -> str:
        """Return that of the prompts."""
        return self.prompts.fingerprint()

    def describe(self) -> str:
        """Return how many completions there are of which prompts."""
        return f"{self.prompts.describe()}, {self.task.num_generations} completions of each"
