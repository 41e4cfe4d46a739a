"""What a model generated, as the user gets it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.generation.token_loop import Pace, Row
from meshwright.text.units import counted


@dataclass(frozen=True, repr=False)
class Generated(Sequence[Row]):
    """What a model generated: one `Row` after the other, sample by sample, in the prompts' order.

    Attributes:
        rows: all of them.
        seconds: how long it took, with compilation.
        remarks: what was taken from files, and what was done otherwise than asked.
        pace: how fast tokens came from programs that were compiled already.
    """

    rows: tuple[Row, ...]
    seconds: float
    remarks: tuple[str, ...] = ()
    pace: Pace = field(default_factory=Pace)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    @property
    def texts(self) -> list[str | None]:
        """The text of each; None without a tokenizer."""
        return [row.text for row in self.rows]

    @property
    def tokens(self) -> list[list[int]]:
        """The new tokens of each."""
        return [row.tokens for row in self.rows]

    @property
    def num_tokens(self) -> int:
        """The new tokens of all."""
        return sum(map(len, self.tokens))

    @property
    def tokens_per_second(self) -> float:
        """New tokens by seconds, with compilation."""
        return self.num_tokens / max(self.seconds, 1e-9)

    def __repr__(self) -> str:
        """Return how much there is."""
        return f"Generated({counted(len(self), 'row')}, {self.seconds:.1f} s)"

    def __str__(self) -> str:
        """Return the texts, or the tokens, and how fast they came."""
        lines = [
            f"{row.prompt.number}.{row.sample}: {row.tokens if row.text is None else row.text}  "
            f"[{counted(len(row.tokens), 'token')}, {row.ended}]"
            for row in self.rows
        ]
        rate = f"{self.pace.describe(self.tokens_per_second)}, in {self.seconds:.1f} s"
        return "\n".join([*lines, rate, *self.remarks])
