"""The parity matrix: every kind of model on every kind of mesh trains like one device."""

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import pytest
from quick import quick_compilation
from small_models import SIZES, TASKS

from meshwright.config.batch import solve_batch
from meshwright.config.schema import ShardingConfig
from meshwright.mesh.axes import parse_mesh
from meshwright.models import build_model
from meshwright.plan import Plan
from meshwright.proof import run, verify

__all__ = ["quick_compilation"]

KINDS = ("gpt", "stacked_gpt", "moe", "conv", "lstm", "vae", "vit", "linen_mlp")
MESHES = (
    "data=8",
    "fsdp=8",
    "tensor=4",
    "data=2,fsdp=4",
    "fsdp=4,tensor=2",
    "data=2,fsdp=2,tensor=2",
)
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "accumulation": {"gradient_accumulation_steps": 4},
}
SAMPLES = 32


@dataclass(frozen=True)
class Case:
    """One cell of the matrix; ``sharding`` says how else than by default."""

    kind: str
    mesh: str
    variant: str
    sharding: dict[str, Any] = field(default_factory=dict)

    def __str__(self):
        options = "-".join(f"{key}={value}" for key, value in self.sharding.items())
        return "-".join(filter(None, (self.kind, self.mesh, self.variant, options)))


COVERING = (
    Case("gpt", "fsdp=4,tensor=2", "fp32", {"blocks": "scan"}),
    Case("stacked_gpt", "data=2,fsdp=4", "fp32"),
    Case("moe", "data=2,fsdp=2,tensor=2", "fp32", {"remat": "full"}),
    Case("conv", "fsdp=8", "bf16", {"zero": 2}),
    Case("lstm", "tensor=4", "accumulation"),
    Case("vae", "data=8", "fp32"),
    Case("vit", "fsdp=8", "fp32", {"blocks": "scan", "keep_gathered": True}),
    Case("linen_mlp", "fsdp=4,tensor=2", "accumulation", {"zero": 1}),
)
"""Each kind, mesh and variant, and each way to hold weights, at least once."""

MATRIX = tuple(Case(k, m, v) for k in KINDS for v in VARIANTS for m in MESHES)


def sizes_of(kind):
    """Return small sizes, dropout switched on where there is one."""
    sizes = SIZES[kind]
    return sizes | {"dropout": 0.1} if "dropout" in sizes else sizes


def batch_of(kind, number):
    """Return the batch of a step; tokens count unequally, so that microbatches do."""
    batch = TASKS[kind].synthetic_batch(number, SAMPLES)
    if "tokens" in batch:
        samples, length = batch["tokens"].shape
        kept = np.random.default_rng(number).integers(1, length, size=(samples, 1))
        batch["mask"] = (np.arange(length - 1) < kept).astype(np.float32)
    return batch


def plan_of(case):
    mesh = parse_mesh(case.mesh)
    variant = dict(VARIANTS[case.variant])
    return Plan(
        mesh=mesh,
        batch=solve_batch(
            replicas=mesh.get("data", 1) * mesh.get("fsdp", 1),
            global_batch_size=SAMPLES,
            gradient_accumulation_steps=variant.pop("gradient_accumulation_steps", 1),
        ),
        # Small enough that most leaves of these models are divided.
        sharding=ShardingConfig(min_shard_size=64, **case.sharding),
        **variant,
    )


def certify(case):
    plan = plan_of(case)
    return verify(
        lambda rngs: build_model(case.kind, rngs=rngs, **sizes_of(case.kind)),
        TASKS[case.kind].loss,
        plan,
        lambda number: batch_of(case.kind, number),
        steps=2,
        clip_norm=1.0,
        devices=jax.devices()[: plan.num_devices],
    )


def differences(certificate):
    """Return the largest difference of every comparison, for whoever reads the report."""
    return {
        f"{part} {comparison.what}": comparison.difference
        for part in ("float64", "own_precision", "as_written")
        for comparison in getattr(certificate, part)
    }


@pytest.fixture
def assert_equal(quick_compilation, record_property):
    """Certify a cell."""

    def check(case):
        certificate = certify(case)
        for name, difference in differences(certificate).items():
            record_property(name, difference)
        assert certificate.equal, [failure.sentence() for failure in certificate.failures()]

    return check


def test_the_covering_cells_cover():
    assert {case.kind for case in COVERING} == set(KINDS)
    assert {case.mesh for case in COVERING} == set(MESHES)
    assert {case.variant for case in COVERING} == set(VARIANTS)


EVERYDAY = ("linen_mlp",)
"""Kinds whose cells belong to the everyday tests; tests/program and tests/step have others."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=[pytest.mark.full] * (case.kind not in EVERYDAY))
        for case in COVERING
    ],
)
def test_a_mesh_trains_like_one_device(case, assert_equal):
    assert_equal(case)


@pytest.fixture(scope="module")
def one_device():
    """Results of one device, by kind and variant: they are the same whatever the mesh."""
    return {}


def once(compute, known, key):
    """Return a function that computes only what is not known yet."""

    def call(*arguments):
        if key not in known:
            known[key] = compute(*arguments)
        return known[key]

    return call


@pytest.mark.full
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_every_mesh_trains_like_one_device(case, assert_equal, one_device, monkeypatch):
    alone = [(run, "_initial_values")]
    alone += [(run._Proof, name) for name in ("reference_in_float64", "as_written")]
    for owner, name in alone:
        key = (case.kind, case.variant, name)
        monkeypatch.setattr(owner, name, once(getattr(owner, name), one_device, key))
    assert_equal(case)
