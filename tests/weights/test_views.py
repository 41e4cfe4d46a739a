"""Views: slices of arrays inside of tensors, against the whole array computed by NumPy."""

import itertools

import numpy as np
import pytest

from meshwright.weights.safetensors_format import Tensor, read_header, write_file
from meshwright.weights.views import MATRIX, TRANSPOSED, VECTOR, StackedView, View

CASES = {
    "vector": (VECTOR, (6,), {}, lambda t: t),
    "matrix": (MATRIX, (4, 6), {}, lambda t: t),
    "transposed": (TRANSPOSED, (4, 6), {}, lambda t: t.T),
    "second third of the columns": (
        View("d (3 e) -> d e", 1),
        (4, 12),
        {},
        lambda t: t[:, 4:8],
    ),
    "last third of a bias": (View("(3 e) -> e", 2), (12,), {}, lambda t: t[8:]),
    "fused heads": (
        View("d (k h c) -> d k h c"),
        (4, 24),
        {},
        lambda t: t.reshape(4, 3, 4, 2),
    ),
    "keys below queries": (
        StackedView("", 1, ("query", "key", "value")),
        (16, 6),
        {"query": 8, "key": 4, "value": 4},
        lambda t: t[8:12].T,
    ),
    "heads": (View("(h c) d -> d h c"), (8, 6), {}, lambda t: t.T.reshape(6, 4, 2)),
    "heads of the output": (View("d (h c) -> h c d"), (6, 8), {}, lambda t: t.T.reshape(4, 2, 6)),
    "position": (View("1 n d -> n d"), (1, 4, 6), {}, lambda t: t[0]),
    "patches": (
        View("d c y x -> (y x c) d"),
        (6, 3, 2, 2),
        {"y": 2, "x": 2},
        lambda t: t.transpose(2, 3, 1, 0).reshape(12, 6),
    ),
}


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    """A view, its tensor in a file, the array NumPy finds in it, and sizes of named dims."""
    view, shape, sizes, convert = CASES[request.param]
    tensor = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    write_file(tmp_path / "file", {"t": shape}, "float32", iter([tensor]))
    return view, read_header(tmp_path / "file")["t"], convert(tensor), sizes


def ranges_of(size):
    return [(0, size), (0, size // 2), (size // 2, size), (1, size - 1)]


def test_every_slice_is_read(case):
    view, stored, array, sizes = case
    for ranges in itertools.product(*map(ranges_of, array.shape)):
        wanted = array[tuple(slice(*each) for each in ranges)]
        np.testing.assert_array_equal(view.read(stored, ranges, array.shape, sizes), wanted)


def test_the_tensor_of_an_array_has_the_shape_of_the_file(case):
    view, stored, array, sizes = case
    assert view.tensor_shape(array.shape, sizes) == stored.shape


def test_an_array_is_put_back_where_it_was(case):
    view, stored, array, sizes = case
    whole = stored.read([(0, size) for size in stored.shape])
    rest = whole.copy()
    view.put(np.zeros_like(array), rest, sizes)
    assert (rest == 0).sum() >= array.size - 1
    view.put(array, rest, sizes)
    np.testing.assert_array_equal(rest, whole)


@pytest.mark.parametrize(
    ("name", "ranges", "most"),
    [
        ("transposed", [(0, 6), (1, 2)], 6),
        ("transposed", [(1, 2), (0, 4)], 4),
        ("second third of the columns", [(0, 4), (0, 2)], 8),
        ("fused heads", [(0, 4), (0, 1), (0, 4), (0, 2)], 32),
        ("heads", [(0, 6), (0, 1), (0, 2)], 12),
        ("heads of the output", [(1, 2), (0, 2), (0, 6)], 12),
    ],
)
def test_no_more_than_the_slice_is_asked_of_the_file(monkeypatch, tmp_path, name, ranges, most):
    view, shape, sizes, convert = CASES[name]
    tensor = np.zeros(shape, np.float32)
    write_file(tmp_path / "file", {"t": shape}, "float32", iter([tensor]))
    asked, read = [], Tensor.read
    monkeypatch.setattr(Tensor, "read", lambda self, at: asked.append(at) or read(self, at))
    view.read(read_header(tmp_path / "file")["t"], ranges, convert(tensor).shape, sizes)
    (region,) = asked
    assert np.prod([stop - start for start, stop in region]) == most
