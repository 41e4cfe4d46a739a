"""JSON that any program can read."""

import math

import pytest

from meshwright.text.json_text import finite, parse_json

pytestmark = pytest.mark.quick


def test_numbers_that_json_cannot_hold_become_null_at_any_depth():
    value = {"a": [1.5, math.nan, (math.inf, "x")], 2: {"b": -math.inf}, "c": True}
    assert finite(value) == {"a": [1.5, None, [None, "x"]], "2": {"b": None}, "c": True}


@pytest.mark.parametrize("content", ["", '{"a": ', b"\xff", "[" * 100_000])
def test_text_that_is_not_json_is_none(content):
    assert parse_json(content) is None


def test_json_is_parsed_from_text_and_bytes():
    assert parse_json('{"a": 1}') == parse_json(b'{"a": 1}') == {"a": 1}
