"""Folders that are not what they should be: one clear message each, exit code 2."""

import json

import numpy as np
import optax
import pytest
from hf_folders import GPT2, HF, change_config, copy_folder, saved_tensors

import meshwright as mw
from meshwright.cli.main import main
from meshwright.data.tokenizer import FileTokenizer
from meshwright.errors import UserError
from meshwright.models import build_model
from meshwright.weights.hf_folder import open_folder
from meshwright.weights.safetensors_format import write_file


def rewrite(folder, change):
    """Write the tensors of a folder again after a change."""
    tensors = saved_tensors(folder)
    change(tensors)
    shapes = {name: array.shape for name, array in tensors.items()}
    write_file(folder / "model.safetensors", shapes, "float32", iter(tensors.values()))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["model=hf"], ["model=hf needs the folder of a model", "model.weights=…"]),
        (["model=hf", "model.weights=nowhere"], ["is not a folder", "there is no nowhere"]),
        (["model=hf", "model.weights=file"], ["model.weights=file is not a folder"]),
        (["model=hf", "model.weights=empty"], ["it has no config.json"]),
        (["model=hf", "model.weights=quantized"], ["are quantized", "quant_method=gptq"]),
        (["model=hf", "model.weights=mamba"], ["MambaForCausalLM", "Gemma3ForCausalLM"]),
        (["model=hf", "model.weights=broken"], ["cannot read", "config.json"]),
        (
            ["model=gpt2", "model.weights=gpt2"],
            ["num_blocks is 12 here and 2 in config.json", "model=hf"],
        ),
        (["model=gemma3_1b", "model.weights=gpt2"], ["model.kind=gemma3", "GPT2LMHeadModel"]),
        (["model=hf", "model.weights=gpt2", "model.num_heads=8"], ["num_heads is 8", "and 4 in"]),
        (["model=hf", "model.weights=gpt2", "model.hidden=8"], ["there is no `model.hidden`"]),
        (
            ["model=hf", "model.weights=llama", "model.context_length=128"],
            ["model.context_length=128 is longer", "says 64"],
        ),
        (
            ["model.kind=own:Net", "model.weights=gpt2"],
            ["model.kind=own:Net has no published form"],
        ),
        (["model=moe_tiny", "model.weights=gpt2"], ["model.kind=moe", "gpt, gemma2, gemma3"]),
        (["model=hf", "model.weights=gpt2", "model.init_from=run"], ["are both set"]),
        (["model=./gpt2"], ["is a folder of weights", "write model=hf model.weights=./gpt2"]),
        (["model=run"], ["`model=run` is a run folder", "model.init_from=run"]),
        (
            ["model=google/gemma-3-1b-pt"],
            ["nothing is downloaded", "hf download google/gemma-3-1b-pt --local-dir gemma-3-1b-pt"],
        ),
        (
            ["model=hf", "model.weights=google/gemma-3-1b-pt"],
            ["is not a folder", "(hf download google/gemma-3-1b-pt --local-dir gemma-3-1b-pt)"],
        ),
        (
            ["model=hf", "model.weights=gpt2", "task.context_length=4096"],
            [
                "task.context_length=4096 is more than the model has",
                "32 positions",
                "write task.context_length=32 or less\n",
            ],
        ),
        (
            ["model=gpt2_nano", "data.sequence_length=65"],
            ["64 positions", "write data.sequence_length=64 or less, or model.context_length=65"],
        ),
        (
            ["model=hf", "model.weights=gpt2", "data=synthetic", "task.vocab_size=321"],
            ["task.vocab_size=321 is more", "320 tokens", "write task.vocab_size=320 or less\n"],
        ),
    ],
)
def test_a_config_that_contradicts_its_folder_is_refused(
    tmp_path, monkeypatch, capsys, words, told
):
    monkeypatch.chdir(tmp_path)
    copy_folder("gpt2", tmp_path / "gpt2")
    copy_folder("llama", tmp_path / "llama")
    llama = {"architectures": ["LlamaForCausalLM"]}
    configs = {
        "mamba": {"architectures": ["MambaForCausalLM"]},
        "quantized": {**llama, "quantization_config": {"quant_method": "gptq", "bits": 4}},
        "broken": [],
    }
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    assert main(["config", *words]) == 2
    error = capsys.readouterr().err
    assert all(text in error for text in told), error


