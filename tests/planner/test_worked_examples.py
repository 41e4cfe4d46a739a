"""Plans of well-known models on well-known clusters, from their traced programs."""

import json

import pytest

from meshwright.cli.main import main

pytestmark = pytest.mark.full


@pytest.fixture
def best(capfd):
    """Plan through the command line, and return the recommended plan."""

    def call(*argv: str) -> dict:
        assert main(["plan", *argv, "precision=bf16", "--json", "--top", "3"]) == 0
        return json.loads(capfd.readouterr().out)["plans"][0]

    return call


def test_resnet_50_is_data_parallel(best):
    argv = ("model=resnet50", "hardware=8xA100-40GB", "training.global_batch_size=512")
    assert best(*argv)["mesh"] == {"data": 8}


def test_gpt_2_medium_needs_no_tensor_axis(best):
    argv = ("model=gpt2_medium", "hardware=8xA100-40GB", "training.global_batch_size=64")
    assert set(best(*argv)["mesh"]) <= {"data", "fsdp"}
