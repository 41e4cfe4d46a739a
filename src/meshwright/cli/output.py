"""Output streams: results on stdout; everything else, also from libraries, on stderr."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from meshwright.errors import MeshwrightError, UserError
from meshwright.text.json_text import finite
from meshwright.text.masking import mask_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_PACKAGE = str(Path(__file__).parent.parent)


class Output:
    """The two streams of a command; in a silent process, another one prints."""

    def __init__(self, result_descriptor: int, *, as_json: bool, silent: bool = False) -> None:
        self.as_json = as_json
        self.silent = silent
        # File names may contain bytes that are not text; they become backslash escapes.
        self._result = os.fdopen(
            os.dup(result_descriptor), "w", encoding="utf-8", errors="backslashreplace"
        )

    def result(self, value: Any, picture: RenderableType | None = None, *, text: str = "") -> None:
        """Print the result: ``value`` as JSON, or ``picture`` or plain ``text`` for reading.

        JSON has no infinity and no NaN; both become null.
        """
        if self.silent:
            return
        if self.as_json:
            text = json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False)
            self._result.write(text + "\n")
        elif picture is not None:
            # Lines that must not wrap, such as paths, are not cut off either.
            self.console().print(picture, crop=False)
        elif text:
            self.text(text)
        self._result.flush()

    def text(self, text: str) -> None:
        """Print a result that is plain text, unchanged."""
        self.stream(text if text.endswith("\n") else text + "\n")

    def stream(self, text: str) -> None:
        """Print a part of a result that is plain text, at once."""
        if not self.silent:
            self._result.write(text)
            self._result.flush()

    def console(self) -> Console:
        """Return a rich console on the result stream."""
        from rich.console import Console

        from meshwright.text.columns import stream_width

        class ResultConsole(Console):
            def on_broken_pipe(self) -> None:
                # Rich would exit with 1, the code of a failed check.
                raise BrokenPipeError

        return ResultConsole(
            file=self._result, highlight=False, soft_wrap=False, width=stream_width(self._result)
        )

    def say(self, message: RenderableType) -> None:
        """Print a message that is not part of the result."""
        if self.silent:
            return
        from rich.console import Console

        from meshwright.text.columns import stream_width

        console = Console(file=sys.stderr, highlight=False, width=stream_width(sys.stderr))
        # Lines that must not wrap, such as commands, are not cut off either.
        console.print(message, crop=False)

    def close(self) -> None:
        """Close the result stream; nothing can be printed afterwards."""
        self._result.close()


@contextmanager
def guarded_stdout(*, as_json: bool, silent: bool = False) -> Generator[Output]:
    """Reserve stdout for results and redirect everything else to stderr.

    File descriptors are redirected too, because native libraries do not print through Python. In a
    silent process their output is dropped.
    """
    stdout = sys.stdout
    stdout.flush()
    real = os.dup(1)
    output = Output(real, as_json=as_json, silent=silent)
    elsewhere = os.open(os.devnull, os.O_WRONLY) if silent else os.dup(2)
    try:
        os.dup2(elsewhere, 1)
        with redirect_stdout(sys.stderr):
            yield output
    finally:
        # The old object may still have buffered output.
        stdout.flush()
        os.dup2(real, 1)
        os.close(real)
        os.close(elsewhere)
        output.close()


def write_file(path: Path, text: str, fix: str = "") -> None:
    """Write a file that the user named; ``fix`` says what to do if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}", why=str(error), fix=fix) from error


def print_error(error: MeshwrightError) -> None:
    """Print an error, without secrets: what is wrong, why, and what to write instead."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    console.print(Text.assemble(("error: ", "bold red"), (mask_text(error.what), "bold")))
    for part in (error.why, error.fix):
        for line in filter(None, mask_text(part).splitlines()):
            console.print(Text("  " + line))


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
