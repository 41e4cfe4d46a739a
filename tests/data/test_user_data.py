"""What users hand over for training: arrays, sources, functions, lists and iterables."""

import numpy as np
import pytest

from meshwright.data.arrays import ArraySource
from meshwright.data.batches import read_batch
from meshwright.data.user_data import IterableData, as_data
from meshwright.errors import UserError

pytestmark = pytest.mark.quick


def batch(step: int, size: int = 4) -> dict[str, np.ndarray]:
    return {"x": step * 100 + np.arange(size)}


class Rows:
    def __len__(self):
        return 10

    def rows(self, ids):
        return {"x": ids}


class OldData:
    def batch(self, step, batch_size):
        return batch(step, batch_size)


EXACT = {
    "dict": lambda: {"x": np.arange(40), "y": np.ones((40, 2))},
    "source": Rows,
    "array source": lambda: ArraySource(x=np.arange(40)),
    "object": OldData,
    "function": lambda: lambda step, batch_size: batch(step, batch_size),
    "by position": lambda: lambda s, n: batch(s, n),
    "seeded": lambda: lambda seed, step, batch_size: batch(step + seed, batch_size),
    "seeded by position": lambda: lambda a, b, c: batch(a + b, c),
    "list": lambda: [batch(step) for step in range(9)],
}


@pytest.mark.parametrize("kind", EXACT)
def test_batches_are_a_function_of_the_step_and_come_row_by_row(kind):
    data = as_data(EXACT[kind](), seed=3, num_processes=8)
    for step in (5, 0, 5):
        whole = data.batch(step, 4)["x"]
        parts = [data.batch(step, 4, np.array([row]))["x"] for row in range(4)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert data.batch(5, 4)["x"].tolist() != data.batch(0, 4)["x"].tolist()
    assert data.describe()
    assert data.fingerprint() == as_data(EXACT[kind](), seed=4, num_processes=8).fingerprint()


@pytest.mark.parametrize("kind", EXACT)
def test_data_by_step_need_no_position_to_resume(kind):
    data = as_data(EXACT[kind](), num_processes=8)
    whole = data.batch(5, 4)["x"]
    data.go_to(5, {"epoch": 1})
    np.testing.assert_array_equal(data.batch(5, 4)["x"], whole)
    assert data.position(5) is None
    assert (data.order, data.forward_only, data.stop_after(2.5)) == ("", False, False)
    assert data.first_batch(4)["x"].shape == whole.shape


def test_functions_get_the_seed_where_they_take_one():
    for kind in ("seeded", "seeded by position"):
        np.testing.assert_array_equal(as_data(EXACT[kind](), 3).batch(5, 4)["x"], batch(8)["x"])


def test_arrays_are_shuffled_by_the_seed_and_stay_together():
    arrays = {"x": np.arange(20), "y": 10 * np.arange(20)}
    first, other = (as_data(arrays, seed) for seed in (0, 1))
    assert first.num_samples == 20
    got = first.batch(0, 20)
    assert sorted(got["x"]) == list(range(20))
    np.testing.assert_array_equal(got["y"], 10 * got["x"])
    assert not np.array_equal(got["x"], other.batch(0, 20)["x"])


def test_fingerprints_follow_the_content():
    prints = {
        as_data({"x": np.arange(20)}).fingerprint(),
        as_data({"y": np.arange(20)}).fingerprint(),
        as_data({"x": np.arange(21)}).fingerprint(),
        as_data({"x": np.arange(20.0)}).fingerprint(),
        as_data({"x": np.arange(20)[::-1]}).fingerprint(),
    }
    assert len(prints) == 5


@pytest.mark.parametrize("again", [True, False])
def test_an_iterable_goes_on_and_passes_over_what_a_resumed_run_has_seen(again):
    class Again:
        def __iter__(self):
            return iter([batch(step) for step in range(6)])

    data = as_data(Again() if again else iter(Again()))
    assert isinstance(data, IterableData)
    for step in (0, 0, 1, 4, 4):
        np.testing.assert_array_equal(data.batch(step, 4)["x"], batch(step)["x"])
    if again:
        np.testing.assert_array_equal(data.batch(1, 4)["x"], batch(1)["x"])
    else:
        with pytest.raises(UserError, match="batch 1 of the iterable is gone"):
            data.batch(1, 4)


def test_an_iterable_says_what_it_cannot_promise_and_feeds_one_process_only():
    assert "its order is its own" in as_data(iter([batch(0)])).describe()
    with pytest.raises(UserError, match="cannot feed 2 processes") as caught:
        as_data(iter([batch(0)]), num_processes=2)
    assert "(seed, step, batch_size)" in caught.value.fix


def test_a_part_of_a_batch_of_another_size_is_refused():
    data = as_data([batch(0), batch(1, size=3)])
    with pytest.raises(UserError, match="batch 1 has 3 samples") as caught:
        data.batch(1, 4, np.array([2]))
    assert caught.value.why == "the global batch has 4"


def test_batches_need_not_be_dicts():
    x, y = np.arange(4), np.arange(8).reshape(4, 2)
    data = as_data([(x, {"y": y}), x])
    got = data.batch(0, 4, np.array([1, 3]))
    np.testing.assert_array_equal(got[0], x[[1, 3]])
    np.testing.assert_array_equal(got[1]["y"], y[[1, 3]])
    np.testing.assert_array_equal(data.batch(1, 4, np.array([2])), [2])


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (np.arange(4), "the data are a single ndarray"),
        ("corpus.txt", "the data are a single str"),
        (7, "the data are of type int, which provides no batches"),
        ({}, "there are no arrays"),
        ({"x": np.zeros((0, 3))}, "the dataset has no samples"),
        (
            {"x": np.zeros(3), "y": np.zeros(4)},
            "the arrays of the dataset have different numbers of samples",
        ),
        ({"x": np.array(["a", "b"])}, "`x` is not an array of samples"),
        (lambda step: {}, "the function <lambda> cannot be asked for a batch"),
    ],
)
def test_what_gives_no_batches_is_named(given, what):
    with pytest.raises(UserError) as caught:
        as_data(given)
    assert caught.value.what == what


def test_a_function_may_have_defaults_beside_the_step_and_the_batch_size():
    def batches(step, batch_size=16, length=3):
        return {"x": np.full((batch_size, length), step)}

    assert as_data(batches).batch(2, 4)["x"].tolist() == [[2] * 3] * 4

    def other(step, rows=16, length=3):
        raise AssertionError

    with pytest.raises(UserError) as caught:
        as_data(other)
    assert "(step, rows=16, length=3)" in str(caught.value)
    assert "(step, batch_size)" in caught.value.fix


def test_what_makes_batches_is_no_batch():
    for made in (lambda step: {}, iter([{}])):
        with pytest.raises(UserError) as caught:
            read_batch(made)
        assert caught.value.fix == "pass one batch: what the function returns, or `next(batches)`"
