"""Records that cannot be read: they stop the run, or are skipped and counted."""

import warnings
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.data.fingerprints import fingerprint_of
from meshwright.data.protocols import HostBatch, Source
from meshwright.errors import Setting, UserError
from meshwright.text.units import counted

OnCorrupt = Literal["stop", "skip"]

CANNOT_BE_READ = ("cannot be read", "repair the record")


@dataclass
class CorruptRecords:
    """Stops at the records of a dataset that cannot be read, or skips and counts them.

    ``wrong`` is what is said about such a record, and what to do about it.
    """

    policy: OnCorrupt
    count: int = 0
    first: str = ""
    wrong: tuple[str, str] = CANNOT_BE_READ

    def add(self, where: str, why: str) -> None:
        """Raise an error for a record, or count it as skipped."""
        if self.policy == "stop":
            raise UserError(
                f"{where} {self.wrong[0]}",
                why=why,
                fix=f"{self.wrong[1]}, or write {Setting('data.on_corrupt', 'skip')} to continue "
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
        if self.count and self.wrong != CANNOT_BE_READ:
            return f"{counted(self.count, 'record')} of another form skipped"
        skipped = counted(self.count, "corrupt record was", "corrupt records were")
        return f"{skipped} skipped" if self.count else ""


@dataclass(frozen=True)
class CountedSource:
    """A source without the records that were skipped."""

    source: Any
    corrupt: CorruptRecords

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the source."""
        return getattr(self.source, "tokenizer", None)

    def __len__(self) -> int:
        return len(self.source)

    def rows(self, ids: NDArray[np.int64]) -> HostBatch:
        """Return the source's rows."""
        return self.source.rows(ids)

    def fingerprint(self) -> str:
        """Return a fingerprint of the source and the number of skipped records."""
        return fingerprint_of(self.source.fingerprint(), self.corrupt.count)

    def describe(self) -> str:
        """Return the source's description and the number of skipped records."""
        return f"{self.source.describe()}; {self.corrupt.summary()}"


def with_count(source: Source, corrupt: CorruptRecords) -> Source:
    """Warn about skipped records, if any, and return a source that mentions them."""
    corrupt.warn()
    return CountedSource(source, corrupt) if corrupt.count else source