def test_rows_may_be_shorter_than_the_model_reads(capfd):
    words = ["model=hf", f"model.weights={HF / 'llama'}", "model.context_length=16"]
    assert main(["config", *words, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["model.context_length"]["value"] == 16
    assert told["model.num_blocks"]["from"] == str(HF / "llama" / "config.json")


def test_names_and_shapes_that_differ_are_listed(tmp_path):
    folder = copy_folder("gpt2", tmp_path / "gpt2")

    def change(tensors):
        del tensors["transformer.h.1.ln_1.weight"]
        tensors["transformer.h.1.extra"] = np.zeros(3, np.float32)
        tensors["transformer.wpe.weight"] = np.zeros((31, 16), np.float32)

    rewrite(folder, change)
    with pytest.raises(UserError, match="do not fit the model") as error:
        mw.load_model(folder)
    assert "not in the folder: `transformer.h.1.ln_1.weight`" in error.value.why
    assert "not in the model: `transformer.h.1.extra`" in error.value.why
    assert "`transformer.wpe.weight` is [31, 16] and should be [32, 16]" in error.value.why


def test_an_own_model_that_is_another_lists_what_is_missing():
    from meshwright.models.mlp import MLP

    trainer = mw.Trainer(
        model=lambda rngs: MLP(widths=(4, 4), rngs=rngs),
        loss=lambda model, batch: model(batch["x"]).mean(),
        optimizer=optax.sgd(0.1),
        weights=GPT2,
    )
    with pytest.raises(UserError, match="do not fit the model") as error:
        trainer.fit({"x": np.ones((8, 4), np.float32)}, steps=1, batch_size=8)
    assert "not in the folder" in error.value.why
    assert "not in the model: `transformer.h.0.attn.c_attn.bias`" in error.value.why


@pytest.mark.parametrize("load", [mw.load_model, mw.hf_model])
def test_names_of_the_hub_are_not_folders(load):
    with pytest.raises(UserError, match="hf download google/gemma --local-dir gemma"):
        load("google/gemma")


def test_a_truncated_file_is_refused(tmp_path):
    file = copy_folder("gpt2", tmp_path / "gpt2") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="is not a complete safetensors file") as error:
        mw.load_model(tmp_path / "gpt2")
    assert f"{file.stat().st_size:,} bytes" in error.value.why


def test_missing_files_and_tensors_of_an_index_are_listed(tmp_path):
    folder = copy_folder("llama", tmp_path / "llama")
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.more"] = "model-00001-of-00005.safetensors"
    index.write_text(json.dumps(values))
    with pytest.raises(UserError, match="do not have the tensors") as error:
        mw.load_model(folder)
    assert error.value.why == "not found: `model.more` in model-00001-of-00005.safetensors"
    values["weight_map"].pop("model.more")
    moved = values["weight_map"].pop("model.norm.weight")
    index.write_text(json.dumps(values))
    with pytest.raises(UserError, match="do not have the tensors") as error:
        mw.load_model(folder)
    assert error.value.why == f"not in the index: `model.norm.weight` in {moved}"
    (folder / "model-00002-of-00005.safetensors").unlink()
    with pytest.raises(UserError, match="1 of the 5 files of weights are missing") as error:
        mw.load_model(folder)
    assert "`model-00002-of-00005.safetensors`" in error.value.why
    index.write_text("{}")
    with pytest.raises(UserError, match="is not an index"):
        mw.load_model(folder)


def test_a_folder_without_safetensors_says_what_it_has(tmp_path):
    folder = copy_folder("gpt2", tmp_path / "gpt2")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    trainer = mw.Trainer(
        model=mw.hf_model(folder),
        loss=lambda model, batch: model(batch["x"]).mean(),
        optimizer=optax.sgd(0.1),
    )
    with pytest.raises(UserError, match="there are no weights") as error:
        trainer.fit({"x": np.zeros((8, 4), np.int32)}, steps=1, batch_size=8)
    assert "pytorch_model.bin" in error.value.why


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path, capsys):
    folder = copy_folder("gpt2", tmp_path / "gpt2")
    change_config(folder, vocab_size=200)
    size = FileTokenizer(str(folder)).vocab_size
    (tmp_path / "text").write_text("the cat sat on the mat. " * 400)
    words = ["model=hf", f"model.weights={folder}", f"data.path={tmp_path / 'text'}"]
    run = f"hydra.run.dir={tmp_path / 'run'}"
    assert main(["train", *words, run]) == 2
    told = capsys.readouterr().err
    assert f"it has {size} tokens, the model's vocabulary 200" in told
    assert "train a new model" in told
    assert "published weights keep their vocabulary" in told
    assert not (tmp_path / "run").exists()


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    folder = copy_folder("gpt2", tmp_path / "gpt2")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (folder / "model.safetensors").write_text(pointer)
    with pytest.raises(UserError, match="pointer of Git LFS"):
        mw.load_model(folder)


