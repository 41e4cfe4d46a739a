"""What learning from rewards needs beside its step, in rehearsals."""

import json

import pytest

from meshwright.cli.main import main

WORDS = ("rehearse", "+experiment=grpo_quick", "hardware=8xA100-40GB", "mesh.data=8")


pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def memory(capfd, *words):
    assert main([*WORDS, *words, "--json"]) == 0
    return json.loads(capfd.readouterr().out)["memory"]


def test_the_reference_is_counted(capfd):
    found = memory(capfd, "grpo.beta=0.1")
    # As large as the parameters, a third of the state with AdamW.
    assert found["reference_bytes"] == pytest.approx(found["state_bytes"] / 3, rel=0.01)


def test_without_a_reference_nothing_is_counted_and_nothing_said(capfd):
    assert memory(capfd, "grpo.beta=0.0")["reference_bytes"] == 0
    said = "With what runs beside the step, as predicted: reference "
    for beta in (0.0, 0.1):
        assert main([*WORDS, f"grpo.beta={beta}"]) == 0
        assert (said in capfd.readouterr().out) == (beta > 0)
