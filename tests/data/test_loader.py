"""Reading ahead: the same batches in the same order, errors as they are, nothing left behind."""

import itertools
import multiprocessing
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from meshwright.data.batches import form_of, read_batch, read_batches
from meshwright.data.indexed_data import SourceData
from meshwright.data.loader import load_batches
from meshwright.data.token_rows import StreamRows
from meshwright.data.user_data import as_data
from meshwright.errors import EnvironmentProblem, UserError

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


def batch_of(step, size):
    return {"x": np.full((size, 2), step), "y": np.full(size, step)}


NO_BATCHES = {
    "none": None,
    "short": batch_of(3, 3),
    "one short array": batch_of(3, 4) | {"y": np.zeros(2)},
    "structure": {"x": np.zeros((4, 2))},
}


def read_as_trained(data, rows) -> list[int]:
    form = form_of(read_batch(data.batch(0, 4))).with_samples(4 if rows is None else len(rows))
    with load_batches(data, batch_size=4, start=2, stop=6, rows=rows) as stream:
        batches = read_batches(stream, form, lambda number: data.batch_name(2 + number))
        return [int(batch["x"][0, 0]) for batch in batches]


@pytest.mark.parametrize("rows", [None, np.array([0, 3])], ids=["one process", "two processes"])
@pytest.mark.parametrize("returned", NO_BATCHES.values(), ids=NO_BATCHES)
def test_what_is_no_batch_is_an_error_that_names_the_call(returned, rows):
    def own(step, batch_size):
        return batch_of(step, batch_size) if step != 3 else returned

    class Own:
        def batch(self, step, batch_size):
            return own(step, batch_size)

    for data, call in ((as_data(own), "own(step=3)"), (as_data(Own()), "Own.batch(step=3)")):
        with pytest.raises(UserError) as caught:
            read_as_trained(data, rows)
        assert f"batch 3 ({call})" in caught.value.what


def test_none_is_refused_wherever_a_batch_may_come_from():
    good = batch_of(0, 4)

    class Source:
        def __len__(self):
            return 40

        def rows(self, ids):
            return None if 13 in ids else {"x": ids[:, None]}

    for given, said in (
        ([good, good, good, None, good], "batch 3 is None"),
        (iter([good, good, good, None, good]), "element 3 of"),
        (iter([good, good, good, None]), "element 3 of"),
        (Source(), r"\(Source.rows\(\)\) is None"),
    ):
        stream = load_batches(as_data(given), batch_size=4)
        with pytest.raises(UserError, match=said):
            list(itertools.islice(stream, 12))
    for given in ([None], iter([None]), lambda step, batch_size: None):
        with pytest.raises(UserError, match="is None"):
            as_data(given).first_batch(4)


def test_a_source_that_stops_in_between_is_an_error():
    class Source:
        def __len__(self):
            return 40

        def rows(self, ids):
            raise StopIteration

    stream = load_batches(as_data(Source()), batch_size=4)
    with pytest.raises(UserError, match=r"batch 0 \(Source.rows\(\)\) does not exist"):
        next(stream)


@pytest.mark.full
def test_a_reading_process_that_is_killed_is_named():
    stream = load_batches(numbers(), batch_size=6, workers=1)
    next(stream)
    (child,) = multiprocessing.active_children()
    child.kill()
    with pytest.raises(EnvironmentProblem, match="a process that reads data has ended") as caught:
        list(itertools.islice(stream, 300))
    assert "killed by signal 9" in caught.value.why


KILLED_WITH_LOCKS = """
import gc, multiprocessing, os, signal, sys
from multiprocessing.synchronize import Lock, RLock

import numpy as np

from meshwright.data.loader import load_batches
from meshwright.data.user_data import as_data
from meshwright.errors import EnvironmentProblem


def batch(step, batch_size):
    if step == 1:
        for each in gc.get_objects():
            if isinstance(each, (Lock, RLock)):
                each.acquire(timeout=0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    return {"x": np.full((batch_size, 2), step)}


def main():
    data = as_data(batch)
    read, left = (load_batches(data, batch_size=2, workers=1, prefetch=1) for _ in "ab")
    for stream in (read, left):
        next(stream)
    for process in multiprocessing.active_children():
        process.join()
    try:
        next(read)
    except EnvironmentProblem as error:
        print(error.what, error.why)
    # Closed when the interpreter ends.
    sys.modules["left"] = left


if __name__ == "__main__":
    main()
"""


def test_a_reading_process_may_be_killed_while_it_holds_locks(tmp_path):
    """Whoever then waited for one of them would wait forever, even at the end of the program."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED_WITH_LOCKS)
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=True
    )
    assert "a process that reads data has ended" in run.stdout
    assert "killed by signal 9" in run.stdout


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
