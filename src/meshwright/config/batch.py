"""The batch equation: global = micro × data × fsdp × accumulation, in configs and plan files."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from meshwright.config.base import Frozen
from meshwright.errors import Setting, Spelling, UserError, current_spelling
from meshwright.mesh.axes import AXES, divisors, is_whole, resolve_alias
from meshwright.text.units import counted, either

DEFAULT_MICRO_BATCH_SIZE = 4

GLOBAL_BATCH_SIZE = Setting("training.global_batch_size")


class Batch(Frozen):
    """The sizes of a batch.

    Attributes:
        global_batch_size: samples of one optimizer step, on all devices together.
        micro_batch_size: samples per device and microbatch.
        replicas: groups of devices with different samples (data × fsdp).
        gradient_accumulation_steps: microbatches per step.
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
            fix = f"{_would_work(product)}; or leave one of the three out, and it is derived"
            raise _contradiction(
                self.global_batch_size, self.micro_batch_size, self.replicas, steps, fix
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
        meaning = f"{describe_replicas(replicas)} × accumulation {steps}"
        micro = _divide(total, replicas, steps, meaning)
    elif steps is None:
        by = f"micro_batch_size {micro} × {describe_replicas(replicas)}"
        steps = _divide(total, replicas, micro, by, _other_micro(total, replicas, micro))
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
    return sorted(sorted(divisors(number), key=lambda d: abs(d - to))[:2])


def microbatches_setting(micro: int, steps: int) -> str:
    """Return the settings for ``steps`` microbatches of ``micro`` samples."""
    setting = str(Setting("training.gradient_accumulation_steps", steps))
    if current_spelling() is Spelling.PYTHON:
        return setting
    return f"{Setting('training.micro_batch_size', micro)} {setting}"


def _other_micro(total: int, replicas: int, micro: int) -> str:
    """Suggest microbatch sizes that divide a batch; nothing if the replicas do not divide it."""
    if total % replicas:
        return ""
    choices = either(nearest_divisors(total // replicas, micro))
    return f"a micro_batch_size of {choices} would work, or "


def _divide(total: int, replicas: int, times: int, meaning: str, instead: str = "") -> int:
    by = replicas * times
    if total % by == 0 and total >= by:
        return total // by
    below, above = total // by * by, (total // by + 1) * by
    shared = "" if below else f"; or {share_rows(total, replicas)}"
    raise UserError(
        f"a global batch of {counted(total, 'sample')} cannot be divided",
        why=f"{meaning} = {by}, and {total} is not a multiple of {by}",
        fix=instead + _would_work(*(size for size in (below, above) if size)) + shared,
    )


def share_rows(samples: int, devices: int) -> str:
    """Return the advice for a batch with fewer samples than there are devices."""
    size = (devices // samples,) if devices % samples == 0 else ()
    return f"let several devices share each row ({Setting('mesh.context', *size)})"


def _contradiction(total: int, micro: int, replicas: int, steps: int, fix: str) -> UserError:
    return UserError(
        "the batch sizes contradict each other",
        why=f"micro_batch_size {micro} × {describe_replicas(replicas)} × "
        f"gradient_accumulation_steps {steps} = {micro * replicas * steps}, but "
        f"global_batch_size is {total}",
        fix=fix,
    )


def _would_work(*sizes: int) -> str:
    """Suggest sizes, both for users who pass batches and for those who write a config."""
    return f"a global batch of {either(sizes)} samples would work ({GLOBAL_BATCH_SIZE})"


def describe_replicas(replicas: int) -> str:
    """Return the number of replicas in words, and the axes that make them."""
    return f"{counted(replicas, 'replica')} (data × fsdp)"


_SIZES = ("global_batch_size", "micro_batch_size", "replicas", "gradient_accumulation_steps")


def check_file_batch(values: Mapping[str, Any], is_plan: Callable[[dict[str, Any]], bool]) -> None:
    """Refuse the batch of a plan file that contradicts itself or the mesh, and suggest numbers.

    People edit these numbers one by one. Missing or unknown keys and values that are not sizes are
    left to the schema.
    """
    mesh, batch = values.get("mesh"), values.get("batch")
    if not isinstance(mesh, Mapping) or not isinstance(batch, Mapping):
        return
    axes = {resolve_alias(str(axis)): size for axis, size in mesh.items()}
    if not axes.keys() <= set(AXES):
        return
    data, fsdp = axes.get("data", 1), axes.get("fsdp", 1)
    sizes: dict[str, Any] = {name: batch.get(name) for name in _SIZES}
    if not all(is_whole(size) and size > 0 for size in (data, fsdp, *sizes.values())):
        return
    total, micro, written, steps = sizes.values()
    replicas, product = data * fsdp, micro * written * steps
    if written == replicas and total == product:
        return
    choices = [
        changed
        for changed in _choices(sizes, replicas)
        if is_plan({**values, "batch": {**batch, **changed}})
    ]
    choices = choices or [{"replicas": replicas, "global_batch_size": micro * replicas * steps}]
    # The first has the same global batch, the last the same microbatches.
    ends = [choices[0], *choices[1:][-1:]]
    fix = "; or ".join(_written(sizes, changed) for changed in ends)
    if written != replicas:
        raise UserError(
            "the plan's batch does not fit its mesh",
            why=f"data={data} × fsdp={fsdp} = {replicas}, but batch.replicas is {written}",
            fix=f"write {fix}",
        )
    raise _contradiction(total, micro, replicas, steps, f"write {fix}")


def _choices(sizes: Mapping[str, int], replicas: int) -> Iterator[dict[str, int]]:
    """Yield sizes that satisfy the equation; those with the same global batch first."""
    total, micro, _, steps = sizes.values()
    if total % (micro * replicas) == 0:
        yield {"replicas": replicas, "gradient_accumulation_steps": total // (micro * replicas)}
    if total % (steps * replicas) == 0:
        yield {"replicas": replicas, "micro_batch_size": total // (steps * replicas)}
    yield {"replicas": replicas, "global_batch_size": micro * replicas * steps}


def _written(sizes: Mapping[str, int], changed: Mapping[str, int]) -> str:
    """Return changes as they are written in the file, and the equation that they make true."""
    keys = [f"batch.{name}: {size}" for name, size in changed.items() if sizes[name] != size]
    total, *factors = ({**sizes, **changed}).values()
    return f"{' and '.join(keys)} ({total} = {' × '.join(map(str, factors))})"
