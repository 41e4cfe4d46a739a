"""Rows of tokens: what NumPy cuts from the same arrays, and documents told apart."""

import numpy as np
import pytest

from meshwright.data.token_rows import StreamRows, documents_of
from meshwright.errors import UserError

pytestmark = pytest.mark.quick


def test_rows_are_consecutive_and_share_a_token():
    source = StreamRows([np.arange(100, 126)], 5, "numbers")
    rows = source.rows(np.arange(len(source)))["tokens"]
    np.testing.assert_array_equal(rows, 100 + 5 * np.arange(5)[:, None] + np.arange(6))
    assert rows.dtype == np.int32


def test_no_row_goes_from_one_array_into_the_next():
    arrays = [np.arange(12), np.arange(100, 103), np.arange(200, 211)]
    source = StreamRows(arrays, 5, "numbers")
    rows = source.rows(np.array([3, 0, 1, 2]))["tokens"]
    np.testing.assert_array_equal(rows[:, 0], [205, 0, 5, 200])
    assert all((np.diff(row) == 1).all() for row in rows)


def test_tokens_the_model_does_not_know_are_named():
    tokens = np.array([1, 2, 3, 70, 5, 6, -1, 8, 9])
    source = StreamRows([tokens], 4, "mine", vocab_size=50)
    with pytest.raises(UserError, match="mine has the token 70,") as caught:
        source.rows(np.array([0]))
    assert caught.value.why == "tokens are from 0 to 49"
    assert "model.vocab_size=71" in caught.value.fix
    with pytest.raises(UserError, match="mine has the token -1,"):
        source.rows(np.array([1]))


@pytest.mark.parametrize("size", [0, 1, 8])
def test_data_shorter_than_a_row_are_refused(size):
    with pytest.raises(UserError, match=r"mine is (too short|empty)") as caught:
        StreamRows([np.arange(size)], 8, "mine")
    assert caught.value.why == f"it has {size} tokens and one row takes 9"


def test_a_separator_ends_documents():
    tokens = np.array([[5, 6, 0, 7, 0, 0, 8, 9], [0, 1, 2, 3, 4, 5, 6, 0]])
    found = documents_of(tokens, separator=0)
    expected = [[1, 1, 1, 2, 2, 3, 4, 4], [1, 2, 2, 2, 2, 2, 2, 2]]
    np.testing.assert_array_equal(found["segment_ids"], expected)
    expected = [[0, 1, 2, 0, 1, 0, 0, 1], [0, 0, 1, 2, 3, 4, 5, 6]]
    np.testing.assert_array_equal(found["positions"], expected)
    source = StreamRows([tokens.reshape(-1)], 7, "mine", separator=0)
    assert set(source.rows(np.array([0]))) == {"tokens", "segment_ids", "positions"}


def test_fingerprints_follow_content_and_cut():
    def fingerprint(array, length=4, separator=None):
        return StreamRows([array], length, "mine", separator=separator).fingerprint()

    base = np.arange(50)
    changed = base.copy()
    changed[25] = 0
    prints = {
        fingerprint(base),
        fingerprint(changed),
        fingerprint(base, 5),
        fingerprint(base, 4, 0),
        fingerprint(base.astype(np.uint8)),
    }
    assert len(prints) == 5
    assert fingerprint(base) == fingerprint(base.copy())
