"""Runs that train adapters or a part of a model: resumed, loaded, exported, in PEFT's folders."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from hf_folders import HF
from quick import quick_module

import meshwright as mw
from meshwright.checkpoint import CheckpointReader
from meshwright.cli.main import main
from meshwright.errors import UserError
from meshwright.trainer.trained.base_weights import check_adapters, find_base
from meshwright.weights.peft_folder import PEFT_WEIGHTS
from meshwright.weights.safetensors_format import write_file

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")

PEFT = HF.parent / "peft" / "llama"
DATA = {"x": np.random.default_rng(0).normal(size=(32, 8)).astype("float32")}


class Net(nnx.Module):
    """Two layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.first, self.last = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.tanh(self.first(x)))


def loss(model, batch):
    return ((model(batch["x"]) - 1) ** 2).mean()


def trainer(**settings):
    parts = {"model": Net, "loss": loss, "optimizer": optax.adam(1e-2), "mesh": "fsdp=2"}
    return mw.Trainer(**{**parts, "lora": mw.LoRA(rank=2), **settings})


def fit(folder, steps, own=None, **settings):
    checkpoint = mw.CheckpointConfig(every=2)
    settings = {"batch_size": 8, "checkpoint": checkpoint, **settings}
    return (own or trainer()).fit(DATA, steps=steps, run_dir=folder, **settings)


@pytest.fixture(scope="module")
def own(quick_module):
    """A trainer, whose programs several runs share."""
    return trainer()


@pytest.fixture(scope="module")
def run(tmp_path_factory, own):
    folder = tmp_path_factory.mktemp("adapted") / "run"
    return fit(folder, 4, own)


def test_a_checkpoint_holds_the_adapters_alone_and_resumes_bit_by_bit(run, own, tmp_path):
    shapes = CheckpointReader(run.run_dir / "checkpoints").shapes(4)
    factors = {"lora.first.kernel.a", "lora.first.kernel.b", "lora.last.kernel.a"}
    assert set(shapes["params"]) == factors | {"lora.last.kernel.b"} == set(run.params)
    assert not shapes.get("state")
    fit(tmp_path / "again", 2, own, restart=True)
    # The second part is that of a trainer that knows nothing.
    resumed = fit(tmp_path / "again", 4)
    for path, value in run.params.items():
        np.testing.assert_array_equal(resumed.params[path], value)


def test_a_run_is_loaded_with_its_adapters_or_without(run):
    x = DATA["x"]
    merged = mw.load_model(run.run_dir, model=Net)
    np.testing.assert_allclose(merged(x), run.model(x), atol=1e-6)
    base = mw.load_model(run.run_dir, model=Net, adapters=False)
    np.testing.assert_array_equal(base(x), Net(rngs=nnx.Rngs(0))(x))


def test_another_base_is_refused(run, tmp_path):
    shutil.copytree(run.run_dir, tmp_path / "run")
    record = tmp_path / "run" / "base.json"
    values = json.loads(record.read_text())
    record.write_text(json.dumps({**values, "digest": "0" * 32}))
    with pytest.raises(mw.UserError, match="is not the one that it was trained on"):
        mw.load_model(tmp_path / "run", model=Net)
    with pytest.raises(mw.UserError, match="is not the one that it was trained on"):
        fit(tmp_path / "run", 5)


def test_another_alpha_is_refused(run):
    scaled, accept = mw.LoRA(rank=2, alpha=8), mw.CheckpointConfig(accept_changes=True)
    message = r"lora\.alpha was 2 in the checkpoint .*4 and is 8\n(.*\n)*.*alpha=2"
    with pytest.raises(mw.UserError, match=message):
        trainer(lora=scaled).fit(
            DATA, steps=5, batch_size=8, run_dir=run.run_dir, checkpoint=accept
        )


