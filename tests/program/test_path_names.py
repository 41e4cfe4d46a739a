"""Parts of paths: different for different keys, and turned back into them."""

import pytest

from meshwright.program.jaxpr.names import key_of, path_text

pytestmark = pytest.mark.quick


def test_parts_of_paths_are_different_for_different_keys_and_give_them_back():
    keys = ["a.b", "a/b", "a b", "a_b", "%", "", "%2E", "ä", "*", "a\u00a0b"]
    parts = [path_text([key]) for key in keys]
    assert len(set(parts)) == len(keys)
    assert [key_of(part) for part in parts] == keys
