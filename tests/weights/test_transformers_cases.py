"""Odd config.json files and folders: what transformers makes of them, or a refusal.

`tools/make_hf_cases.py` wrote what transformers does. The everyday tests read every config.json;
the logits of models that differ from the usual one are compared once per model.
"""

import copy
import json
from functools import cache

import jax
import numpy as np
import pytest
from flax import nnx
from hf_folders import HF, change_config, copy_folder, expected, saved_tensors
from quick import quick_options

import meshwright as mw
from meshwright.errors import UserError
from meshwright.weights.config_values import WITHOUT_EFFECT, Key
from meshwright.weights.families import FAMILIES, read_architecture
from meshwright.weights.safetensors_format import write_file

CASES = HF.parent / "hf_cases"
FOUND = json.loads((CASES / "cases.json").read_text())
ODD = json.loads((CASES / "odd.json").read_text())
TOLERANCE = 1e-4
"""Of the largest logit."""

WITHOUT_LOGITS = ("dropout", "embedding_dropout", "attention_dropout", "pad_token_id")
"""Arguments that change only how a model is trained."""


def sampled(logits):
    """The logits that the fixtures have of a model; see the tool."""
    return logits.ravel()[:: max(1, logits.size // 40)][:40]


def compute(folder):
    """The logits of a folder's model for one row."""
    inputs, _ = expected(folder.name if folder.parent == HF else folder.parent.name)
    graph, state = nnx.split(mw.load_model(folder))
    call = jax.jit(lambda state, x: nnx.merge(graph, state)(x), compiler_options=quick_options())
    return np.asarray(call(state, inputs[:1]))


@cache
def kept_logits():
    saved = np.load(CASES / "logits.npz")
    rows = (row[~np.isnan(row)] for row in saved["logits"])
    return dict(zip(saved["names"].tolist(), rows, strict=True))


def wanted_logits(case, outcome, base):
    return kept_logits()[case] if outcome == "d" else sampled(expected(base)[1][:1])


def difference(logits, wanted):
    """The largest difference, as a share of the largest logit."""
    return np.abs(sampled(logits) - wanted).max() / np.abs(wanted).max()


def cases_of(label):
    """Every value of every key: its name, the changed config.json, and what transformers did."""
    base, _, inside = label.partition("/")
    usual = config_of(base)
    for key, letters in FOUND["outcomes"][label].items():
        for number, outcome in enumerate(letters):
            config = copy.deepcopy(usual)
            (config[inside] if inside else config)[key] = FOUND["values"][key][number]
            yield f"{label}/{key}/{number}", key, config, outcome


def arguments_of(config):
    """The arguments of a model that change its logits; None if its config.json is refused."""
    try:
        found = read_architecture(config, "the folder")
    except UserError:
        return None
    return {k: v for k, v in found.arguments.items() if k not in WITHOUT_LOGITS}


def has_no_effect(label, key):
    """Whether a key has no effect on a family; one that no family has may be null."""
    family = read_architecture(config_of(label.partition("/")[0]), "the folder").family
    table = family.outer if label == "gemma3_multimodal" else family.keys
    return table.get(key, Key("")) == Key("")


def config_of(base):
    return json.loads((HF / base / "config.json").read_text())


def read_cases(label):
    """Every value of every key that is not refused, with the arguments if they are others."""
    base = label.partition("/")[0]
    usual = arguments_of(config_of(base))
    rows = expected(base)[0].shape[1]
    for case, key, config, outcome in cases_of(label):
        arguments = arguments_of(config)
        if arguments is None or (outcome == "f" and has_no_effect(label, key)):
            continue
        # Rows that are longer than the model reads are refused when it is called.
        if arguments.get("context_length", 0) >= rows and "gpt2" not in label:
            arguments["context_length"] = usual.get("context_length")
        yield case, config, outcome, None if arguments == usual else arguments


@pytest.mark.parametrize("label", FOUND["outcomes"])
def test_a_value_that_changes_nothing_here_changes_nothing_in_transformers(label):
    wrong = [case for case, _, outcome, other in read_cases(label) if not other and outcome != "s"]
    assert not wrong


@pytest.mark.full
@pytest.mark.parametrize("label", FOUND["outcomes"])
def test_a_value_that_changes_the_model_gives_the_logits_of_transformers(label, tmp_path):
    base = label.partition("/")[0]
    computed, wrong = {}, []
    for case, config, outcome, other in read_cases(label):
        if other is None:
            continue
        same = json.dumps(other, sort_keys=True)
        if same not in computed:
            computed[same] = try_folder(base, tmp_path / base / "folder", config)
        logits = computed[same]
        if logits is not None and (
            outcome == "f" or difference(logits, wanted_logits(case, outcome, base)) > TOLERANCE
        ):
            wrong.append(f"{case} ({outcome})")
    assert not wrong


def try_folder(base, folder, config):
    """The logits of a folder with this config.json; None if it is refused."""
    if not folder.exists():
        copy_folder(base, folder)
    (folder / "config.json").write_text(json.dumps(config))
    try:
        return compute(folder)
    except (UserError, ValueError):
        return None


def everyday(case):
    """Refusals take no time; of the others, some run every day."""
    refused = FOUND["odd"][case["name"]] == "f" or case["name"] in REFUSED
    some = ("the original context outside", "a file beside a stale index")
    return refused or case["name"] in some


REFUSED = {
    "gpt2, tied, with another head",
    "gemma3, tied, with another head",
    "qwen3, tied, with another head",
    "tied, and a head that was not",
    "llama3 factors in the wrong order",
    "llama3 factors that are equal",
    "mistral as Llama",
    "granite as Llama",
}
"""What transformers reads, and we do not: what is meant cannot be told, or is not supported."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(each, id=each["name"], marks=[] if everyday(each) else pytest.mark.full)
        for each in ODD
    ],
)
def test_odd_folders_are_read_as_transformers_does_or_refused(case, tmp_path):
    base = case["base"]
    folder = copy_folder(base, tmp_path / base / "folder")
    apply_case(folder, case)
    outcome = FOUND["odd"][case["name"]]
    try:
        logits = compute(folder)
    except UserError:
        assert outcome == "f" or case["name"] in REFUSED
        return
    assert outcome != "f", "transformers refuses the folder"
    assert case["name"] not in REFUSED
    wanted = wanted_logits(f"odd/{case['name']}", outcome, base)
    assert difference(logits, wanted) <= TOLERANCE


def apply_case(folder, case):
    """Change a folder as `tools/make_hf_cases.py` does."""
    config = dict(case.get("config", {}))
    if "text_config" in config:
        inner = json.loads((folder / "config.json").read_text())["text_config"]
        config["text_config"] = {**inner, **config["text_config"]}
    change_config(folder, **config)
    tensors = saved_tensors(folder)
    if not {"tensors", "stale"} & case.keys():
        return
    embedding = next(n for n in tensors if n.endswith(("wte.weight", "embed_tokens.weight")))
    table = tensors[embedding].astype(np.float32)
    if case.get("tensors") == "head":
        random = np.random.default_rng(1).normal(size=table.shape)
        tensors["lm_head.weight"] = random.astype(np.float32)
    elif case.get("tensors") == "same_head":
        tensors["lm_head.weight"] = table
    if "tensors" in case:
        rewrite(folder / "model.safetensors", tensors)
    if "stale" in case:
        name = "model-00001-of-00001.safetensors"
        rewrite(folder / name, {**tensors, embedding: table * 2})
        index = {"weight_map": dict.fromkeys(tensors, name)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def rewrite(file, tensors):
    shapes = {name: array.shape for name, array in tensors.items()}
    write_file(file, shapes, "float32", iter(tensors.values()))


@pytest.mark.parametrize("label", FOUND["outcomes"])
def test_every_key_of_a_config_class_is_in_a_table(label):
    tables = [{*each.keys, *each.outer, *each.aliases} for each in FAMILIES.values()]
    assert set(FOUND["outcomes"][label]) <= WITHOUT_EFFECT.union(NOT_SUPPORTED, *tables)


NOT_SUPPORTED = {
    *("attention_chunk_size", "layer_types", "mlp_layer_types", "first_k_dense_replace"),
    *("num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types", "mtp_per_layer_config"),
    *("classifier_dropout", "hidden_dropout", "fusion_config", "quantization_config"),
    *("auto_map", "transformers_weights", "distributed_config", "sub_configs"),
    *("base_model_pp_plan", "base_model_tp_plan", "_attn_was_changed"),
}
"""Keys that transformers reads for other models, or to run one, and that are refused.

New ones are noticed when the fixtures are made anew.
"""
