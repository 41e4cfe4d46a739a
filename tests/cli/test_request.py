"""What of a command line describes the model that it is about, and what has no effect."""

import pytest

from meshwright.cli.main import main
from meshwright.cli.request import describing, setting_group


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("model=gpt2", "model"),
        ("model.widths=[4,8]", "model"),
        ("+data.rows=4", "data"),
        ("task@here=x", "task"),
        ("mesh.data=8", "mesh"),
    ],
)
def test_a_setting_belongs_to_the_group_it_begins_with(text, group):
    assert setting_group(text) == group


def test_secrets_do_not_describe_a_model():
    words = ["model=gpt2", "data.path=/data", "data.api_key=abc", "mesh.data=8", "hardware=8xH100"]
    assert describing(words) == ["model=gpt2", "data.path=/data"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["training.steps=2"], "training.steps=2 only shapes the learning rate here; "),
        (["training.max_duration=3st"], "training.max_duration=3st only shapes the learning rate "),
        ([], ""),
    ],
)
def test_a_duration_is_not_how_many_steps_are_compared(words, said, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    argv = ["model=mlp", "model.widths=[784,8,10]", "data=synthetic", "--steps", "1", *words]
    assert main(["verify", *argv]) == 0
    err = capfd.readouterr().err
    assert said in err
    assert ("--steps N says" in err) == bool(words)


def test_hardware_has_no_effect_where_the_devices_present_are_used(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["inspect", "model=mlp", "data=synthetic", "hardware=8xH100"]) == 0
    assert "remark: hardware=8xH100 has no effect here" in capfd.readouterr().out
