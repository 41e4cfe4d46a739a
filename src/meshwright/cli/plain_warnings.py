"""Warnings of Meshwright itself, printed as ``warning: …`` instead of with a line of its source."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import TextIO

_PACKAGE = str(Path(__file__).parent.parent)


def print_warnings_plainly() -> None:
    """Print warnings and log records of this package like other messages, for this process."""
    usual = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if file is None and filename.startswith(_PACKAGE):
            print(f"warning: {message}", file=sys.stderr)
        else:
            usual(message, category, filename, lineno, file, line)

    warnings.showwarning = show
    handler = logging.StreamHandler()
    handler.setFormatter(_Lowercase("%(levelname)s: %(message)s"))
    own = logging.getLogger("meshwright")
    own.addHandler(handler)
    own.propagate = False


class _Lowercase(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.levelname = record.levelname.lower()
        return super().format(record)
