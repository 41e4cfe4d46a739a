"""PEFT's folders: what peft wrote is read, computes the same, and is written again."""

import json
import shutil

import jax
import numpy as np
import pytest
from hf_folders import HF
from quick import quick_module

import meshwright as mw
from meshwright.program.trace.adapters import Adapter, Split, merge_adapters
from meshwright.program.trace.build_model import describe_model
from meshwright.weights.peft_folder import other_base, read_peft, write_peft

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")

PEFT = HF.parent / "peft" / "llama"
LAYERS = ("attention.query", "attention.value", "mlp.down")
SHAPES = {
    leaf.path: leaf.shape for leaf in describe_model(mw.hf_model(HF / "llama")).leaves if leaf.shape
}


def adapter(path, shape=None, rank=2, **kinds):
    """A linear layer's adapter."""
    split = Split(frozenset({0}), frozenset({1}))
    return Adapter(path, tuple(shape or SHAPES[path]), split, rank, 1.0, **kinds)


ADAPTERS = [adapter(f"blocks.{n}.{layer}.kernel") for n in range(3) for layer in LAYERS]


def test_adapters_of_peft_are_read_and_compute_the_same():
    saved, model = np.load(PEFT / "expected.npz"), mw.load_model(HF / "llama")
    leaves = describe_model(lambda rngs: model)
    values = dict(zip((leaf.path for leaf in leaves.leaves), leaves.values(model), strict=True))
    factors = read_peft(PEFT, "llama3", ADAPTERS)
    dtypes = {leaf.path: leaf.dtype for leaf in leaves.leaves}

    def of_tokens(values, factors):
        merged = merge_adapters(ADAPTERS, {**values, **factors}, dtypes)
        return leaves.merge([merged[path] for path in values])(saved["input_ids"])

    logits = jax.jit(of_tokens)(values, factors)
    np.testing.assert_allclose(logits, saved["logits"], atol=1e-5)


def test_a_folder_that_was_read_is_written_alike(tmp_path):
    factors = read_peft(PEFT, "llama3", ADAPTERS)
    write_peft(tmp_path, "llama3", ADAPTERS, factors, base="llama", shapes=SHAPES)
    again = read_peft(tmp_path, "llama3", ADAPTERS)
    assert set(again) == set(factors)
    for path, factor in factors.items():
        np.testing.assert_array_equal(again[path], factor)
    theirs, ours = (json.loads((f / "adapter_config.json").read_text()) for f in (PEFT, tmp_path))
    assert set(ours["target_modules"]) == set(theirs["target_modules"])
    assert set(ours) <= set(theirs)


@pytest.mark.parametrize(
    ("adapters", "message"),
    [
        (
            [adapter(ADAPTERS[0].path, (24, 16))],
            r"another base\n.*\[2, 16\] there, and \[2, 24\]",
        ),
        ([adapter(ADAPTERS[0].path, rank=3)], r"have rank 2, and those of the run 3\nwrite lora"),
        (ADAPTERS[:3], "for which the run has no adapter"),
        ([adapter("norm.scale", (16, 16))], "has no name in PEFT\n.*a part of `model.norm.weight`"),
        ([adapter("tokens.embedding", tied=True)], "has no name in PEFT\n.*or also the head"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(adapters, message):
    with pytest.raises(mw.UserError, match=message):
        read_peft(PEFT, "llama3", adapters)


def test_other_kinds_of_adapters_are_refused(tmp_path):
    folder = shutil.copytree(PEFT, tmp_path / "dora")
    config = json.loads((PEFT / "adapter_config.json").read_text()) | {"use_dora": True}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(mw.UserError, match=r"not supported\n.*use_dora=True"):
        read_peft(folder, "llama3", ADAPTERS)
    with pytest.raises(mw.UserError, match=r"is not a PEFT folder\n(.*\n)*.*export RUN --to peft"):
        read_peft(HF / "llama", "llama3", ADAPTERS)


def test_adapters_of_another_base_are_told(tmp_path):
    assert not other_base(PEFT, HF / "llama")
    assert not other_base(PEFT, tmp_path / "models--llama" / "snapshots" / "0a1b")
    assert not other_base(PEFT, None)
    assert "trained on llama, and the run's base is" in other_base(PEFT, HF / "mistral")


def test_a_folder_of_adapters_is_no_model():
    with pytest.raises(mw.UserError, match=r"is a PEFT folder\n(.*\n)*.*init_from"):
        mw.load_model(PEFT)


def test_a_single_pattern_is_one_target():
    assert mw.LoRA(rank=2, targets="up.**").targets == ("up.**",)
    config = json.loads((PEFT / "adapter_config.json").read_text())
    assert mw.LoRA(init_from=str(PEFT)).rank == config["r"]
    with pytest.raises(mw.UserError, match=r"here has no adapter_config\.json"):
        mw.LoRA(init_from="here")
