"""A report on a pipeline: the work and memory of its stages, and how long they wait."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from meshwright.errors import Setting
from meshwright.pipeline.divide.block_cut import BlockCut, Region, modules_of_blocks, odd_modules
from meshwright.pipeline.divide.division import Division
from meshwright.pipeline.execute.pipelined_loss import PipelinedLoss
from meshwright.pipeline.schedule.advice import bubble_with, pipeline_warnings
from meshwright.pipeline.schedule.timeline import in_flight
from meshwright.program.flops import forward_flops
from meshwright.text.units import counted

SMALLEST_SHARE = 0.05
"""The smallest share of a stage's work that causes a warning."""


class Extra(StrEnum):
    """Parts of the model that a stage may compute besides its blocks."""

    EMBEDDING = "embedding"
    HEAD = "head"
    SHARED = "what all blocks read"


@dataclass(frozen=True)
class StageFacts:
    """The work of one stage, all its devices together; kept microbatches are of one chunk each.

    FLOPs of a forward pass include the repeated last block of a stage with fewer blocks than
    others.
    """

    blocks: tuple[int, ...]
    also: tuple[Extra, ...]
    parameters: int
    flops: int
    microbatches_kept: int


@dataclass(frozen=True)
class PipelineReport:
    """A pipeline in numbers.

    The bubble is the share of the time that stages wait, simulated from the executed ticks with
    equal stages; also by the closed formula, and with stages as slow as their FLOPs.
    """

    schedule: str
    num_microbatches: int
    num_chunks: int
    ticks: int
    bubble: float
    bubble_formula: float
    bubble_with_flops: float
    efficiency: float
    stages: tuple[StageFacts, ...]
    warnings: tuple[str, ...]

    def waiting(self) -> str:
        """Return how long stages wait, as text."""
        return (
            f"stages wait {self.bubble:.1%} of the time if all are equally fast, "
            f"{self.bubble_with_flops:.1%} if each is as slow as its FLOPs say (simulated)"
        )

    def summary(self) -> str:
        """Return the pipeline in one line."""
        pieces = f" × {self.num_chunks} chunks" if self.num_chunks > 1 else ""
        return (
            f"pipeline: {self.schedule} with {counted(self.num_microbatches, 'microbatch')} on "
            f"{len(self.stages)} stages{pieces}; {self.waiting()}"
        )


def pipeline_report(pipelined: PipelinedLoss) -> PipelineReport:
    """Return the report on a pipeline."""
    schedule, count = pipelined.schedule, pipelined.num_microbatches
    stages = stage_facts(pipelined)
    table = schedule.table(count, pipelined.num_stages)
    bubble = table.timeline().bubble
    costs = [stage.flops for stage in stages]
    sizes = pipelined.where.mesh.shape
    with_flops = bubble_with(schedule, count, pipelined.num_stages, costs)
    return PipelineReport(
        schedule=schedule.name,
        num_microbatches=count,
        num_chunks=schedule.num_chunks,
        ticks=len(table.ticks),
        bubble=float(bubble),
        bubble_formula=float(schedule.bubble(count, pipelined.num_stages)),
        bubble_with_flops=float(with_flops),
        efficiency=float(1 - bubble),
        stages=tuple(stages),
        warnings=(
            *pipeline_warnings(
                schedule,
                count,
                pipelined.num_stages,
                costs,
                bubble=with_flops,
                samples=count * pipelined.cut.traced.batch[0].shape[0],
                replicas=sizes.get("data", 1) * sizes.get("fsdp", 1),
                remedy=_remedy(pipelined, stages),
            ),
            *_uneven_blocks(pipelined.division),
            *_recomputed(pipelined.cut, stages),
        ),
    )


def _recomputed(cut: BlockCut, stages: Sequence[StageFacts]) -> list[str]:
    """Warn if stages spend much time on values that each of them recomputes."""
    share = _region_flops(cut, cut.shared) / max(1, max(stage.flops for stage in stages))
    if share < SMALLEST_SHARE:
        return []
    return [
        f"blocks of all stages read values computed from samples before them (an encoder's output,"
        f" a condition), so each stage computes them itself: {share:.0%} of the slowest one's "
        f"work; {Setting('mesh.fsdp')} or {Setting('mesh.tensor')} computes them once"
    ]


