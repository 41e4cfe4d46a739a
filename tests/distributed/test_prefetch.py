"""Prefetching: order, look-ahead, errors, and threads that end."""

import itertools
import threading

import pytest

from meshwright.distributed.device_placement import prefetch

PATIENCE = 30.0  # seconds before a thread that should have ended counts as stuck


def identity(item):
    return item


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def assert_threads_end():
    for thread in prefetch_threads():
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_items_arrive_in_order_and_prepared():
    assert list(prefetch(range(20), lambda i: i * i, 3)) == [i * i for i in range(20)]
    assert_threads_end()


def test_empty_source():
    assert list(prefetch([], identity, 2)) == []


def test_works_ahead_of_the_consumer_but_not_without_limit():
    pulled = []
    third_pulled = threading.Event()

    def source():
        for i in itertools.count():
            pulled.append(i)
            if i == 2:
                third_pulled.set()
            yield i

    stream = prefetch(source(), identity, 2)
    assert next(stream) == 0
    assert third_pulled.wait(PATIENCE)
    # One in the consumer's hands, two waiting, one that the thread holds.
    assert len(pulled) <= 4
    stream.close()
    assert_threads_end()


def test_items_are_prepared_on_the_thread():
    names = list(prefetch(range(3), lambda _: threading.current_thread().name, 1))
    assert names == ["prefetch"] * 3


def test_source_error_arrives_after_the_items_before_it():
    def source():
        yield 1
        yield 2
        raise OSError("disk gone")

    stream = prefetch(source(), identity, 4)
    assert [next(stream), next(stream)] == [1, 2]
    with pytest.raises(OSError, match="disk gone"):
        next(stream)
    assert_threads_end()


def test_prepare_error_reaches_the_consumer():
    with pytest.raises(ZeroDivisionError):
        list(prefetch([1, 0], lambda i: 1 / i, 2))


@pytest.mark.parametrize("buffer_size", [1, 5])
def test_thread_ends_when_the_consumer_breaks(buffer_size):
    for item in prefetch(itertools.count(), identity, buffer_size):
        if item == 3:
            break
    assert_threads_end()


def test_thread_ends_when_the_consumer_raises():
    def consume():
        for _ in prefetch(itertools.count(), identity, 2):
            raise KeyError("consumer")

    with pytest.raises(KeyError, match="consumer"):
        consume()
    assert_threads_end()


def test_iterator_that_is_never_used_starts_no_thread():
    before = len(prefetch_threads())
    stream = prefetch(itertools.count(), identity, 2)
    assert len(prefetch_threads()) == before
    del stream
