"""JSON that any program can read."""

import math

import pytest

from meshwright.text.json_text import finite, flatten, parse_json, read_object, write_atomically

pytestmark = pytest.mark.quick


def test_numbers_that_json_cannot_hold_become_null_at_any_depth():
    value = {"a": [1.5, math.nan, (math.inf, "x")], 2: {"b": -math.inf}, "c": True}
    assert finite(value) == {"a": [1.5, None, [None, "x"]], "2": {"b": None}, "c": True}


@pytest.mark.parametrize("content", ["", '{"a": ', b"\xff", "[" * 100_000])
def test_text_that_is_not_json_is_none(content):
    assert parse_json(content) is None


def test_json_is_parsed_from_text_and_bytes():
    assert parse_json('{"a": 1}') == parse_json(b'{"a": 1}') == {"a": 1}


def test_flatten_keeps_empty_mappings_and_lists_as_values():
    assert list(flatten({"a": {"b": 1, "c": {}}, "d": [1]})) == [
        ("a.b", 1),
        ("a.c", {}),
        ("d", [1]),
    ]


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path):
    file = tmp_path / "a.json"
    write_atomically(file, '{"a": 1}')
    write_atomically(file, '{"a": 2}')
    assert read_object(file) == {"a": 2}
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_without_an_object_is_empty(tmp_path):
    (tmp_path / "list.json").write_text("[1]")
    assert read_object(tmp_path / "list.json") == read_object(tmp_path / "none.json") == {}
