"""Gemma 3, Llama 3 and Qwen 3 on meshes: equal to one device, and sending what they must."""

import json

import pytest
from quick import quick_module

from meshwright.cli.main import main

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")

MODELS = ("gemma3_tiny", "llama3_tiny", "qwen3_tiny")
MESHES = ("fsdp=4,tensor=2", "pipe=2,data=4")
SMALL = (
    "model.num_blocks=2", "model.vocab_size=64", "model.context_length=24", "model.hidden_size=32",
    "model.head_dim=8", "model.mlp_size=48", "sharding.min_shard_size=64", "data=synthetic",
)  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Run a command in an empty directory; return its JSON."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        code = main([*arguments, "--json", "simulate=8"])
        out, err = capfd.readouterr()
        assert code == 0, err
        return json.loads(out)

    return call


def check_ledger(ledger):
    for axis, own in ledger["axes"].items():
        assert own["ratio"] <= 1.05, (axis, own["excess"])


# A GPT sends what it must every day: tests/ledgers.
@pytest.mark.full
def test_a_small_decoder_sends_what_it_must(run):
    check_ledger(run("ledger", "model=gemma3_tiny", "mesh=fsdp=4,tensor=2", *SMALL))


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_tiny_decoders_train_like_on_one_device_and_send_what_they_must(run, model, mesh):
    sizes = (f"model={model}", f"mesh={mesh}", "data=synthetic")
    certificate = run("verify", *sizes)
    assert certificate["equal"]
    check_ledger(run("ledger", *sizes))