def test_arguments_that_change_what_a_pretrained_model_computes_are_refused():
    with pytest.raises(UserError, match=r"rope_base is 5.0 here and"):
        mw.hf_model(HF / "llama", rope_base=5.0)
    assert mw.hf_model(HF / "llama", rope_base=5.0, pretrained=False).arguments["rope_base"] == 5.0
    assert mw.hf_model(HF / "llama", context_length=32).arguments["context_length"] == 32


def test_weights_come_from_one_folder(tmp_path):
    other = copy_folder("gpt2", tmp_path / "other")

    def trainer(model):
        return mw.Trainer(
            model=model,
            loss=lambda model, batch: model(batch["tokens"]).mean(),
            optimizer=optax.sgd(0.1),
            weights=other,
        )

    with pytest.raises(UserError, match="the weights come from two folders") as error:
        trainer(mw.hf_model(GPT2))
    assert f"the model from {GPT2}, and weights={other}" in error.value.why
    # The same folder twice is no contradiction, and neither are the sizes of another one.
    assert trainer(mw.hf_model(other)).weights == other
    assert trainer(mw.hf_model(GPT2, pretrained=False)).weights == other


@pytest.mark.parametrize("change", [{"rope_base": 5.0}, {"norm_epsilon": 0.1}])
def test_a_built_in_model_with_other_numbers_than_its_folder_is_refused(change):
    published = mw.hf_model(HF / "llama", pretrained=False)
    arguments = {**published.arguments, **change}
    trainer = mw.Trainer(
        model=lambda rngs: build_model(published.kind, rngs=rngs, **arguments),
        loss=lambda model, batch: model(batch["tokens"]).mean(),
        optimizer=optax.sgd(0.1),
        weights=HF / "llama",
    )
    with pytest.raises(UserError, match="is not the one in"):
        trainer.fit({"tokens": np.zeros((8, 8), np.int32)}, batch_size=8, steps=1)


def test_a_model_is_not_loaded_from_pickled_weights(tmp_path):
    folder = copy_folder("gpt2", tmp_path / "gpt2")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"only `pytorch_model.bin`"):
        mw.load_model(folder)


@pytest.mark.parametrize(
    ("name", "key", "value", "told"),
    [
        ("gpt2", "n_embd", "768", 'it is "768", and has to be a whole number, 1 or more'),
        ("gpt2", "n_layer", [2], "it is [2], and has to be a whole number"),
        ("gpt2", "n_head", 0, "it is 0, and"),
        ("gpt2", "n_head", True, "it is true, and"),
        ("gpt2", "resid_pdrop", -0.5, "it is -0.5, and has to be a number from 0 to 1"),
        ("gpt2", "n_inner", "wide", 'it is "wide", and'),
        ("gpt2", "tie_word_embeddings", "yes", 'it is "yes", and has to be true or false'),
        ("gpt2", "architectures", "GPT2LMHeadModel", "has to be a list of names"),
        ("gpt2", "architectures", 3, "it is 3, and has to be a list of names"),
        ("llama", "hidden_size", None, "it is null or missing, and has to be a whole number"),
        ("llama", "hidden_size", 64.5, "it is 64.5, and"),
        ("llama", "rms_norm_eps", float("nan"), "it is NaN, and has to be a decimal number"),
        ("llama", "rope_scaling", "linear", 'it is "linear", and has to be an object with keys'),
        ("llama", "rope_theta", "big", 'it is "big", and has to be a number'),
        ("gemma3", "layer_types", 3, "it is 3, and has to be a list"),
        ("gemma3", "rope_parameters", {"full_attention": 1}, "an object with keys"),
        ("gemma3_multimodal", "text_config", [], "it is [], and has to be an object with keys"),
        ("vit", "image_size", [], "it is [], and has to be a whole number"),
        ("vit", "image_size", ["8", "8"], 'it is "8", and has to be a whole number'),
        ("vit", "id2label", 5, "it is 5, and has to be an object"),
    ],
)
def test_values_of_a_config_that_cannot_be_are_named(tmp_path, capsys, name, key, value, told):
    folder = copy_folder(name, tmp_path / name)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    assert main(["config", "model=hf", f"model.weights={folder}"]) == 2
    error = capsys.readouterr().err
    assert f"`{key}" in error
    assert f"in {file} is not valid" in error
    assert told in error


def test_numbers_of_scaled_positions_have_to_be_there(tmp_path):
    folder = copy_folder("llama", tmp_path / "llama")
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    change_config(folder, rope_scaling=scaling, rope_parameters=None)
    with pytest.raises(UserError, match=r"`rope_scaling.high_freq_factor` in .*config.json"):
        mw.hf_model(folder)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "\xff", "null"])
