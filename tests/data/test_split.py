"""Held-out samples: none of them trained on, none of the others lost, whatever the seed."""

import numpy as np
import pytest

from meshwright.data.indexed_data import SourceData
from meshwright.data.order import split_source

pytestmark = pytest.mark.quick


class Numbers:
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def rows(self, ids):
        assert ids.min(initial=0) >= 0
        assert ids.max(initial=0) < self.count
        return {"id": ids}


def all_of(source) -> list[int]:
    return source.rows(np.arange(len(source)))["id"].tolist()


@pytest.mark.parametrize("count", [2, 3, 10, 50, 99, 100, 101, 1234])
@pytest.mark.parametrize("fraction", [0.5, 0.1, 0.02])
def test_the_parts_are_disjoint_and_together_everything(count, fraction):
    train, held_out = split_source(Numbers(count), fraction)
    assert held_out is not None
    assert sorted(all_of(train) + all_of(held_out)) == list(range(count))
    assert len(held_out) == max(int(count * fraction), 1)


def test_what_is_held_out_does_not_follow_the_cycles_of_the_data():
    _, held_out = split_source(Numbers(100_000), 0.02)
    per_class = np.bincount(np.array(all_of(held_out)) % 10, minlength=10)
    assert per_class.sum() == 2000
    np.testing.assert_allclose(per_class, 200, atol=5 * np.sqrt(200))


def test_nothing_is_held_out_of_one_sample_or_by_a_fraction_of_zero():
    for source, fraction in ((Numbers(1), 0.5), (Numbers(100), 0.0)):
        train, held_out = split_source(source, fraction)
        assert train is source
        assert held_out is None


def test_seeds_do_not_move_samples_to_the_other_part():
    train, _ = split_source(Numbers(100), 0.1)
    seen = [
        set(np.concatenate([SourceData(train, seed).batch(s, 9)["id"] for s in range(10)]).tolist())
        for seed in (0, 1)
    ]
    assert seen[0] == seen[1] == set(all_of(train))


def test_the_parts_have_fingerprints_and_lines_of_their_own():
    train, held_out = split_source(Numbers(100), 0.1)
    assert train.fingerprint() != held_out.fingerprint()
    assert held_out.describe() == "Numbers; 10 samples held out"
