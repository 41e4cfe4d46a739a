"""Records that cannot be read: they stop the run, or are skipped and counted."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

from meshwright.errors import Setting, UserError
from meshwright.units import counted

OnCorrupt = Literal["stop", "skip"]


@dataclass
class CorruptRecords:
    """Handles the records of a dataset that cannot be read.

    Attributes:
        policy: stop with an error, or skip.
        count: records skipped so far.
        first: what was wrong with the first of them.
    """

    policy: OnCorrupt
    count: int = 0
    first: str = ""

    def add(self, where: str, why: str) -> None:
        """Raise an error for a record, or count it as skipped."""
        if self.policy == "stop":
            raise UserError(
                f"{where} cannot be read",
                why=why,
                fix=f"repair the record, or write {Setting('data.on_corrupt', 'skip')} to continue "
                "without it",
            )
        self.count += 1
        self.first = self.first or f"{where}: {why}"

    def warn(self) -> None:
        """Warn about skipped records, if there are any."""
        if self.count:
            warnings.warn(f"{self.summary()}; the first is {self.first}", stacklevel=2)

    def summary(self) -> str:
        """Return how many records were skipped in words; empty if none were."""
        skipped = counted(self.count, "corrupt record was", "corrupt records were")
        return f"{skipped} skipped" if self.count else ""
