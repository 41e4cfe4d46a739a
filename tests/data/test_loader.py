"""Reading ahead: the same batches in the same order, errors as they are, nothing left behind."""

import multiprocessing
import threading
import time

import numpy as np
import pytest

from meshwright.data.indexed_data import SourceData
from meshwright.data.loader import load_batches
from meshwright.data.token_rows import StreamRows
from meshwright.data.user_data import as_data
from meshwright.errors import UserError

pytestmark = pytest.mark.quick

ROWS = np.array([1, 4, 5])


def numbers() -> SourceData:
    tokens = np.random.default_rng(0).integers(0, 200, 4001).astype(np.uint16)
    return SourceData(StreamRows([tokens], 20, "numbers", vocab_size=200), seed=1)


def broken() -> SourceData:
    tokens = np.arange(4001, dtype=np.uint16) % 200
    tokens[2030] = 999
    return SourceData(StreamRows([tokens], 20, "broken", vocab_size=200), seed=1, shuffle=False)


def reading_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if "grain-prefetch" in t.name]


def wait_until(condition) -> None:
    """Wait for what happens soon; a minute means never."""
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_batches_come_in_the_order_of_the_steps(prefetch):
    data = numbers()
    with load_batches(
        data, batch_size=6, start=30, stop=45, rows=ROWS, prefetch=prefetch
    ) as stream:
        got = [batch["tokens"] for batch in stream]
    assert len(got) == 15
    for step, tokens in enumerate(got, start=30):
        np.testing.assert_array_equal(tokens, data.batch(step, 6)["tokens"][ROWS])


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_wrong_with_the_data_arrives_as_the_same_error(workers):
    data = broken()
    stream = load_batches(data, batch_size=10, start=7, rows=ROWS, workers=workers)
    for step in (7, 8, 9):
        expected = data.batch(step, 10)["tokens"][ROWS]
        np.testing.assert_array_equal(next(stream)["tokens"], expected)
    with pytest.raises(UserError) as caught:
        next(stream)
    assert caught.value.what == "broken has the token 999, which the model does not know"
    assert caught.value.why == "tokens are from 0 to 199"
    assert "train a new model with model.vocab_size=1000 or more" in caught.value.fix
    assert next(stream, None) is None
    wait_until(lambda: not multiprocessing.active_children())
    assert not multiprocessing.active_children()


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 3])
def test_processes_read_the_same_and_end_with_the_stream(workers):
    data = numbers()
    stream = load_batches(data, batch_size=6, start=30, rows=ROWS, workers=workers)
    for step in range(30, 40):
        expected = data.batch(step, 6)["tokens"][ROWS]
        np.testing.assert_array_equal(next(stream)["tokens"], expected)
    assert len(multiprocessing.active_children()) >= workers
    stream.close()
    wait_until(lambda: not multiprocessing.active_children())
    assert not multiprocessing.active_children()


def test_a_closed_stream_leaves_no_thread_and_gives_nothing_more():
    wait_until(lambda: not reading_threads())
    stream = load_batches(numbers(), batch_size=6, prefetch=4)
    next(stream)
    assert reading_threads()
    stream.close()
    stream.close()
    wait_until(lambda: not reading_threads())
    assert not reading_threads()
    assert next(stream, None) is None


def test_a_forgotten_stream_leaves_no_thread():
    stream = load_batches(numbers(), batch_size=6, prefetch=4)
    next(stream)
    del stream
    wait_until(lambda: not reading_threads())
    assert not reading_threads()


def test_reading_begins_before_the_first_batch_is_asked_for():
    read = threading.Event()

    def function(step, batch_size):
        read.set()
        return {"x": np.zeros(batch_size)}

    with load_batches(as_data(function), batch_size=2):
        assert read.wait(60)


def test_no_more_is_read_ahead_than_asked_for():
    steps: list[int] = []

    def function(step, batch_size):
        steps.append(step)
        return {"x": np.zeros(batch_size)}

    with load_batches(as_data(function), batch_size=2, prefetch=3) as stream:
        next(stream)
        wait_until(lambda: len(steps) == 4)
    assert sorted(steps) == [0, 1, 2, 3]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_is_read_one_after_the_other_until_it_ends(workers):
    data = as_data({"x": np.full(2, step)} for step in range(7))
    assert data.batch(0, 2)["x"][0] == 0
    stream = load_batches(data, batch_size=2, start=2, workers=workers, prefetch=4)
    assert [int(batch["x"][0]) for batch in stream] == [2, 3, 4, 5, 6]


def test_a_list_ends_the_stream_where_it_ends():
    data = as_data([{"x": np.full(2, step)} for step in range(3)])
    assert len(list(load_batches(data, batch_size=2))) == 3
    assert len(list(load_batches(data, batch_size=2, stop=2))) == 2


def test_errors_of_ones_own_code_arrive_as_they_are():
    def function(step, batch_size):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        next(load_batches(as_data(function), batch_size=2))
