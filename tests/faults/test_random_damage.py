"""Rows 8 and 27: checkpoint folders damaged at random, which all commands must judge alike.

`MESHWRIGHT_DAMAGES` sets how many, 100 by default; each takes about 0.2 s.
"""

import os
import random
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import meshwright as mw
from meshwright.checkpoint import CheckpointReader, read_params
from meshwright.checkpoint.check import check_checkpoint
from meshwright.errors import UserError
from meshwright.trainer.starting.resume import find_resume_point

pytestmark = [pytest.mark.full, pytest.mark.faults]

DAMAGES = int(os.environ.get("MESHWRIGHT_DAMAGES", "100"))
PARTS = (
    *("state", "passport", "checksums", "state/_METADATA", "_CHECKPOINT_METADATA", "state/d"),
    *("state/ocdbt.process_0", "state/array_metadatas", "state/manifest.ocdbt"),
)


class Net(nnx.Module):
    """Dropout, so that there are random streams too."""

    def __init__(self, rngs):
        self.up = nnx.Linear(8, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.relu(self.up(x))))


def train(folder: Path, seed: int) -> Path:
    """Train for 6 steps, with the checkpoints 2, 4 and 6."""
    trainer = mw.Trainer(
        model=Net,
        loss=lambda model, batch: ((model(batch["x"]) - batch["x"]) ** 2).mean(),
        optimizer=optax.adamw(0.01),
        mesh="fsdp=8",
        seed=seed,
        sharding=mw.ShardingConfig(min_shard_size=0),
    )
    data = {"x": np.random.default_rng(0).normal(size=(64, 8)).astype("float32")}
    every = mw.CheckpointConfig(every=2, keep_last=3)
    trainer.fit(data, steps=6, batch_size=8, run_dir=folder, checkpoint=every, progress=False)
    return folder


def damage(checkpoint: Path, others: list[Path], chance: random.Random) -> str:
    """Damage a checkpoint, and return how."""
    how = chance.choice(["bit"] * 4 + ["cut", "missing", "garbage", "mixed", "copied"])
    if how in ("mixed", "copied"):
        other = chance.choice(others)
        part = "." if how == "copied" else chance.choice(PARTS)
        target, source = checkpoint / part, other / part
        if source.is_dir():
            shutil.rmtree(target)
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
        return f"{how}: {part} of {other}"
    file = chance.choice(sorted(each for each in checkpoint.rglob("*") if each.is_file()))
    content = bytearray(file.read_bytes())
    at = chance.randrange(len(content))
    if how == "bit":
        content[at] ^= 1 << chance.randrange(8)
    elif how == "garbage":
        content[at : at + 16] = chance.randbytes(16)
    file.unlink()
    if how != "missing":
        file.write_bytes(content[:at] if how == "cut" else content)
    return f"{how}: {file.relative_to(checkpoint)} at {at}"


def problem_of(act) -> str:
    """Return why something was refused; empty if it was not."""
    try:
        act()
    except UserError as error:
        return error.why or error.what
    return ""


def test_check_resume_and_loading_agree_on_random_damages(tmp_path):
    sound = train(tmp_path / "sound", 0)
    other = train(tmp_path / "other", 1) / "checkpoints"
    reader = CheckpointReader(sound / "checkpoints")
    saved = reader.read(6, reader.shapes(6))
    structs = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), saved)
    others = [reader.folder / "4", other / "6", other / "4"]
    found: Counter[str] = Counter()
    for seed in range(DAMAGES):
        run = shutil.copytree(sound, tmp_path / "run")
        how = damage(run / "checkpoints/6", others, random.Random(seed))
        own = CheckpointReader(run / "checkpoints")
        restored = []

        def resume(run=run, own=own, restored=restored):
            point = find_resume_point("auto", run)
            if point.step != 6:
                raise UserError(point.damaged[0].problem)
            restored.append(own.restore(6, structs))

        checked = check_checkpoint(own, 6)
        resumed = problem_of(resume)
        loaded = problem_of(partial(read_params, run / "checkpoints/6", statistics=True))
        told = (seed, how, checked.problem, resumed, loaded)
        assert checked.damaged == bool(resumed), told
        # Loading reads no optimizer state.
        assert checked.damaged or not loaded, told
        for state in restored:
            jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state), saved)
        found[f"{how.partition(':')[0]}: {'found' if checked.damaged else 'without effect'}"] += 1
        shutil.rmtree(run)
    print(dict(sorted(found.items())))
    assert not any("copied" in name and "without" in name for name in found)
