"""The config groups shipped with the package, and the files in them."""

from __future__ import annotations

from pathlib import Path

CONF_DIR = Path(__file__).parent.parent / "conf"

GROUPS = (
    "model", "task", "data", "optimizer", "training", "mesh", "sharding", "pipeline",
    "precision", "checkpoint", "tracking", "run", "experiment",
)  # fmt: skip


def group_options(config_dir: Path | None = None) -> dict[str, list[str]]:
    """List the files of every group, including the user's own."""
    roots = [CONF_DIR, *([config_dir] if config_dir else [])]
    return {
        group: sorted({f.stem for root in roots for f in (root / group).glob("*.yaml")})
        for group in GROUPS
    }