def test_a_config_that_is_not_json_is_named(tmp_path, capsys, text):
    folder = copy_folder("gpt2", tmp_path / "gpt2")
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert main(["config", "model=hf", f"model.weights={folder}"]) == 2
    error = capsys.readouterr().err
    assert f"cannot read {folder / 'config.json'}" in error
    assert "download the folder again" in error


def test_sizes_that_a_config_leaves_out_are_named_where_the_weights_do_not_fit(tmp_path):
    folder = copy_folder("gpt2", tmp_path / "gpt2")
    change_config(folder, n_embd=None)
    with pytest.raises(UserError, match="do not fit the model") as error:
        mw.load_model(folder)
    assert "config.json leaves out `n_embd`, so the defaults are taken" in error.value.why


@pytest.mark.parametrize(
    "text",
    [
        *(pytest.param(text, marks=pytest.mark.full) for text in ("[]", "{")),
        '{"eos_token_id": "the end"}',
    ],
)
def test_a_broken_generation_config_is_named_before_training(tmp_path, capsys, text):
    folder = copy_folder("gpt2", tmp_path / "gpt2")
    (folder / "generation_config.json").write_text(text)
    words = ["model=hf", f"model.weights={folder}", "data=synthetic"]
    assert main(["train", *words, f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    assert "generation_config.json" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_keys_that_are_not_known_are_named(tmp_path):
    folder = copy_folder("llama", tmp_path / "llama")
    change_config(folder, use_swiglu=True, residual_multiplier=0.5)
    with pytest.raises(UserError, match="not known: `use_swiglu`, `residual_multiplier`") as error:
        mw.hf_model(folder)
    assert "remove them" in error.value.fix


def test_a_class_that_contradicts_its_type_is_refused(tmp_path):
    folder = copy_folder("llama", tmp_path / "llama")
    change_config(folder, model_type="mistral")
    with pytest.raises(UserError, match="is not known") as error:
        mw.hf_model(folder)
    assert "LlamaForCausalLM of the model_type mistral" in error.value.why


def test_an_output_layer_that_is_not_the_embedding_is_named(tmp_path):
    folder = copy_folder("gpt2", tmp_path / "gpt2")
    table = "transformer.wte.weight"
    rewrite(folder, lambda t: t.update({"lm_head.weight": t[table].copy()}))
    assert mw.load_model(folder).vocabulary.head is None
    rewrite(folder, lambda t: t.update({"lm_head.weight": t[table] * 2}))
    with pytest.raises(UserError, match=r"`lm_head.weight` in .* is not the embedding") as error:
        mw.load_model(folder)
    change_config(folder, tie_word_embeddings=False)
    assert "write tie_word_embeddings=false" in error.value.fix
    assert mw.load_model(folder).vocabulary.head is not None


def test_a_tensor_under_two_names_is_refused(tmp_path):
    folder = copy_folder("gpt2", tmp_path / "gpt2")
    rewrite(folder, lambda t: t.update({"wte.weight": t["transformer.wte.weight"] * 2}))
    with pytest.raises(UserError, match="twice") as error:
        mw.load_model(folder)
    assert "`wte.weight`" in error.value.why


def test_files_outside_of_the_folder_are_refused(tmp_path):
    folder = copy_folder("gpt2", tmp_path / "gpt2")
    (tmp_path / "secret").write_text("a key")
    (folder / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"chat_template.jinja is not in its folder") as error:
        open_folder(folder).kept_files()
    assert error.value.why == f"it is {tmp_path / 'secret'}"
    weights = folder / "model.safetensors"
    weights.rename(tmp_path / "model.safetensors")
    weights.symlink_to(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model.safetensors is not in its folder"):
        mw.load_model(folder)
    weights.unlink()
    index = {"weight_map": {"transformer.wte.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"\.\./model.safetensors is not in its folder"):
        mw.load_model(folder)


def test_a_folder_of_the_cache_of_hugging_face_is_read(tmp_path):
    cache = tmp_path / "models--gpt2"
    copy_folder("gpt2", cache / "blobs")
    snapshot = cache / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for file in (cache / "blobs").iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert "tokenizer.json" in open_folder(snapshot).kept_files()
    assert mw.load_model(snapshot).blocks[0].mlp.up.kernel.shape == (16, 64)


def test_a_name_of_the_hub_without_its_owner_has_the_command_to_download(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="hf download gpt2 --local-dir gpt2"):
        mw.load_model("gpt2")
