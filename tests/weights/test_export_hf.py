"""Exports: the files that were loaded, bit by bit, complete or not at all."""

import json
import shutil
from pathlib import Path

import numpy as np
import optax
import pytest
from hf_folders import FOLDERS, GPT2, HF, change_config, copy_folder, saved_tensors
from quick import quick_module

import meshwright as mw
from meshwright.cli.main import main
from meshwright.errors import UserError
from meshwright.program.trace.build_model import describe_model
from meshwright.weights import write_folder as writing
from meshwright.weights.kept import keep_files
from meshwright.weights.match import find_weights
from meshwright.weights.write_folder import Source, write_folder

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")


def source(folder):
    """A model with the weights of a folder, as a run would have them."""
    model = mw.hf_model(folder)
    leaves = [leaf for leaf in describe_model(model).leaves if leaf.is_weight]
    weights = find_weights(model.folder, {leaf.path: leaf.shape for leaf in leaves})

    def read(paths):
        return {path: weights.read_whole(path, np.float32) for path in paths}

    return Source(model.kind, model.arguments, weights.shapes, read, keep_files(model.folder))


LIKE_OTHERS = ("gemma2", "gemma3", "llama", "mistral", "qwen2")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] * (n in LIKE_OTHERS)) for n in FOLDERS]
)
def test_loaded_weights_are_exported_bit_by_bit(name, tmp_path):
    exported = write_folder(source(HF / name), tmp_path / "out")
    before, after = saved_tensors(HF / name), saved_tensors(tmp_path / "out")
    text = {n.removeprefix("language_model."): a for n, a in before.items() if "vision" not in n}
    text = {n: array for n, array in text.items() if "multi_modal" not in n}
    assert set(after) == set(text) == set(exported.tensors)
    for key, array in text.items():
        assert after[key].dtype == array.dtype
        np.testing.assert_array_equal(after[key], array)
    # The exported folder describes the same model.
    assert mw.hf_model(tmp_path / "out").arguments == mw.hf_model(HF / name).arguments


def test_rates_of_dropout_and_the_padding_token_are_read_and_written_again(tmp_path):
    rates = {"resid_pdrop": 0.1, "embd_pdrop": 0.2, "attn_pdrop": 0.3}
    folder = copy_folder("gpt2", tmp_path / "gpt2")
    change_config(folder, **rates)
    model = mw.hf_model(folder)
    names = ("dropout", "embedding_dropout", "attention_dropout")
    assert [model.arguments[name] for name in names] == [0.1, 0.2, 0.3]
    assert {key: model.config()[key] for key in rates} == rates
    # One rate stands for all that are not given.
    other = mw.hf_model(folder, dropout=0.0, attention_dropout=0.5).arguments
    assert [other[name] for name in names] == [0.0, 0.0, 0.5]
    vit = copy_folder("vit", tmp_path / "vit")
    change_config(vit, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.2)
    assert [mw.hf_model(vit).arguments[name] for name in names] == [0.1, 0.1, 0.2]
    llama = copy_folder("llama", tmp_path / "llama")
    change_config(llama, attention_dropout=0.1, pad_token_id=-1)
    model = mw.hf_model(llama)
    assert (model.arguments["attention_dropout"], model.arguments["pad_token_id"]) == (0.1, 95)
    assert (model.config()["attention_dropout"], model.config()["pad_token_id"]) == (0.1, 95)
    # Without a padding token in its config.json, Gemma 3 has token 0.
    change_config(copy_folder("gemma3", tmp_path / "gemma3"), pad_token_id=None)
    assert mw.hf_model(tmp_path / "gemma3").arguments["pad_token_id"] == 0


def test_numbers_that_a_format_cannot_hold_are_counted(tmp_path):
    usual = source(HF / "qwen3")
    assert write_folder(usual, tmp_path / "same").rounded == 0

    def trained(paths):
        return {path: array * 1.001 for path, array in usual.read(paths).items()}

    exported = write_folder(Source(**{**vars(usual), "read": trained}), tmp_path / "out")
    assert exported.dtype == "float16"
    assert exported.parameters * 0.9 < exported.rounded <= exported.parameters


