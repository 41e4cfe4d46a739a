"""Our side of a comparison: `meshwright train` with a callback that waits for each turn."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from peer_cases import Case
from peer_process import STEPS, TURNS


def train_meshwright(case: Case, data: Path, steps: int, settings: list[str]) -> None:
    """Train a case, with further settings."""
    from meshwright.cli.main import main as meshwright

    sys.path.insert(0, str(Path(__file__).parent))
    os.environ[STEPS] = str(steps)
    with tempfile.TemporaryDirectory() as folder:
        # The command sends what it prints on stdout to the log while it trains.
        os.environ[TURNS] = str(os.dup(1))
        code = meshwright(
            [
                "train", *case.overrides, *case.data.settings(data),
                f"training.global_batch_size={case.rows}",
                "training.steps=100000", "training.sample_tokens=0", "precision=bf16",
                "checkpoint=none", "data.eval_fraction=0", "optimizer.schedule=constant",
                "optimizer.learning_rate=1e-4",
                "optimizer.clip_norm=1.0", f"tracking.log_every={steps}",
                "training.callbacks=[peer_turns:Turns]", f"hydra.run.dir={folder}/run",
                *settings,
            ]
        )  # fmt: skip
    sys.exit(code)