def test_patterns_freeze_the_rest(tmp_path):
    settings = {"lora": None, "trainable": ["last.**"]}
    before = Net(rngs=nnx.Rngs(0))
    run = fit(tmp_path / "run", 2, trainer(**settings))
    assert set(run.params) == {"last.kernel", "last.bias"}
    loaded = mw.load_model(tmp_path / "run", model=Net)
    np.testing.assert_array_equal(loaded.first.kernel[...], before.first.kernel[...])
    assert (loaded.last.kernel[...] != before.last.kernel[...]).any()
    with pytest.raises(mw.UserError, match=r"`lats.\*\*` .* matches no parameter\n.*`last.\*\*`"):
        trainer(lora=None, trainable=["lats.**"]).assemble({"x": DATA["x"]})


def adapted_llama(**settings):
    """Train nothing: a Llama from a folder with adapters."""

    def of_tokens(model, batch):
        return model(batch["ids"]).mean()

    settings = {"rank": 2, "init_from": str(PEFT), **settings}
    parts = {"loss": of_tokens, "optimizer": optax.sgd(0.1), "lora": mw.LoRA(**settings)}
    run = mw.Trainer(model=mw.hf_model(HF / "llama"), devices=jax.devices()[:1], **parts)
    return lambda folder: run.fit(
        {"ids": np.load(PEFT / "expected.npz")["input_ids"]}, batch_size=2, steps=0, run_dir=folder
    )


@pytest.mark.full
def test_a_run_starts_from_adapters_of_peft_and_leaves_as_such_or_merged(tmp_path, capsys):
    saved = np.load(PEFT / "expected.npz")
    run = adapted_llama()(tmp_path / "run")
    np.testing.assert_allclose(run.model(saved["input_ids"]), saved["logits"], atol=1e-5)
    folders = {to: str(tmp_path / to) for to in ("hf", "peft")}
    for to, folder in folders.items():
        assert main(["export", str(tmp_path / "run"), "--to", to, folder]) == 0
    merged = mw.load_model(folders["hf"])
    np.testing.assert_allclose(merged(saved["input_ids"]), saved["logits"], atol=1e-5)
    assert "rank 2" in (tmp_path / "hf" / "README.md").read_text()
    again = adapted_llama(init_from=folders["peft"])(tmp_path / "again")
    for path, value in run.params.items():
        np.testing.assert_allclose(again.params[path], value, rtol=1e-6)


def test_adapters_of_a_base_with_other_numbers_are_refused(run, tmp_path):
    base = find_base(run.run_dir)
    write_file(tmp_path / PEFT_WEIGHTS, {}, "float32", iter(()), base_digest=base.identity)
    check_adapters(tmp_path, base)
    with pytest.raises(UserError, match=f"of another base\n.*was {base.digest}, and that of"):
        check_adapters(tmp_path, dataclasses.replace(base, digest="0"))
    # Digests of other formats cannot be compared.
    halved = dict.fromkeys(base.formats, "bfloat16")
    check_adapters(tmp_path, dataclasses.replace(base, digest="0", formats=halved))


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["fsdp=4,tensor=2", "pipe=2,data=4", "fsdp=8"])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_adapters_are_trained_on_a_mesh_as_on_one_device(mesh, dropout):
    scan = mw.ShardingConfig(blocks="scan")
    run = mw.Trainer(
        model=mw.hf_model(HF / "llama"),
        loss=lambda model, batch: optax.softmax_cross_entropy_with_integer_labels(
            model(batch["ids"]), batch["ids"]
        ).mean(),
        optimizer=optax.adamw(1e-2),
        mesh=mesh,
        gradient_accumulation_steps=2 if "pipe" in mesh else 1,
        lora=mw.LoRA(rank=2, dropout=dropout),
        **({"sharding": scan} if mesh == "fsdp=8" else {}),
    )
    ids = np.random.default_rng(0).integers(0, 96, (16, 8))
    certificate = run.verify(lambda step: {"ids": ids}, steps=3)
    assert certificate.equal, certificate
