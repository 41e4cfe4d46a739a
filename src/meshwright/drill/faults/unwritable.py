"""Disks that cannot be written to: full during a save, or no folder from the start."""

from __future__ import annotations

import resource

from meshwright.drill.evidence import Evidence
from meshwright.drill.fault import Fault, Missed
from meshwright.drill.hooks import Hooks
from meshwright.drill.plays import resumed
from meshwright.drill.scene import Scene, largest_file
from meshwright.text.units import human_bytes


def _fill(hooks: Hooks) -> None:
    def act() -> None:
        # No file may become larger; a real full disk would need rights that users lack.
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hooks.told.limit_bytes, hard))

    hooks.at_update(act)


def _too_small(scene: Scene) -> str:
    run = scene.undisturbed
    limit, logs = largest_file(run) // 2, _largest_log(run)
    if limit > 2 * logs:
        return ""
    return (
        f"files of {human_bytes(2 * limit)} in a checkpoint are too small to be told from logs of "
        f"{human_bytes(logs)}"
    )


def _largest_log(run: Evidence) -> int:
    return max(path.stat().st_size for path in run.run_dir.iterdir() if path.is_file())


def _play_full(scene: Scene) -> str:
    launched = scene.train(inject=True)
    launched.check_code(1)
    launched.find(r"error: the state after \d+ updates could not be saved")
    found = launched.find(r"a checkpoint takes up to (.+), and (.+) are free in")
    return resumed(scene, launched, f"exit code 1, needed {found[1]} and free {found[2]} named")


def _play_no_folder(scene: Scene) -> str:
    blocked = scene.folder / "file"
    blocked.write_text("A file, in which no folder can be made.\n", encoding="utf-8")
    launched = scene.train(run_dir=blocked / "run")
    launched.check_code(2)
    launched.check_silent_about("compiling the step")
    if str(blocked) not in "\n".join(line.text for line in launched.lines):
        raise Missed(f"the folder is not named: {launched.problem()}")
    return "exit code 2 before compiling, the folder is named"


FAULTS = (
    Fault(
        "disk-full",
        "files cannot become larger while a checkpoint is written",
        "exit code 1 with the bytes needed and free; the checkpoint before resumes",
        _play_full,
        inject=_fill,
        why_not=_too_small,
    ),
    Fault(
        "no-folder",
        "an output folder that cannot be written to",
        "exit code 2 before anything is compiled",
        _play_no_folder,
        starts=0.5,
    ),
)
