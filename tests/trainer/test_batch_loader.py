"""Batches of several processes: all of them have one, or none."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.data.protocols import OutOfData
from meshwright.data.user_data import as_data
from meshwright.mesh.build import build_mesh
from meshwright.runtime.interrupt import Interrupt
from meshwright.trainer import batch_loader, limits
from meshwright.trainer.batch_loader import BatchLoader


class Ends:
    def batch(self, step, batch_size):
        if step >= 2:
            raise OutOfData
        return {"x": np.full((batch_size, 2), step)}


def ends_early(step, batch_size):
    if step == 5:
        raise StopIteration
    return {"x": np.full((batch_size, 2), step)}


def endless(step, batch_size):
    return {"x": np.full((batch_size, 2), step)}


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (Ends(), [True, True, False]),
        (endless, []),
        ({"x": np.zeros((64, 2))}, []),
    ],
    ids=["an object of unknown size", "a function", "arrays"],
)
def test_processes_agree_on_the_end_of_data_of_unknown_size(monkeypatch, given, asked):
    said = []

    def agree(value, how):
        said.append(value)
        return value

    monkeypatch.setattr(batch_loader, "agree", agree)
    monkeypatch.setattr(batch_loader, "process_count", lambda: 2)
    sharding = NamedSharding(build_mesh({"data": 8}, jax.devices()), PartitionSpec("data"))
    loader = BatchLoader(as_data(given), batch_size=8, sharding=sharding)
    with loader.open(0, 3) as batches:
        count = len(list(batches))
    assert said == asked
    assert count == (2 if asked else 3)


def test_the_end_of_a_functions_data_is_told_before_others_can_run_past_it(monkeypatch):
    monkeypatch.setattr(batch_loader, "process_count", lambda: 2)
    sharding = NamedSharding(build_mesh({"data": 8}, jax.devices()), PartitionSpec("data"))
    told = []
    loader = BatchLoader(as_data(ends_early), batch_size=8, sharding=sharding)
    with loader.open(1, 9, told.append) as batches:
        seen = [(int(batch[0][0, 0]), list(told)) for batch in batches]
    assert seen == [(1, []), (2, [5]), (3, [5]), (4, [5])]
    with loader.open(0, 5, told.append) as batches:
        assert len(list(batches)) == 5
    assert told == [5]


class Store:
    """The coordinator's key-value store."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value):
        if self.values.setdefault(key, value) != value:
            raise RuntimeError("ALREADY_EXISTS")

    def key_value_dir_get(self, prefix):
        return [(key, text) for key, text in list(self.values.items()) if key.startswith(prefix)]


@pytest.mark.parametrize("ends", [{1: 6}, {0: 6, 1: 6}, {0: 6, 2: 9}], ids=str)
def test_all_processes_stop_where_the_data_of_one_end(monkeypatch, ends):
    store, me = Store(), threading.local()
    monkeypatch.setattr(limits, "distributed_state", lambda: SimpleNamespace(client=store))
    monkeypatch.setattr(limits, "process_index", lambda: me.number)
    monkeypatch.setattr(limits, "process_count", lambda: 3)
    monkeypatch.setattr(limits, "_numbers", itertools.repeat(0))
    monkeypatch.setattr(limits, "POLL_SECONDS", 0.01)
    together = [limits.StopTogether(Interrupt(), 10.0) for _ in range(3)]
    begun = [0, 0, 0]

    def train(number):
        own, me.number = together[number], number
        thread = threading.Thread(target=lambda: (setattr(me, "number", number), own._listen()))
        thread.start()
        for step in range(1, 20):
            if step == ends.get(number, 99) - 2:
                own.end_of_data(ends[number])
            if own.before_step(step) is not None:
                break
            begun[number] = step
            # As in training, nobody gets more than three steps ahead of another.
            while step > min(begun) + 2:
                time.sleep(0.001)
        begun[number] = 99
        thread.join()
        return step - 1

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(train, range(3))) == [6, 6, 6]
