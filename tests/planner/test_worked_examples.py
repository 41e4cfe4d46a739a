"""Plans of well-known models on well-known clusters, from their traced programs."""

import json
import math

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


def test_a_vit_of_1b_parameters_fits_without_dividing_layers(best):
    argv = ("model=vit_1b", "hardware=8xA100-40GB", "training.global_batch_size=256")
    found = best(*argv)
    assert set(found["mesh"]) <= {"data", "fsdp"}
    assert found["memory"]["total"] <= 0.9 * found["memory"]["capacity"]


def test_gpt_3_on_1024_devices_divides_layers_inside_of_nodes(best):
    model = (
        "model=gpt2",
        "model.num_blocks=96",
        "model.hidden_size=12288",
        "model.num_heads=96",
        "model.context_length=2048",
        "model.dropout=0",
    )
    found = best(*model, "hardware=128x8xA100-80GB", "training.global_batch_size=1536")
    mesh = found["mesh"]
    # 16 bytes for each of 175 billion parameters do not fit on fewer than 44 devices.
    assert math.prod(mesh.get(axis, 1) for axis in ("fsdp", "tensor", "pipe")) >= 44
    assert mesh.get("tensor", 1) <= 8
    assert math.prod(mesh.values()) == 1024
    assert found["memory"]["total"] <= 0.9 * found["memory"]["capacity"]
    # Published runs of this size on such devices reach 40 to 57%.
    assert 0.3 <= found["mfu"] <= 0.65