def _uneven_blocks(division: Division) -> list[str]:
    """Warn if stages have different numbers of blocks."""
    if division.even:
        return []
    blocks, pieces, stages = sum(division.counts), len(division.counts), division.num_stages
    places, below = pieces * division.most, blocks // pieces * pieces
    chunked = division.num_chunks > 1
    chunks = f" × {division.num_chunks} chunks" if chunked else ""
    fewer = [n for n in range(2, stages) if stages % n == blocks % (n * division.num_chunks) == 0]
    others = [str(Setting("mesh.pipe", fewer[-1]))] if fewer else []
    if chunked and blocks % stages == 0:
        others.append(str(Setting("pipeline.schedule", "1f1b")))
    others.append(f"{below} or {below + pieces} such blocks")
    return [
        f"{blocks} blocks cannot be divided evenly into {stages} stages{chunks}, which have "
        f"{', '.join(map(str, division.counts))}: all take as long as the largest, so "
        f"{(places - blocks) / places:.0%} of the time of blocks is lost; "
        f"{', or '.join(others)} would lose none"
    ]


def _remedy(pipelined: PipelinedLoss, stages: list[StageFacts]) -> str:
    """Return a remedy for a slower first or last stage, with equal numbers of blocks."""
    schedule, count, now = pipelined.schedule, pipelined.num_microbatches, len(stages)
    waits: dict[int, Fraction] = {}
    # A divisor of the stages there are fits the same devices and the same blocks.
    for fewer in (n for n in range(2, now) if now % n == 0):
        joined = now // fewer
        costs = [sum(s.flops for s in stages[n * joined : (n + 1) * joined]) for n in range(fewer)]
        waits[fewer] = bubble_with(schedule, count, fewer, costs)
    slowest = max(stages, key=lambda stage: stage.flops)
    if odd := odd_modules(pipelined.cut):
        few = ", ".join(f"`{path}`" for path in odd[:3]) + (", …" if len(odd) > 3 else "")
        verbs = ("are", "run") if len(odd) > 1 else ("is", "runs")
        return (
            f"{few} {verbs[0]} not like the other blocks and {verbs[1]} with its "
            f"{' and '.join(slowest.also)}; "
            "blocks that are all alike, or alternate to the end, are divided evenly"
        )
    ends = f"its {' and '.join(slowest.also) or 'work'} weighs less"
    if not waits:
        return (
            f"{ends} in a model with more blocks; with {Setting('mesh.fsdp')} or "
            f"{Setting('mesh.tensor')} instead of {Setting('mesh.pipe')} no device waits for "
            "another's layers"
        )
    best = min(waits, key=lambda n: waits[n])
    return (
        f"{ends} with fewer stages of more blocks ({Setting('mesh.pipe', best)} "
        f"{Setting('pipeline.num_microbatches', count)} waits {float(waits[best]) * 100:.0f}%), or "
        "in a model with more blocks"
    )


def stage_facts(pipelined: PipelinedLoss) -> list[StageFacts]:
    """Return the work of each stage."""
    cut, count = pipelined.cut, pipelined.num_stages
    table = pipelined.schedule.table(pipelined.num_microbatches, count)
    num_in_flight = in_flight(table.operations())
    trained = [stack.step.leaf for stack in cut.stacks if stack.kind == "weight"]
    block_size = sum(leaf.size // leaf.shape[0] for leaf in trained)
    block_flops = forward_flops(cut.scan.body)
    run = pipelined.division.most * pipelined.division.num_chunks
    modules = modules_of_blocks(cut)
    facts: list[StageFacts] = []
    for stage in range(count):
        regions = _regions(cut, first=stage == 0, last=stage == count - 1)
        blocks = pipelined.division.blocks(stage)
        flops = sum(_region_flops(cut, region) for region in regions.values())
        facts.append(
            StageFacts(
                blocks=tuple(number for block in blocks for number in modules[block]),
                also=tuple(regions),
                parameters=len(blocks) * block_size + sum(map(_region_size, regions.values())),
                flops=run * block_flops + flops,
                microbatches_kept=num_in_flight[stage],
            )
        )
    return facts


def _regions(cut: BlockCut, *, first: bool, last: bool) -> dict[Extra, Region]:
    """Return the regions that a stage computes besides its blocks."""
    regions = {Extra.EMBEDDING: cut.embedding} if first else {}
    regions |= {Extra.HEAD: cut.head} if last else {}
    if _region_size(cut.shared) or _region_flops(cut, cut.shared):
        regions[Extra.SHARED] = cut.shared
    return regions


def _region_size(region: Region) -> int:
    """Return the number of trained parameters that a region reads."""
    return sum(leaf.step.leaf.size for leaf in region.weights)


def _region_flops(cut: BlockCut, region: Region) -> int:
    return forward_flops(cut.jaxpr.replace(eqns=list(region.eqns)))
