"""Batches of several processes: all of them have one, or none."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.data.protocols import OutOfData
from meshwright.data.user_data import as_data
from meshwright.mesh.build import build_mesh
from meshwright.trainer import batch_loader
from meshwright.trainer.batch_loader import BatchLoader


class Ends:
    def batch(self, step, batch_size):
        if step >= 2:
            raise OutOfData
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
