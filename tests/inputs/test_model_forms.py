"""Models with unusual parts train as under plain `nnx.jit`, in whichever form they are given."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from odd_models import MODELS, Blocks, Containers, Table, batch, loss, plain_losses

import meshwright as mw

# What models did with Flax before 0.12 still works, and newer releases warn about it.
pytestmark = [
    pytest.mark.quick,
    pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The 'split' argument of 'fork':DeprecationWarning"),
]

OPTIMIZER = optax.sgd(0.05)
STEPS = 3


def key():
    return jax.random.key(0)


def forms(model):
    return {
        "class": model,
        "function": lambda rngs: model(rngs=rngs),
        "own seed": lambda: model(rngs=nnx.Rngs(0)),
        "instance": model(rngs=nnx.Rngs(key())),
    }


def trainer(model, mesh="data=1", **options):
    devices = jax.devices()[:1] if mesh == "data=1" else None
    settings = {"loss": loss, "optimizer": OPTIMIZER, "log_every": 1, **options}
    return mw.Trainer(model=model, mesh=mesh, devices=devices, **settings)


def losses(model, mesh="data=1", **options):
    result = trainer(model, mesh, **options).fit([batch()] * STEPS, steps=STEPS)
    return [result.losses[n] for n in range(1, STEPS + 1)]


def plain(model, steps=STEPS):
    return plain_losses(model(rngs=nnx.Rngs(key())), OPTIMIZER, steps)


@pytest.mark.parametrize("form", ["class", pytest.param("instance", marks=pytest.mark.full)])
def test_arrays_in_plain_attributes_and_closures_on_a_mesh(form):
    found = losses(forms(Table)[form], "fsdp=4,tensor=2")
    np.testing.assert_allclose(found, plain(Table), rtol=2e-5)


@pytest.mark.full
@pytest.mark.parametrize("form", ["class", "function", "own seed", "instance"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_form_trains_like_plain_nnx(name, form):
    model = MODELS[name]
    residual = name in (
        "Containers",
        "NormedBlocks",
        "Shared",
        "Stacked",
    )  # nothing to shard over tensor
    for mesh in ("data=1", "fsdp=8" if residual else "fsdp=4,tensor=2"):
        found = losses(forms(model)[form], mesh)
        np.testing.assert_allclose(found, plain(model), rtol=2e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("data=2,pipe=4", {"gradient_accumulation_steps": 4}),
        ("fsdp=8", {"sharding": mw.ShardingConfig(blocks="scan")}),
    ],
)
def test_tables_in_blocks_that_are_stages_or_rolled(mesh, options):
    np.testing.assert_allclose(losses(Blocks, mesh, **options), plain(Blocks), rtol=2e-5)
    assert trainer(Blocks, mesh, **options).verify([batch()] * 2, steps=1).equal


@pytest.mark.full
def test_a_model_with_tables_is_proven_saved_resumed_and_loaded(tmp_path):
    assert trainer(Table, "fsdp=8").verify([batch()], steps=1).equal
    for steps in (1, STEPS):
        result = trainer(Table, "fsdp=8").fit([batch()] * STEPS, steps=steps, run_dir=tmp_path)
    np.testing.assert_allclose(result.losses[STEPS], plain(Table)[-1], rtol=2e-5)
    loaded = mw.load_model(tmp_path, model=Table)
    np.testing.assert_array_equal(loaded(batch()["x"]), result.model(batch()["x"]))
    np.testing.assert_allclose(loaded.table, Table(nnx.Rngs(0)).table, rtol=1e-6)


def test_keys_that_look_alike_stay_apart_in_training_and_on_disk(tmp_path):
    for steps in (1, STEPS):
        result = trainer(Containers).fit([batch()] * STEPS, steps=steps, run_dir=tmp_path / "run")
    np.testing.assert_allclose(result.losses[STEPS], plain(Containers)[-1], rtol=2e-5)
    file = tmp_path / "model.safetensors"
    exported = mw.export_safetensors(tmp_path / "run", file)
    names = {"a", "a%2Eb", "a%2Fb", "a%20b", "a_b", "ä%252E", "0", "%2A", "%"}
    assert {name.split(".")[1] for name in exported} == names
    model = Containers(nnx.Rngs(1))
    read = mw.read_params(tmp_path / "run", nested=True)
    read["layers"]["0"] = read["layers"].pop(0)
    nnx.update(model, read)
    np.testing.assert_array_equal(model(batch()["x"]), result.model(batch()["x"]))
