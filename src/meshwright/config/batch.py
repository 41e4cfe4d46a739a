"""The batch equation: global = micro × data × fsdp × accumulation."""

from __future__ import annotations

import math
from typing import Self

from pydantic import Field, model_validator

from meshwright.config.base import Frozen
from meshwright.errors import Setting, Spelling, UserError, current_spelling
from meshwright.text.units import counted, either

DEFAULT_MICRO_BATCH_SIZE = 4

GLOBAL_BATCH_SIZE = Setting("training.global_batch_size")


class Batch(Frozen):
    """The sizes of a batch.

    Attributes:
        global_batch_size: samples of one optimizer update, on all devices together.
        micro_batch_size: samples per device and microbatch.
        replicas: groups of devices with different samples (data × fsdp).
        gradient_accumulation_steps: microbatches per update.
        sync_gradients_every: microbatches between two gradient reductions.
    """

    global_batch_size: int = Field(ge=1)
    micro_batch_size: int = Field(ge=1)
    replicas: int = Field(ge=1)
    gradient_accumulation_steps: int = Field(ge=1)
    sync_gradients_every: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _equation(self) -> Self:
        steps, sync = self.gradient_accumulation_steps, self.sync_gradients_every
        product = self.micro_batch_size * self.replicas * steps
        if self.global_batch_size != product:
            raise UserError(
                "the batch sizes contradict each other",
                why=f"micro_batch_size {self.micro_batch_size} × "
                f"{describe_replicas(self.replicas)} × gradient_accumulation_steps {steps} = "
                f"{product}, "
                f"but global_batch_size is {self.global_batch_size}",
                fix=f"{_would_work(product)}; or leave one of the three out, and it is derived",
            )
        if steps % sync:
            key, choices = "training.sync_gradients_every", nearest_divisors(steps, sync)
            raise UserError(
                f"{Setting(key, sync)} does not divide the accumulation",
                why=f"gradient_accumulation_steps is {steps}",
                fix=f"write {Setting(key, *choices)}",
            )
        return self


def solve_batch(
    *,
    replicas: int,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    gradient_accumulation_steps: int | None = None,
    sync_gradients_every: int = 1,
) -> Batch:
    """Fill in the sizes that were left out; a contradiction is an error with the arithmetic."""
    total, micro, steps = global_batch_size, micro_batch_size, gradient_accumulation_steps
    if any(size is not None and size < 1 for size in (total, micro, steps, replicas)):
        raise UserError("batch sizes must be 1 or more", why=f"given: {total=}, {micro=}, {steps=}")
    if total is None:
        micro = DEFAULT_MICRO_BATCH_SIZE if micro is None else micro
        steps = 1 if steps is None else steps
        total = micro * replicas * steps
    elif micro is None:
        steps = 1 if steps is None else steps
        micro = _divide(
            total, replicas * steps, f"{describe_replicas(replicas)} × accumulation {steps}"
        )
    elif steps is None:
        by = f"micro_batch_size {micro} × {describe_replicas(replicas)}"
        steps = _divide(total, micro * replicas, by, _other_micro(total, replicas, micro))
    return Batch.parse(
        {
            "global_batch_size": total,
            "micro_batch_size": micro,
            "replicas": replicas,
            "gradient_accumulation_steps": steps,
            "sync_gradients_every": sync_gradients_every,
        },
        prefix="" if current_spelling() is Spelling.PYTHON else "training",
    )


def nearest_divisors(number: int, to: int) -> list[int]:
    """Return the one or two divisors of ``number`` nearest to ``to``, the smaller one first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    divisors = {*small, *(number // d for d in small)}
    return sorted(sorted(divisors, key=lambda d: abs(d - to))[:2])


def microbatches_setting(micro: int, steps: int) -> str:
    """Return so many microbatches of so many samples as the reader would write them."""
    setting = str(Setting("training.gradient_accumulation_steps", steps))
    if current_spelling() is Spelling.PYTHON:
        return setting
    return f"{Setting('training.micro_batch_size', micro)} {setting}"


def _other_micro(total: int, replicas: int, micro: int) -> str:
    """Suggest microbatches that divide a batch; nothing if its replicas do not."""
    if total % replicas:
        return ""
    choices = either(nearest_divisors(total // replicas, micro))
    return f"a micro_batch_size of {choices} would work, or "


def _divide(total: int, by: int, meaning: str, instead: str = "") -> int:
    if total % by == 0 and total >= by:
        return total // by
    below, above = total // by * by, (total // by + 1) * by
    raise UserError(
        f"a global batch of {counted(total, 'sample')} cannot be divided",
        why=f"{meaning} = {by}, and {total} is not a multiple of {by}",
        fix=instead + _would_work(*(size for size in (below, above) if size)),
    )


def _would_work(*sizes: int) -> str:
    """Suggest sizes, both for users who pass batches and for those who write a config."""
    return f"a global batch of {either(sizes)} samples would work ({GLOBAL_BATCH_SIZE})"


def describe_replicas(replicas: int) -> str:
    """Return the number of replicas in words, and the axes that make them."""
    return f"{counted(replicas, 'replica')} (data × fsdp)"
