"""What of a command line describes the model that it is about."""

import pytest

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
