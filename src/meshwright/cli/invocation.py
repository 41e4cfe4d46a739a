"""How this command line was called, so that commands it prints can be pasted as they are."""

import shutil
import sys
from pathlib import Path

NAME = "meshwright"


def invoked_as() -> list[str]:
    """Return the words that start this command line.

    ``meshwright`` if that is found, as after activating the environment; otherwise its path or
    ``python -m meshwright``, as it was typed.
    """
    found, own = shutil.which(NAME), Path(sys.executable).parent / NAME
    if found is not None and own.exists() and own.samefile(found):
        return [NAME]
    typed = sys.argv[0]
    return [typed] if Path(typed).name == NAME else [sys.orig_argv[0], "-m", NAME]