def test_large_models_are_written_to_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "FILE_BYTES", 20_000)
    monkeypatch.setattr(writing, "READ_BYTES", 4_000)
    exported = write_folder(source(GPT2), tmp_path / "out", "bfloat16")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * exported.parameters
    files = {f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    assert set(index["weight_map"].values()) == files < set(exported.files)
    for name, array in saved_tensors(GPT2).items():
        again = saved_tensors(tmp_path / "out")[name]
        np.testing.assert_array_equal(again, array.astype(again.dtype))
    assert mw.load_model(tmp_path / "out").blocks[0].mlp.up.kernel.shape == (16, 64)


def test_a_failed_export_leaves_nothing(tmp_path):
    def fail(_):
        raise OSError("no space left")

    failing = Source(**{**vars(source(GPT2)), "read": fail})
    with pytest.raises(UserError, match="cannot write"):
        write_folder(failing, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def run(tmp_path_factory, quick_module):
    """A run from a folder that is gone afterwards, started by the command."""
    place = tmp_path_factory.mktemp("hf")
    folder = copy_folder("gpt2", place / "published")
    (place / "text").write_text("the cat sat on the mat. " * 400)
    command = [
        "train",
        "model=hf",
        f"model.weights={folder}",
        f"data.path={place / 'text'}",
        "mesh.fsdp=8",
        "training.steps=1",
        "training.global_batch_size=8",
        "training.sample_tokens=0",
        "data.eval_fraction=0",
        "optimizer=sgd",
        "optimizer.schedule=constant",
        "optimizer.warmup_steps=0",
        "optimizer.learning_rate=1e-30",
        f"hydra.run.dir={place / 'run'}",
    ]
    assert main(command) == 0
    shutil.rmtree(folder)
    return place / "run"


def test_a_run_starts_from_the_weights_and_exports_them_again(run, tmp_path, capfd):
    assert main(["export", str(run), "--to", "hf", str(tmp_path / "out")]) == 0
    assert "GPT2LMHeadModel, 28 tensors, 12,224 parameters in float32" in capfd.readouterr().out
    before, after = saved_tensors(GPT2), saved_tensors(tmp_path / "out")
    assert set(before) == set(after)
    for name in before:
        # The learning rate is too small to change a number.
        np.testing.assert_array_equal(before[name], after[name])
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_text() == (GPT2 / name).read_text()


def test_a_run_has_the_kind_and_sizes_written_out_and_stays_loadable(run):
    config = (run / "config.yaml").read_text()
    assert "kind: gpt\n" in config
    assert "num_blocks: 2\n" in config
    assert "published/tokenizer.json" in config
    model = mw.load_model(run)
    table = np.asarray(model.vocabulary.tokens.embedding[...])
    np.testing.assert_array_equal(table, saved_tensors(GPT2)["transformer.wte.weight"])


@pytest.mark.full
def test_a_run_resumes_without_the_folder(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    words = ["training.steps=2", f"hydra.run.dir={tmp_path / 'run'}"]
    assert main(["train", "--config", str(run / "config.yaml"), *words]) == 0
    log = (tmp_path / "run" / "train.log").read_text()
    assert "continuing after step 1" in log
    assert mw.export_hf(tmp_path / "run", tmp_path / "out") is not None
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_the_command_takes_a_number_format_and_tells_in_json(run, tmp_path, capfd):
    words = ["export", str(run), "--to", "hf", str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert main([*words, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["dtype"] == "bfloat16"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "hf"], "takes a run and a folder"),
        (["--to", "onnx", "out"], "--to onnx is not known"),
        (["--to", "hf", "out", "--dtype", "int8"], "int8 is not a number format"),
        (["out", "--dtype", "float32"], "--dtype is for folders"),
        (["--to", "hf", "full"], "full exists already"),
        (["--to", "hf", "full/file"], "full/file exists already"),
        (["--to", "hf", "full/file/in"], "full/file is a file"),
        (["full"], "name a file, such as full/model.safetensors"),
        (["full/file/in"], "cannot write full/file/in"),
        (["--to", "hf", "out", "--step", "7"], "checkpoints: 1"),
    ],
)
def test_mistakes_of_the_command_are_told(run, tmp_path, capfd, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full", "file").write_text("")
    assert main(["export", str(run), *words]) == 2
    assert message in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("urn", ["there is no folder", "did you mean `run`?"]),
        ("run/checkpoint", ["did you mean `checkpoints`?"]),
        ("run/checkpoints/2", ["there is no 2 in", "a single checkpoint"]),
        ("run/config.yaml", ["it is a file"]),
        ("young", ["the run has not saved one yet", "checkpoint.enabled=false"]),
        ("weights", ["it is a folder of weights, not of a run", "model=hf model.weights="]),
        ("empty", ["has no subfolder named after a step"]),
    ],
)
def test_what_is_not_a_run_with_checkpoints_is_told(run, tmp_path, capfd, name, told):
    (tmp_path / "run").symlink_to(run)
    for folder in ("young", "empty"):
        (tmp_path / folder).mkdir()
    (tmp_path / "young" / "run.json").write_text("{}")
    (tmp_path / "weights").symlink_to(GPT2)
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / name), "--to", "hf", str(out)]) == 2
    error = capfd.readouterr().err
    assert all(text in error for text in told), error
    assert not out.exists()


@pytest.mark.full
def test_a_result_in_memory_is_exported_and_saved(tmp_path):
    def loss(model, batch):
        return (model(batch["x"]) ** 2).mean()

    trainer = mw.Trainer(
        model=mw.hf_model(GPT2, dropout=0.0),
        loss=loss,
        optimizer=optax.sgd(1e-30),
        mesh="fsdp=2,data=4",
        sharding=mw.ShardingConfig(blocks="scan"),
    )
    result = trainer.fit({"x": np.zeros((8, 4), np.int32)}, steps=1, batch_size=8)
    exported = mw.export_hf(result, tmp_path / "out")
    assert exported is not None
    for name, array in saved_tensors(GPT2).items():
        np.testing.assert_array_equal(saved_tensors(tmp_path / "out")[name], array)
    result.save(tmp_path / "saved")
    mw.export_hf(tmp_path / "saved", tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_text() == (
        tmp_path / "out" / "config.json"
    ).read_text()
    loaded = mw.load_model(tmp_path / "saved")
    np.testing.assert_array_equal(
        loaded.vocabulary.tokens.embedding[...], result.model.vocabulary.tokens.embedding[...]
    )


def test_other_sizes_than_the_folders_are_exported_as_they_are(tmp_path):
    change_config(copy_folder("gpt2", tmp_path / "in"), n_head=2)
    smaller = mw.hf_model(tmp_path / "in", pretrained=False, num_blocks=1)
    assert smaller.config()["n_layer"] == 1
    assert smaller.config()["n_head"] == 2
