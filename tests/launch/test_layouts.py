"""The same mesh in other numbers of processes: the same training, up to rounding."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_SECONDS = 600
LAYOUTS = {"2 × 2": (2, 2), "4 × 1": (4, 1), "1 × 4": (1, 4)}


def losses(folder: Path, processes: int, devices: int, *words: str) -> list[float]:
    """Train with the public command, and return the loss of every step."""
    run = folder / f"{processes}x{devices}"
    layout = [f"--nprocs={processes}", f"--devices-per-process={devices}", "--"]
    own = [f"hydra.run.dir={run}", "tracking.log_every=1", "checkpoint=none", *words]
    command = ["launch", *layout, "train", *own]
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *command],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row["split"] == "train"]


@pytest.mark.full
def test_a_mesh_trains_alike_however_its_devices_are_divided(tmp_path):
    """The quick start of the page about processes, for 20 steps of the default model."""
    words = ("mesh.fsdp=4", "training.steps=20")
    found = {name: losses(tmp_path, *layout, *words) for name, layout in LAYOUTS.items()}
    assert all(len(each) == 20 for each in found.values())
    for name in ("4 × 1", "1 × 4"):
        # Sums over the devices are added up in another order, by other code.
        assert found[name] == pytest.approx(found["2 × 2"], rel=1e-5), name
    assert found["2 × 2"][-1] < found["2 × 2"][0]
