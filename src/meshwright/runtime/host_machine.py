"""The machine that a process runs on: its memory, its GPUs, and the cache folder of the user."""

import os
from collections.abc import Mapping
from pathlib import Path

VISIBLE_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""The environment variables that list the GPUs that programs may use."""


def host_memory(root: Path = Path("/")) -> dict[str, int | None]:
    """Return the host memory in bytes, and the limit of a container if there is one."""
    total = available = None
    info = root / "proc/meminfo"
    if info.exists():
        lines = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
        total, available = _kibibytes(lines, "MemTotal"), _kibibytes(lines, "MemAvailable")
    limit = root / "sys/fs/cgroup/memory.max"
    limited = limit.read_text().strip() if limit.exists() else ""
    return {
        "host_total_bytes": total,
        "host_available_bytes": available,
        "container_limit_bytes": int(limited) if limited.isdecimal() else None,
    }


def _kibibytes(lines: Mapping[str, str], key: str) -> int | None:
    words = lines.get(key, "").split()
    return int(words[0]) * 1024 if words else None


def process_stat(pid: int) -> list[str]:
    """Return what the system says about a process, from its state on; empty if it says nothing."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The name of the program, in parentheses, may contain spaces.
    return text.rpartition(")")[2].split()


def user_cache(name: str) -> Path:
    """Return the folder for one kind of cached content; it need not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The standard says that relative paths are to be ignored.
    root = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
    return root / "meshwright" / name
