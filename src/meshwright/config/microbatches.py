"""The batch equation with pipeline stages, where a step takes many microbatches."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.config.batch import GLOBAL_BATCH_SIZE, Batch, describe_replicas, solve_batch
from meshwright.config.schema import PipelineConfig
from meshwright.errors import Setting, UserError
from meshwright.text.units import counted, either

MICROBATCHES_PER_STAGE = 4
"""With fewer, filling and draining the pipeline takes more than a fifth of the time."""


def solve_pipeline_batch(
    pipeline: PipelineConfig,
    sizes: Mapping[str, int],
    *,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    gradient_accumulation_steps: int | None = None,
    sync_gradients_every: int = 1,
) -> Batch:
    """Fill in the batch sizes that were left out, for a mesh with or without stages."""
    stages, replicas = sizes.get("pipe", 1), sizes.get("data", 1) * sizes.get("fsdp", 1)
    steps = gradient_accumulation_steps
    if stages > 1:
        asked = _BatchRequest(
            stages, replicas, group_size(pipeline, stages), global_batch_size, micro_batch_size
        )
        _check_groups(asked, pipeline, steps)
        steps = asked.steps(pipeline.num_microbatches) if steps is None else steps
        if global_batch_size is None and micro_batch_size is None:
            # With many microbatches of one sample, a step is about as large as without stages.
            micro_batch_size = 1
    batch = solve_batch(
        replicas=replicas,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=steps,
        sync_gradients_every=1 if stages > 1 else sync_gradients_every,
    )
    if stages == 1:
        return batch
    check_sync(sync_gradients_every, batch.gradient_accumulation_steps, stages)
    return batch.model_copy(update={"sync_gradients_every": sync_gradients_every})


def check_sync(every: int, steps: int, stages: int) -> None:
    """Refuse reductions every few microbatches: stages reduce after each of them, or once."""
    if every not in (1, steps):
        key = "training.sync_gradients_every"
        raise UserError(
            f"{Setting(key, every)} cannot be used with pipeline stages",
            why=f"with pipe={stages} gradients are reduced after each microbatch or after all "
            f"{steps} of a step",
            fix=f"write {Setting(key, steps, 1)}",
        )


def group_size(pipeline: PipelineConfig, stages: int) -> int:
    """Return what the number of microbatches must be a multiple of: the stages, with chunks."""
    return stages if pipeline.schedule == "interleaved" and pipeline.num_chunks > 1 else 1


def nearest_microbatches(total: int, near: int, multiple_of: int = 1) -> list[int]:
    """Return divisors of ``total`` on both sides of ``near``, or the two nearest on one side."""
    fitting = [n for n in range(multiple_of, total + 1, multiple_of) if total % n == 0]
    below, above = [n for n in fitting if n <= near], [n for n in fitting if n > near]
    return [below[-1], above[0]] if below and above else below[-2:] or above[:2]


def multiples_around(number: int, of: int) -> list[int]:
    """Return the multiples on both sides of a number; zero is left out."""
    below = number // of * of
    return [n for n in (below, below + of) if n]


@dataclass(frozen=True)
class _BatchRequest:
    """What is known about a batch before its microbatches, a multiple of ``group``, are counted."""

    stages: int
    replicas: int
    group: int
    samples: int | None
    micro: int | None

    @property
    def own(self) -> int | None:
        """What the number of microbatches must divide; 0 if nothing fits, None if unknown."""
        if self.samples is None:
            return None
        by = self.replicas * (self.micro or 1)
        return 0 if self.samples % by else self.samples // by

    def fits(self, steps: int) -> bool:
        """Whether a step may have this many microbatches, apart from groups."""
        return self.own is None or (self.own > 0 and self.own % steps == 0)

    def steps(self, num_microbatches: int | None) -> int | None:
        """Return the microbatches of a step if they are not given; None if they are derived."""
        usual = num_microbatches or MICROBATCHES_PER_STAGE * self.stages
        if self.samples is None:
            return usual
        if num_microbatches is not None:
            _check_divides(self, num_microbatches)
        if self.micro is not None:
            return None
        if num_microbatches is not None:
            return num_microbatches
        if self.samples % self.replicas:
            # Refused for any number of microbatches, with a reason that does not mention them.
            return 1
        own = self.samples // self.replicas
        counts = range(self.group, min(usual, own) + 1, self.group)
        return max((n for n in counts if own % n == 0), default=1)


def _check_groups(asked: _BatchRequest, pipeline: PipelineConfig, steps: int | None) -> None:
    """Refuse a number of microbatches that should be a multiple of the stages and is not."""
    given = pipeline.num_microbatches
    if asked.group == 1:
        return
    if given is None and (steps is None or asked.micro is not None):
        _check_group_of_samples(asked, pipeline.num_chunks)
    count = given or steps
    if count is None or count % asked.group == 0:
        return
    key = "pipeline.num_microbatches" if given else "training.gradient_accumulation_steps"
    # Microbatches per flush divide those of a step, which divide the samples.
    per_step = steps if given and steps else count
    keeps = per_step != count and per_step % asked.group == 0 and asked.fits(per_step)
    leave = given and steps and not keeps
    other = _other_count(asked, per_step if keeps else asked.own, count, key)
    as_it_is = per_step % count == 0 and asked.fits(per_step)
    raise UserError(
        f"{counted(count, 'microbatch', 'microbatches')} cannot be divided into groups of "
        f"{asked.stages}, one per stage",
        why=f"{Setting(key, count)} is not a multiple of {asked.stages}, which "
        f"{Setting('pipeline.num_chunks', pipeline.num_chunks)} needs",
        fix=(f"leave {Setting('training.gradient_accumulation_steps')} out and " if leave else "")
        + f"write {other}"
        + (f", or {Setting('pipeline.schedule', '1f1b')}" if as_it_is else ""),
    )


def _other_count(asked: _BatchRequest, total: int | None, count: int, key: str) -> str:
    """Return numbers that fit, and a global batch for them if none divides this one."""
    if total is None:
        return str(Setting(key, *multiples_around(count, asked.group)))
    if choices := nearest_microbatches(total, count, asked.group):
        return str(Setting(key, *choices))
    near = max(asked.group, count // asked.group * asked.group)
    batches = multiples_around(asked.samples or 0, asked.replicas * (asked.micro or 1) * near)
    return f"{Setting(key, near)} with a global batch of {either(batches)} samples"


def _check_group_of_samples(asked: _BatchRequest, num_chunks: int) -> None:
    """Refuse a batch that does not divide into groups, whatever the number of microbatches."""
    samples, by = asked.samples, asked.replicas * (asked.micro or 1) * asked.group
    if samples is None or samples % by == 0:
        return
    micro = f"micro_batch_size {asked.micro} × " if asked.micro else ""
    without = f"write {Setting('pipeline.schedule', '1f1b')}, or " if asked.own else ""
    raise UserError(
        f"a global batch of {counted(samples, 'sample')} cannot be divided into groups of "
        f"{asked.stages} microbatches, one per stage",
        why=f"{micro}{describe_replicas(asked.replicas)} × {asked.stages} stages = {by}, and "
        f"{samples} is not a multiple of {by}, which "
        f"{Setting('pipeline.num_chunks', num_chunks)} needs",
        fix=f"{without}use a global batch of {either(multiples_around(samples, by))} samples "
        f"({GLOBAL_BATCH_SIZE})",
    )


def _check_divides(asked: _BatchRequest, count: int) -> None:
    """Refuse a number of microbatches that does not divide the batch, and suggest others."""
    size, by = asked.samples or 0, asked.replicas * (asked.micro or 1) * count
    if size % by == 0:
        return
    choices = nearest_microbatches(asked.own or 0, count, asked.group)
    micro = f"micro_batch_size {asked.micro} × " if asked.micro else ""
    raise UserError(
        f"a global batch of {counted(size, 'sample')} cannot be divided",
        why=f"{micro}{describe_replicas(asked.replicas)} × "
        f"{Setting('pipeline.num_microbatches', count)} = {by}, and {size} is not a multiple of "
        f"{by}",
        fix=(f"write {Setting('pipeline.num_microbatches', *choices)}, or " if choices else "")
        + f"use a global batch of {either(multiples_around(size, by))} samples "
        f"({GLOBAL_BATCH_SIZE})",
    )
