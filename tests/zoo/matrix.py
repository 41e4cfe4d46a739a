"""Every model of the zoo on every mesh: ``python tests/zoo/matrix.py [model] [mesh]``."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import meshwright as mw

if __name__ == "__main__":
    mw.simulate_devices(8)

import pytest
from quick import compile_quickly
from zoo import densities, equations, images, representations, sequences, structures

from meshwright.ledgers.ledger_records import beyond_minimum

ZOO = {
    name: entry
    for part in (images, sequences, representations, densities, equations, structures)
    for name, entry in part.ZOO.items()
}
MESHES = ("data=8", "fsdp=8", "fsdp=4,tensor=2", "tensor=4,data=2")
STAGES = "pipe=2,data=4"
CELLS = [
    (name, mesh)
    for name, entry in ZOO.items()
    for mesh in (*MESHES, *([STAGES] if entry.blocks else []))
]

HIGHER = {
    # Derivatives of the model are products and sums with each weight, of several shapes.
    ("PINN", "data"): 2,
    ("PINN", "fsdp"): 2,
    # Each sample is compared with, or placed next to, samples of other devices.
    ("two towers", "data"): 1.2,
    ("two towers", "fsdp"): 1.2,
    ("two towers", "tensor"): 1.8,
    ("experts with capacity", "data"): 14,
    ("experts with capacity", "fsdp"): 12,
    # Statistics of the whole batch; these models are small.
    ("DenseNet", "data"): 1.1,
    ("quantized autoencoder", "data"): 1.1,
    # Concatenated channels are divided anew.
    ("DenseNet", "tensor"): 1.9,
    # The frequencies that a block mixes are divided, and cut out of those of a transform.
    ("Fourier operator", "tensor"): 2.4,
    # Inside of stages, the compiler gathers the samples that it transforms.
    ("Fourier operator", "data", STAGES): 2.3,
}
"""The ratios to the least communication that are known to be above 1.05, rounded up."""


def highest_ratio(name, mesh, axis):
    """Return the largest ratio that a model may have on an axis."""
    return HIGHER.get((name, axis, mesh), HIGHER.get((name, axis), 1.05))


def trainer_of(name, mesh):
    """Return the trainer of a model; small weights are divided as well."""
    entry = ZOO[name]
    return mw.Trainer(
        model=entry.model,
        loss=entry.loss,
        optimizer=entry.optimizer,
        trainable=entry.trainable,
        mesh=mesh,
        sharding=mw.ShardingConfig(min_shard_size=64),
    )


def certify(name, mesh, steps=3):
    """Return the certificate and the ledger of a model on a mesh."""
    trainer, batches = trainer_of(name, mesh), ZOO[name].batches
    return trainer.verify(batches, steps=steps), mw.ledger(trainer, batches(0))


def row(name, mesh):
    """Return a line of the table: the verdict, the largest difference in float64, the ratios."""
    started = time.perf_counter()
    certificate, ledger = certify(name, mesh)
    worst = max(float("inf") if c.difference is None else c.difference for c in certificate.float64)
    ratios = ", ".join(f"{axis} {own.ratio}" for axis, own in ledger.axes.items())
    verdict = "equal" if certificate.equal else "DIFFERENT"
    seconds = time.perf_counter() - started
    lines = [f"| {name} | {mesh} | {verdict} | {worst:.0e} | {ratios} | {seconds:.0f} s |"]
    lines += [f"    {failure.sentence()}" for failure in certificate.failures()]
    if ledger.suspicious:
        lines += [f"    {line}" for line in beyond_minimum(ledger)]
    return "\n".join(lines)


def main(models="", meshes=""):
    """Print the table, of the models and meshes whose names contain these words."""
    compile_quickly(pytest.MonkeyPatch())
    for name, mesh in CELLS:
        if models in name and meshes in mesh:
            try:
                print(row(name, mesh), flush=True)
            except Exception as error:
                print(f"| {name} | {mesh} | ERROR {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
