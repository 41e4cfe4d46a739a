"""Exceptions from the user's own model, loss, data and callbacks: where they came from, and when.

In Python such an exception propagates unchanged, with a note about what was being done. The command
line shows the user's frames of its traceback instead of reporting an internal error.
"""

import os
import re
import sysconfig
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from meshwright.errors import MeshwrightError, Spelling, UserError, current_spelling, first_line

_PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"
_LIBRARIES = tuple(
    f"{os.path.normpath(path)}{os.sep}"
    for path in map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
)
_own_roots: set[str] = set()
MAX_MESSAGE_LINES = 12


def count_as_users(module: ModuleType) -> None:
    """Count the package of a module that a config names as the user's, wherever it is installed."""
    if file := getattr(module, "__file__", None):
        levels = module.__name__.count(".") + (Path(file).name == "__init__.py")
        root = Path(file).parents[levels - 1] if levels else Path(file)
        _own_roots.add(str(root))


@contextmanager
def doing(what: str) -> Generator[None]:
    """Note on exceptions from inside what was being done: ``while reading batch 12``.

    The innermost note counts. Meshwright's own errors say what is wrong themselves.
    """
    try:
        yield
    except Exception as error:
        add_note(error, f"while {what}")
        raise


@contextmanager
def explaining_axis_names() -> Generator[None]:
    """Explain the error that JAX raises for a mean or sum over devices by axis name."""
    try:
        yield
    except NameError as error:
        found = re.search(r"unbound axis name:? *'?([^\s'.]+)", str(error))
        if found is None:
            raise
        frames = users_frames(error)
        where = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
        raise UserError(
            f"the model or loss uses the axis name `{found[1]}`, which does not exist",
            why=f"{where}the loss sees the global batch, so there is nothing to combine over "
            "devices (pmean, psum, all_gather) and no number of a device (axis_index)",
            fix="leave the call out; in nnx.BatchNorm and similar layers leave out axis_name=, "
            "their statistics are those of the global batch",
        ) from error


def in_module(error: Exception, path: str) -> None:
    """Note which module of the model was running; the innermost one counts."""
    add_note(error, f"in the module `{path}`")


def add_note(error: Exception, note: str) -> None:
    """Add a note, unless there is one that begins with the same word."""
    if isinstance(error, MeshwrightError | StopIteration):
        return
    if not any(each.split(" ")[0] == note.split(" ")[0] for each in notes(error)):
        error.add_note(note)


def notes(error: BaseException) -> list[str]:
    """Return the notes of an exception, without those of libraries about their own frames."""
    return [note for note in getattr(error, "__notes__", []) if not note.startswith("---")]


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of the user's code that Meshwright called, the outermost first."""
    frames = list(traceback.extract_tb(error.__traceback__))
    called = next((i for i, f in enumerate(frames) if f.filename.startswith(_PACKAGE)), None)
    # What comes before is a program that called Meshwright.
    inside = [] if called is None else frames[called:]
    return [frame for frame in inside if is_users_file(frame.filename)]


def describe_frames(error: BaseException) -> list[str]:
    """Return the user's frames as lines of a traceback."""
    text = "".join(traceback.format_list(users_frames(error)))
    return [line.removeprefix("  ") for line in text.splitlines()]


def whole_traceback() -> str:
    """Say how to see the whole traceback of an exception; in Python it is shown anyway."""
    on_command_line = current_spelling() is Spelling.COMMAND_LINE
    return "add --debug for the whole traceback" if on_command_line else ""


def explain_users_exception(error: Exception) -> UserError | None:
    """Return an error about an exception in the user's code; None if it came from elsewhere."""
    lines = describe_frames(error)
    if not lines:
        return None
    message = [line for line in str(error).strip().splitlines() if line.strip()]
    rest = message[1:MAX_MESSAGE_LINES] + (["…"] if len(message) > MAX_MESSAGE_LINES else [])
    kind, first = type(error).__name__, first_line(error)
    return UserError(
        f"your code raised {kind}" + ("" if first == kind else f": {first}"),
        why="\n".join([*rest, *notes(error), *lines]),
        fix=whole_traceback(),
    )


def is_named_by_config(name: str) -> bool:
    """Whether a file belongs to a package that a config names."""
    return any(name.startswith(root) for root in _own_roots)


def is_users_file(name: str) -> bool:
    """Whether a file is the user's own, not one of Meshwright, Python or an installed package."""
    if name.startswith(_PACKAGE) or name.startswith("<frozen "):
        return False
    return is_named_by_config(name) or not name.startswith(_LIBRARIES)
