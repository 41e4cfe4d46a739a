"""Trained models on disk: loaded, exported, saved from memory, and trained further."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from quick import quick_module
from small_models import Norms, Residuals, square_loss, vectors

import meshwright as mw
from meshwright.checkpoint import CheckpointReader
from meshwright.cli.main import main
from meshwright.errors import UserError
from meshwright.trainer.starting.init_patterns import proposal, renamed

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")

ARRAYS = {name: np.asarray(array) for name, array in vectors(32).items()}


class Net(nnx.Module):
    """Blocks, dropout and batch statistics."""

    def __init__(self, rngs, extra=0):
        self.blocks = Residuals(1, rngs=rngs)
        self.norms = Norms(rngs=rngs)
        if extra:
            self.extra = nnx.Linear(16, extra, rngs=rngs)

    def __call__(self, x):
        return self.blocks(x) + self.norms(x)


def trainer(**settings) -> mw.Trainer:
    defaults = {
        "model": Net,
        "loss": square_loss,
        "optimizer": optax.adam(0.01),
        "mesh": "fsdp=4,tensor=2",
    }
    return mw.Trainer(**{**defaults, **settings})


@pytest.fixture(scope="module")
def run(tmp_path_factory, quick_module):
    """A run folder, and its result."""
    folder = tmp_path_factory.mktemp("run")
    return folder, trainer().fit(ARRAYS, steps=3, batch_size=16, run_dir=folder)


def assert_same_model(ours, result):
    x = ARRAYS["x"]
    np.testing.assert_allclose(ours(x), result.model(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("model", [Net, lambda rngs: Net(rngs), Net(nnx.Rngs(7))])
def test_a_loaded_model_is_the_trained_one_in_evaluation_mode(run, model):
    folder, result = run
    assert_same_model(mw.load_model(folder, model=model), result)


def test_what_does_not_fit_is_listed(run):
    folder, _ = run
    with pytest.raises(UserError, match="the model is not the one of") as caught:
        mw.load_model(folder, model=lambda rngs: Net(rngs, extra=2))
    assert caught.value.why == "not in the checkpoint: `extra.bias`, `extra.kernel`"
    with pytest.raises(UserError, match="how to build the model"):
        mw.load_model(folder)


@pytest.mark.parametrize("nested", [True, False])
def test_nnx_takes_parameters_nested_and_by_path(run, nested):
    folder, result = run
    model = Net(nnx.Rngs(5))
    before = set(vars(model))
    nnx.update(model, mw.read_params(folder, statistics=True, nested=nested))
    model.eval()
    assert_same_model(model, result)
    assert set(vars(model)) == before


def test_nnx_takes_the_parameters_of_a_result(run):
    folder, result = run
    model = Net(nnx.Rngs(5))
    nnx.update(model, result.params, {})
    saved = jax.tree.leaves(mw.read_params(folder, nested=True))
    for array, expected in zip(jax.tree.leaves(nnx.state(model, nnx.Param)), saved, strict=True):
        np.testing.assert_array_equal(array, expected)


def test_parameters_by_path_are_a_dict_and_a_tree(run):
    folder, _ = run
    params = mw.read_params(folder)
    assert dict(params) == {path: params[path] for path in params}
    assert [path for path, _ in params.items()] == list(params)
    halved = jax.tree.map(lambda array: array / 2, params)
    for path, array in params.items():
        np.testing.assert_array_equal(halved[path] * 2, array, err_msg=path)
    assert len(jax.tree.leaves(params)) == len(params)


def test_a_result_saves_itself_and_resumes(run, tmp_path):
    folder, result = run
    result.save(tmp_path / "saved")
    assert_same_model(mw.load_model(tmp_path / "saved", model=Net), result)
    for path, array in mw.read_params(folder).items():
        np.testing.assert_array_equal(result.params[path], array, err_msg=path)
    again = trainer(mesh="data=2", devices=jax.devices()[:2]).fit(
        ARRAYS, steps=4, batch_size=16, run_dir=tmp_path / "new", resume=str(tmp_path / "saved")
    )
    assert list(again.losses) == [4]
    with pytest.raises(UserError, match="already holds checkpoints"):
        result.save(tmp_path / "saved")


def test_a_result_is_exported_as_its_run_is(run, tmp_path):
    from safetensors.numpy import load_file

    folder, result = run
    mw.export_safetensors(folder, tmp_path / "run.safetensors")
    mw.export_safetensors(result, tmp_path / "result.safetensors")
    ours, expected = (load_file(tmp_path / f"{n}.safetensors") for n in ("result", "run"))
    assert ours.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(ours[path], array, err_msg=path)


def test_training_starts_from_the_parameters_of_a_run(run):
    folder, _ = run
    values = trainer(init_from=folder, mesh="data=8", optimizer=optax.sgd(0.0)).fit(
        ARRAYS, steps=1, batch_size=16
    )
    for path, array in mw.read_params(folder).items():
        np.testing.assert_array_equal(values.params[path], array, err_msg=path)


@pytest.mark.full
def test_training_starts_from_some_parameters_of_a_run(run):
    folder, result = run
    settings = {"model": lambda rngs: Net(rngs, extra=2), "init_from": folder}
    with pytest.raises(UserError, match="do not fit the model") as caught:
        trainer(**settings).fit(ARRAYS, steps=1, batch_size=16)
    assert caught.value.why == "not in the checkpoint: `extra.bias`, `extra.kernel`"
    assert 'init_patterns such as ["blocks.**", "norms.**"]' in caught.value.fix
    some = trainer(init_patterns=["blocks.**"], optimizer=optax.sgd(0.0), seed=3, **settings)
    values = some.fit(ARRAYS, steps=1, batch_size=16).params
    fresh = trainer(model=settings["model"], optimizer=optax.sgd(0.0), seed=3)
    fresh = fresh.fit(ARRAYS, steps=1, batch_size=16).params
    for path, array in values.items():
        expected = result.params[path] if path.startswith("blocks.") else fresh[path]
        np.testing.assert_array_equal(array, expected, err_msg=path)
    with pytest.raises(UserError, match=r"`block.\*\*` matches no parameter"):
        trainer(init_patterns=["block.**"], **settings).fit(ARRAYS, steps=1, batch_size=16)


class Wrapped(nnx.Module):
    def __init__(self, rngs):
        self.inner, self.head = Net(rngs), nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        return self.head(self.inner(x))


@pytest.mark.full
def test_a_wrapped_model_starts_from_the_parameters_of_what_it_wraps(run):
    folder, result = run
    settings = {"model": Wrapped, "init_from": folder, "optimizer": optax.sgd(0.0)}
    with pytest.raises(UserError, match="do not fit the model") as caught:
        trainer(**settings).fit(ARRAYS, steps=1, batch_size=16)
    assert 'init_patterns such as ["**:inner.**"]' in caught.value.fix
    taken = trainer(init_patterns=["**:inner.**"], **settings)
    values = taken.fit(ARRAYS, steps=1, batch_size=16).params
    for path, array in result.params.items():
        np.testing.assert_array_equal(values[f"inner.{path}"], array, err_msg=path)


def test_patterns_are_proposed_that_fit():
    have = {"blocks.0.a": (2,), "blocks.1.a": (2,), "head": (3,), "norm.scale": (4,)}
    need = {**have, "blocks.0.lora": (1,), "head": (5,)}
    assert '["blocks.*.a", "norm.**"]' in proposal(have, need, need)
    assert renamed(have, ["blocks.*.a:layers.*.b"]).keys() == {
        *("layers.0.b", "layers.1.b", "head", "norm.scale")
    }
    with pytest.raises(UserError, match="one name"):
        renamed(have, ["head:norm.scale"])
    with pytest.raises(UserError, match="other wildcards"):
        renamed(have, ["blocks.*.a:layers.**"])


@pytest.mark.full
def test_runs_of_the_command_line_need_no_model_and_start_others(tmp_path, capfd, monkeypatch):
    words = ["train", "model=mlp", "model.widths=[784,16,10]", "optimizer=sgd", "training.steps=1"]
    words += ["training.eval_batches=1", "checkpoint.keep_best=0"]
    assert main([*words, f"hydra.run.dir={tmp_path}/first"]) == 0
    model = mw.load_model(tmp_path / "first")
    np.testing.assert_array_equal(
        model.layers[0].kernel[...], mw.read_params(tmp_path / "first")["layers.0.kernel"]
    )
    with monkeypatch.context() as forged:
        real = CheckpointReader.metadata

        def metadata(self, step):
            found = real(self, step)
            kind = {**found.config["model"], "kind": "subprocess:Popen", "args": "touch forged"}
            return replace(found, config={**found.config, "model": kind})

        forged.setattr(CheckpointReader, "metadata", metadata)
        with pytest.raises(UserError, match="your program has not imported"):
            mw.load_model(tmp_path / "first")
    start = [f"model.init_from={tmp_path}/first", "optimizer.learning_rate=1e-30"]
    assert main([*words, *start, f"hydra.run.dir={tmp_path}/second"]) == 0
    first, second = (mw.read_params(tmp_path / name) for name in ("first", "second"))
    for path, array in first.items():
        np.testing.assert_array_equal(second[path], array, err_msg=path)
    capfd.readouterr()
    wider = [*words, *start, "model.widths=[784,32,10]", f"hydra.run.dir={tmp_path}/third"]
    assert main(wider) == 2
    told = capfd.readouterr().err
    assert "other shapes: `layers.0.bias` is [16] and should be [32]" in told
    assert not (tmp_path / "third").exists()
    assert main(["export", f"{tmp_path}/first", "--to", "hf", f"{tmp_path}/hf"]) == 2
    told = capfd.readouterr().err
    assert "model.kind=mlp has no published form" in told
    assert "meshwright export RUN model.safetensors" in told
