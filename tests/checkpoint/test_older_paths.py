"""Checkpoints of earlier versions wrote keys with special characters in another way."""

import pytest

from meshwright.checkpoint.array_paths import as_named_now, names_on_disk
from meshwright.program.jaxpr.names import key_of, path_text

pytestmark = pytest.mark.quick


def test_names_of_earlier_versions_are_found_if_one_path_can_be_meant():
    paths = ["plain.kernel", "a%2Eb.kernel", "c%2Fd.kernel"]
    saved = {"plain.kernel": 1, "a.b.kernel": 2, "c_d.kernel": 3, "other": 4}
    assert as_named_now(saved, paths) == {**dict(zip(paths, (1, 2, 3), strict=True)), "other": 4}


def test_names_that_two_paths_shared_are_not_taken_for_either():
    paths = ["a%2Eb", "a.b", "c%2Fd", "c%20d"]
    assert names_on_disk(paths, {"a.b", "c_d"}) == {path: path for path in paths}


def test_parts_of_paths_are_different_for_different_keys_and_give_them_back():
    keys = ["a.b", "a/b", "a b", "a_b", "%", "", "%2E", "ä", "*", "a\u00a0b"]
    parts = [path_text([key]) for key in keys]
    assert len(set(parts)) == len(keys)
    assert [key_of(part) for part in parts] == keys
