"""YAML that would never end is refused."""

import pytest

from meshwright.text.yaml_text import read_yaml

pytestmark = pytest.mark.quick

BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "with its aliases"),
        ("a: &a [*a]", "inside of what it stands for"),
        ("a: &a\n  b: *a", "inside of what it stands for"),
        ("a: " + "[" * 80 + "]" * 80, "nested more than 64 levels"),
        ("[" * 20_000 + "]" * 20_000, "nested more than 64 levels"),
    ],
)
def test_what_does_not_end_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        read_yaml(text)


def test_aliases_that_end_are_read():
    assert read_yaml("a: &a [1, 2]\nb: *a\nc: {d: *a}") == {
        "a": [1, 2],
        "b": [1, 2],
        "c": {"d": [1, 2]},
    }
