"""Checkpoints that are damaged on disk: a flipped byte, a truncated shard, deleted metadata."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

from meshwright.checkpoint.reader import METADATA, STATE
from meshwright.drill.fault import Fault, Missed
from meshwright.drill.plays import SAME
from meshwright.drill.scene import Scene
from meshwright.errors import ExitCode


def _flip(checkpoint: Path) -> None:
    shard = _largest_shard(checkpoint)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def _truncate(checkpoint: Path) -> None:
    shard = _largest_shard(checkpoint)
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])


def _delete_metadata(checkpoint: Path) -> None:
    (checkpoint / METADATA / "metadata").unlink()


def _largest_shard(checkpoint: Path) -> Path:
    shards = [path for path in (checkpoint / STATE).rglob("d/*") if path.is_file()]
    return max(shards, key=lambda path: path.stat().st_size)


def _play(scene: Scene, damage: Callable[[Path], None]) -> str:
    before = scene.undisturbed.updates[1]
    update = scene.prepare(checkpoints=3)
    checkpoint = scene.run.checkpoints / str(update)
    damage(checkpoint)
    other = scene.folder / "explicit"
    asked = scene.train(settings=[f"resume={checkpoint}"], run_dir=other)
    asked.check_code(ExitCode.BAD_INPUT)
    asked.find(rf"error: .*{update} is damaged")
    launched = scene.train()
    launched.check_code(0)
    found = launched.find(rf"the checkpoint \S*/{update} is damaged \((.+)\); it was renamed")
    went_on = int(launched.find(r"continuing after update (\d+)")[1])
    if went_on != before:
        raise Missed(f"went on from update {went_on} instead of {before}")
    scene.check_same()
    cause = textwrap.shorten(found[1], 80, placeholder=" …")
    return f"found ({cause}), refused by name, resumed from update {before}, {SAME}"


_EXPECTED = "named, set aside, resumed from the checkpoint before; refused if named by its path"
FAULTS = (
    Fault(
        "flipped-byte",
        "a byte of the newest checkpoint is flipped",
        _EXPECTED,
        lambda scene: _play(scene, _flip),
    ),
    Fault(
        "truncated-shard",
        "a file of the newest checkpoint is cut off",
        _EXPECTED,
        lambda scene: _play(scene, _truncate),
    ),
    Fault(
        "no-metadata",
        "the metadata of the newest checkpoint are deleted",
        _EXPECTED,
        lambda scene: _play(scene, _delete_metadata),
    ),
)
