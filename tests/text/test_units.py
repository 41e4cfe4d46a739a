"""Numbers with units."""

import pytest

from meshwright.text.units import a_type, counted, numbered

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("count", "words", "text"),
    [
        (1, ("device",), "1 device"),
        (0, ("device",), "0 devices"),
        (2, ("copy", "copies"), "2 copies"),
        (1, ("copy", "copies"), "1 copy"),
    ],
)
def test_a_count_and_its_noun(count, words, text):
    assert counted(count, *words) == text


def test_types_have_their_article():
    assert [a_type(value) for value in (1, "x", [], None, b"")] == [
        "an int",
        "a str",
        "a list",
        "a NoneType",
        "a bytes",
    ]


def test_nouns_have_their_numbers_and_a_long_list_is_cut():
    assert numbered("process", [3]) == "process 3"
    assert numbered("process", [0, 2]) == "processes 0, 2"
    assert numbered("machine", range(9), most=2) == "machines 0, 1, …"
