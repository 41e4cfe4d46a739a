"""Runs as checks: resumed, on another mesh, evaluated, read in another way, in two processes."""

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from real_processes import run_processes

import meshwright as mw
from meshwright.checkpoint.check import check_checkpoints
from meshwright.data.loader import load_batches
from meshwright.data.user_data import as_data
from meshwright.step.canonical import CanonicalForm

SAMPLES, BATCH, WIDTH = 48, 16, 8


def _samples(count, seed=0):
    random = np.random.default_rng(seed)
    return {name: random.normal(size=(count, WIDTH)).astype("float32") for name in ("x", "y")}


class Net(nnx.Module):
    """Layers of the same shape, batch statistics and dropout: everything a checkpoint holds."""

    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(jnp.tanh(self.norm(self.first(x)))))


def square_loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


class _Losses(mw.Callback):
    def __init__(self):
        self.values = {}

    def on_log(self, step, values):
        self.values[step] = values["loss"]


def train(mesh, steps, folder=None):
    """Train on as many devices as the mesh has; return the result and the loss of every step."""
    seen = _Losses()
    count = int(np.prod([int(part.split("=")[1]) for part in mesh.split(",")]))
    trainer = mw.Trainer(
        model=Net,
        loss=square_loss,
        optimizer=optax.adamw(0.01),
        mesh=mesh,
        seed=3,
        log_every=1,
        devices=jax.devices()[:count],
        sharding=mw.ShardingConfig(min_shard_size=1),
    )
    result = trainer.fit(
        _samples(SAMPLES),
        steps=steps,
        batch_size=BATCH,
        run_dir=folder,
        callbacks=[seen],
        checkpoint=mw.CheckpointConfig(every=2),
        progress=False,
    )
    return result, seen.values


def _arrays(result):
    form = CanonicalForm(result.assembled)
    return {
        group: {path: np.asarray(value) for path, value in by_path.items()}
        for group, by_path in form.copy(result.state).items()
    }


def _first_difference(expected, found, tolerance):
    pairs = ((key, expected[key], found.get(key)) for key in expected)
    return next((str(k) for k, a, b in pairs if b is None or not np.allclose(a, b, *tolerance)), "")


@dataclass(eq=False)
class Resumed:
    """Two steps, a checkpoint and two more, compared with four steps in one go.

    On the same mesh they must agree bit for bit.
    """

    mesh: str
    then: str
    name: str = "resumed run"
    _known: dict[str, Any] = field(default_factory=dict)

    def failures(self, *, everything: bool) -> dict[str, str]:
        del everything
        if not self._known:
            result, self._known["losses"] = train(self.then, 4)
            self._known |= _arrays(result)
        with tempfile.TemporaryDirectory() as folder:
            train(self.mesh, 2, folder)
            result, losses = train(self.then, 4, folder)
        expected = dict(self._known)
        later = {step: loss for step, loss in expected.pop("losses").items() if step > 2}
        exactly = self.mesh == self.then
        tolerance = (0.0, 0.0) if exactly else (1e-4, 1e-6)
        found = {"losses": _first_difference(later, losses, tolerance)}
        for group, arrays in expected.items():
            found[group] = _first_difference(arrays, _arrays(result)[group], tolerance)
        return {what: named for what, named in found.items() if named}


@dataclass(eq=False)
class Checksums:
    """`meshwright check` on the checkpoint of two steps."""

    name: str = "checksums"

    def failures(self, *, everything: bool) -> dict[str, str]:
        del everything
        with tempfile.TemporaryDirectory() as folder:
            train("fsdp=2", 2, folder)
            checked = check_checkpoints(Path(folder) / "checkpoints")
        return {each.verdict: each.problem for each in checked if each.damaged}


@dataclass(eq=False)
class OtherMesh:
    """The losses of a run on two meshes."""

    name: str = "run on another mesh"

    def failures(self, *, everything: bool) -> dict[str, str]:
        del everything
        _, expected = train("data=1", 3)
        _, found = train("data=2", 3)
        differs = _first_difference(expected, found, (2e-5, 0.0))
        return {"losses": differs} if differs else {}


@dataclass(eq=False)
class Evaluated:
    """An evaluation whose samples do not divide over the devices, compared with plain Flax."""

    name: str = "evaluation by hand"

    def failures(self, *, everything: bool) -> dict[str, str]:
        del everything
        # A new run every time: it keeps the evaluations it has compiled.
        (result, _), held_out = train("data=4", 1), _samples(21, seed=1)
        found = result.evaluate(held_out)
        model = nnx.clone(result.model)
        values = jax.tree.map(np.asarray, nnx.state(model, nnx.Not(nnx.RngState)))
        nnx.update(model, values)
        model.eval()
        expected = {"loss": float(square_loss(model, held_out)), "eval_samples": 21}
        return {
            name: f"{found[name]}"
            for name, value in expected.items()
            if not np.isclose(found[name], value, rtol=1e-6)
        }


@dataclass(eq=False)
class Order:
    """Three epochs as training reads them: each sample once, in parts as in one piece."""

    name: str = "order of samples"

    def failures(self, *, everything: bool) -> dict[str, str]:
        del everything
        data = as_data({"x": np.arange(20)}, seed=3)
        read = lambda rows=None: [  # noqa: E731
            batch["x"] for batch in load_batches(data, batch_size=8, stop=8, rows=rows)
        ]
        whole = np.concatenate(read())
        epochs = [np.sort(whole[start : start + 20]) for start in (0, 20, 40)]
        parts = [read(rows) for rows in (np.arange(4), np.arange(4, 8))]
        joined = np.concatenate([np.concatenate(pair) for pair in zip(*parts, strict=True)])
        found = {
            "each sample once": next(
                (f"epoch {n}" for n, e in enumerate(epochs) if list(e) != list(range(20))), ""
            ),
            "rows of processes": "" if np.array_equal(joined, whole) else "rows",
            "epochs differ": "epochs" if list(whole[:20]) == list(whole[20:40]) else "",
        }
        return {what: named for what, named in found.items() if named}


@dataclass(eq=False)
class Handshake:
    """The handshake of two processes, before they train together."""

    name: str = "handshake"

    def failures(self, *, everything: bool) -> dict[str, str]:
        del everything
        said, _ = run_processes(HANDSHAKE, count=2)
        return {"settings": said} if said else {}


HANDSHAKE = """
import json, os, sys
import jax, numpy as np, optax
from flax import nnx
from meshwright.processes import connect
jax.config.update("jax_num_cpu_devices", 1)
connect(sys.argv[1], 2, int(sys.argv[2]))
import meshwright as mw
wrong = os.environ.get("SABOTAGE") if int(sys.argv[2]) else None
trainer = mw.Trainer(
    model=lambda rngs: nnx.Linear(4, 4, rngs=rngs),
    loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
    optimizer=optax.adamw(0.2 if wrong == "rate" else 0.1),
    seed=1 if wrong == "seed" else 0,
)
data = {"x": np.full((8, 4), 2 if wrong == "data" else 1, "float32")}
said = ""
try:
    trainer.fit(data, batch_size=4, steps=1)
except ValueError as error:
    said = str(error)
jax.distributed.shutdown()
print(json.dumps(said))
"""

RESUMED = Resumed("fsdp=2", "fsdp=2")
MOVED = Resumed("fsdp=2", "data=2")
CHECKSUMS = Checksums()
OTHER_MESH = OtherMesh()
EVALUATED = Evaluated()
ORDER = Order()
HANDSHAKES = Handshake()
