"""Drawn digits: always the same, every class alike, and a simple model tells them apart."""

import numpy as np
import pytest

from meshwright.data.digits import DigitSource
from meshwright.errors import UserError

pytestmark = pytest.mark.quick


def test_a_sample_is_the_same_whatever_it_is_asked_for_with():
    source = DigitSource()
    together = source.rows(np.arange(50))
    for number in (0, 31):
        alone = source.rows(np.array([number]))
        np.testing.assert_array_equal(alone["image"][0], together["image"][number])
        assert alone["label"][0] == together["label"][number]
    assert len(np.unique(together["image"].reshape(50, -1), axis=0)) == 50


def test_pictures_are_bright_strokes_on_dark_ground_of_ten_classes():
    rows = DigitSource().rows(np.arange(5000))
    assert rows["image"].shape == (5000, 28, 28, 1)
    assert (rows["image"].dtype, rows["label"].dtype) == (np.float32, np.int32)
    assert 0 <= rows["image"].min() < 0.1
    assert 0.9 < rows["image"].max() <= 1
    assert 0.05 < (rows["image"] > 0.5).mean() < 0.25
    counts = np.bincount(rows["label"], minlength=10)
    np.testing.assert_allclose(counts, 500, atol=5 * np.sqrt(450))


def test_nearest_neighbours_recognise_most_digits():
    source = DigitSource(input_shape=(784,), input_name="x")
    known, asked = source.rows(np.arange(3000)), source.rows(np.arange(10_000, 10_200))
    distances = (known["x"] ** 2).sum(1) - 2 * asked["x"] @ known["x"].T
    found = known["label"][distances.argmin(axis=1)]
    accuracy = (found == asked["label"]).mean()
    assert accuracy > 0.9
    # There is something to learn: the mean picture of each class does not do.
    means = np.stack([known["x"][known["label"] == digit].mean(axis=0) for digit in range(10)])
    nearest = ((means**2).sum(1) - 2 * asked["x"] @ means.T).argmin(axis=1)
    assert (nearest == asked["label"]).mean() < 0.9


def test_shapes_of_other_sizes_are_refused():
    with pytest.raises(UserError, match=r"task\.input_shape=\[32,32,3\]"):
        DigitSource(input_shape=(32, 32, 3))
    with pytest.raises(UserError, match="the dataset is empty"):
        DigitSource(num_samples=0)
