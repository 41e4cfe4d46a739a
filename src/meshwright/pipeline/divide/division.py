"""Dividing a model's blocks into stages, evenly or nearly so."""

from dataclasses import dataclass
from itertools import accumulate

from meshwright.errors import Setting, UserError


@dataclass(frozen=True)
class Division:
    """How many blocks each virtual stage has, in the order of execution."""

    counts: tuple[int, ...]
    num_stages: int
    num_chunks: int

    @property
    def most(self) -> int:
        """Blocks of the largest virtual stage, to which the others are padded."""
        return max(self.counts)

    @property
    def even(self) -> bool:
        """Whether all virtual stages have the same number of blocks."""
        return len(set(self.counts)) == 1

    @property
    def starts(self) -> tuple[int, ...]:
        """The first block of each virtual stage."""
        return (0, *accumulate(self.counts[:-1]))

    def blocks(self, stage: int) -> list[int]:
        """Return the blocks of a stage, chunk by chunk."""
        return [
            self.starts[virtual] + block
            for virtual in range(stage, len(self.counts), self.num_stages)
            for block in range(self.counts[virtual])
        ]

    def rows(self) -> tuple[int, ...]:
        """Return the blocks by stage and chunk; shorter virtual stages repeat their last one."""
        return tuple(
            self.starts[virtual] + min(row, self.counts[virtual] - 1)
            for stage in range(self.num_stages)
            for virtual in range(stage, len(self.counts), self.num_stages)
            for row in range(self.most)
        )


def divide_blocks(
    num_blocks: int, num_stages: int, num_chunks: int = 1, *, name: str = ""
) -> Division:
    """Divide blocks into stages; left-over blocks go to stages without embedding and head."""
    pieces = num_stages * num_chunks
    if num_blocks < pieces:
        called = f" (`{name}`)" if name else ""
        chunks = f" × {num_chunks} chunks" if num_chunks > 1 else ""
        raise UserError(
            f"{num_blocks} blocks{called} cannot be divided into {num_stages} stages{chunks}",
            why=f"each of the {pieces} pieces needs at least one block"
            if num_chunks > 1
            else "each stage needs at least one block",
            fix=", or ".join(_other_divisions(num_blocks, num_stages, num_chunks)),
        )
    each, left = divmod(num_blocks, pieces)
    busy_last = sorted(range(pieces), key=lambda piece: (piece == pieces - 1, piece == 0))
    larger = set(busy_last[:left])
    counts = tuple(each + (piece in larger) for piece in range(pieces))
    return Division(counts, num_stages, num_chunks)


def _other_divisions(num_blocks: int, num_stages: int, num_chunks: int) -> list[str]:
    """Return changes that would work, the smallest first."""
    fixes: list[str] = []
    if num_chunks > 1 and num_blocks >= num_stages:
        most = num_blocks // num_stages
        if most > 1:
            fixes.append(f"write {Setting('pipeline.num_chunks', most)}")
        fixes.append(f"write {Setting('pipeline.schedule', '1f1b')}")
    # A divisor of the stages asked for fits the same devices, whatever the other axes are.
    divisors = [n for n in range(2, num_stages) if num_stages % n == 0]
    fewer = [n for n in divisors if num_blocks >= n * num_chunks]
    if fewer:
        fixes.append(f"write {Setting('mesh.pipe', fewer[-1])}")
    else:
        fixes.append(f"leave out {Setting('mesh.pipe')}")
    return [*fixes, f"use a model with {num_stages * num_chunks} blocks"]
