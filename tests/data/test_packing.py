"""Packing: every token in its place, against a packer that goes token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.packing import pack, place
from meshwright.data.token_rows import PackedRows

pytestmark = pytest.mark.quick


def boundaries_of(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))]).astype(np.int64)


def packed_slowly(lengths: list[int], row_length: int) -> list[list[list[int]]]:
    """Return rows of pieces of flat token numbers, one document after the other."""
    rows: list[list[list[int]]] = []
    start = 0
    for length in lengths:
        document = list(range(start, start + length))
        start += length
        while document:
            piece = document[:row_length]
            # The last token of a piece is the first of the next, as long as something follows it.
            document = document[row_length - 1 :] if len(document) > row_length else []
            if not rows or sum(map(len, rows[-1])) + len(piece) > row_length:
                rows.append([])
            rows[-1].append(piece)
    return rows


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 23), min_size=1, max_size=40), st.integers(2, 9))
def test_rows_are_those_of_the_slow_packer(lengths, row_length):
    expected = packed_slowly(lengths, row_length)
    index = pack(boundaries_of(lengths), row_length)
    assert len(index) == len(expected)
    order = np.random.default_rng(0).permutation(len(expected))
    placed = place(index, order)
    rows = np.full((len(order), row_length), -1)
    segments, positions = np.zeros_like(rows), np.zeros_like(rows)
    for values, into in (
        (placed.sources, rows),
        (placed.segments, segments),
        (placed.positions, positions),
    ):
        into.reshape(-1)[placed.targets] = values
    for number, row, segment, position in zip(order, rows, segments, positions, strict=True):
        pieces = expected[number]
        flat = [token for piece in pieces for token in piece]
        assert row.tolist() == flat + [-1] * (row_length - len(flat))
        numbers = [n for n, piece in enumerate(pieces, start=1) for _ in piece]
        assert segment.tolist() == numbers + [0] * (row_length - len(flat))
        places = [place for piece in pieces for place in range(len(piece))]
        assert position.tolist() == places + [0] * (row_length - len(flat))


def predictions(rows: dict[str, np.ndarray]) -> list[tuple[int, int]]:
    """Return every (input, target) pair that counts in the loss."""
    tokens, segments = rows["tokens"], rows["segment_ids"]
    counts = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
    return list(zip(tokens[:, :-1][counts].tolist(), tokens[:, 1:][counts].tolist(), strict=True))


def test_every_token_but_a_documents_first_is_predicted_once_from_the_one_before_it():
    lengths = [5, 1, 12, 0, 31, 3, 9, 8, 100]
    boundaries = boundaries_of(lengths)
    source = PackedRows(np.arange(boundaries[-1]), boundaries, pack(boundaries, 9), "documents")
    rows = source.rows(np.arange(len(source)))
    expected = [(t - 1, t) for t in range(boundaries[-1]) if t not in boundaries.tolist()]
    assert sorted(predictions(rows)) == expected
    kept = rows["tokens"][rows["segment_ids"] != 0]
    assert set(kept.tolist()) == set(range(boundaries[-1]))


def test_millions_of_documents_are_packed_at_once():
    lengths = np.random.default_rng(0).geometric(1 / 300, 1_000_000)
    index = pack(boundaries_of(lengths.tolist()), 1025)
    assert index.lengths.sum() >= lengths.sum()
    assert 0.7 < index.fill <= 1
    rows = np.add.reduceat(index.lengths, index.first[:-1])
    assert rows.max() <= 1025
    # Next fit: no row could have taken the first piece of the next.
    assert (rows[:-1] + index.lengths[index.first[1:-1]]).min() > 1025


@pytest.mark.parametrize("ids", [[0], [1, 0], [1, 1]])
def test_rows_may_be_asked_for_in_any_order_and_twice(ids):
    boundaries = boundaries_of([4, 4, 4, 4])
    source = PackedRows(np.arange(16), boundaries, pack(boundaries, 8), "documents")
    whole = source.rows(np.arange(2))
    some = source.rows(np.array(ids))
    for name, values in some.items():
        np.testing.assert_array_equal(values, whole[name][ids])
        assert values.dtype == np.int32


def test_a_packed_source_tells_how_full_its_rows_are():
    boundaries = boundaries_of([6, 6])
    source = PackedRows(np.arange(12), boundaries, pack(boundaries, 8), "notes")
    assert source.describe() == "notes: 2 documents of 12 tokens in 2 rows of 7, 75% full"
