"""The user's cache folder, where what can be made again is kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """Return the folder for one kind of cached content; it need not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The standard says that relative paths are to be ignored.
    root = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
    return root / "meshwright" / name
