"""Row 32: killed fine-tunings: packed conversations, mixtures with other weights, adapters."""

import json

import pytest
from faults.conftest import Undisturbed
from faults.harness import STEPS, events, launch, metrics

pytestmark = [pytest.mark.full, pytest.mark.faults]

DECODER = """
import jax.numpy as jnp

class Decoder(nnx.Module):
    "A decoder that takes no segment_ids, with dropout."

    def __init__(self, *, rngs):
        self.embed = nnx.Embed(256, 12, rngs=rngs)
        self.places = nnx.Embed(64, 12, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 12, decode=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(12, 256, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.places(jnp.arange(tokens.shape[1]))
        x = x + self.attention(x, mask=nnx.make_causal_mask(tokens))
        return self.head(self.dropout(x))
"""
COMMON = (
    *("model.kind=own:Decoder", "task.kind=language_modeling", "task.context_length=64"),
    *("data.sequence_length=64", "data.cache_dir=cache", "data.eval_fraction=0"),
)
CHAT = (*COMMON, "data.kind=chat", "data.path=adds.jsonl")
LORA = (*CHAT, "lora.rank=2", "lora.dropout=0.1")
SOURCES = "{adds:{kind:chat,path:adds.jsonl},tells:{kind:chat,path:tells.jsonl}}"
MIXTURE = (*COMMON, "data.kind=mixture", f"data.sources={SOURCES}")
WEIGHTS = ("data.weights={adds:0.7,tells:0.3}", "data.weights={adds:0.2,tells:0.8}")


def write(folder):
    """Write conversations of several lengths."""
    for name, text in (("adds", "{a} + {b} ="), ("tells", "what follows {a}, {b}?")):
        pairs = [(a, b) for a in range(12) for b in range(12)]
        lines = [
            {"prompt": text.format(a=a, b=b), "completion": f" {a + b}" * (1 + b % 3)}
            for a, b in pairs
        ]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    return folder


def finish(folder, *flags, words, **more):
    done = launch(folder, *flags, own=DECODER, words=words, **more).finish()
    assert done.code == 0, done.err
    return done


def in_folder(tmp_path, name):
    (tmp_path / name).mkdir()
    return write(tmp_path / name)


@pytest.mark.parametrize(("words", "nprocs"), [(CHAT, 2), (CHAT, 1), (LORA, 2)])
def test_a_killed_fine_tuning_is_bit_equal(tmp_path, words, nprocs):
    whole = finish(in_folder(tmp_path, "whole"), words=words, nprocs=nprocs)
    assert "conversations have a row each" not in whole.err
    killed = finish(
        in_folder(tmp_path, "killed"), "--restarts=3", words=words, nprocs=nprocs,
        fault="sigkill" if nprocs > 1 else "sigkill-first", at=8,
    )  # fmt: skip
    assert "continuing after step 6" in killed.err
    Undisturbed(whole.run, metrics(whole.run)).check_same(killed)


@pytest.mark.parametrize("nprocs", [1, 2])
def test_a_mixture_killed_after_its_weights_have_changed_is_bit_equal(tmp_path, nprocs):
    folders = [in_folder(tmp_path, name) for name in ("whole", "killed")]
    for folder in folders:
        finish(folder, words=(*MIXTURE, WEIGHTS[0]), nprocs=nprocs, steps=5)
    now = (*MIXTURE, WEIGHTS[1], "checkpoint.accept_changes=true")
    whole = finish(folders[0], words=now, nprocs=nprocs)
    fault = "sigkill" if nprocs > 1 else "sigkill-first"
    killed = finish(folders[1], "--restarts=3", words=now, nprocs=nprocs, fault=fault, at=8)
    assert [e for e in events(killed.run) if "attempt 2" in json.dumps(e)]
    assert sorted(metrics(whole.run)) == list(range(1, STEPS + 1))
    Undisturbed(whole.run, metrics(whole.run)).check_same(killed)
