"""Copies of a state: on the devices where they have room for one, and else on the host."""

from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import meshwright as mw
from meshwright.step import canonical
from meshwright.step.canonical import CanonicalForm


@pytest.fixture(scope="module")
def assembled():
    trainer = mw.Trainer(
        model=lambda rngs: nnx.Linear(8, 8, rngs=rngs),
        loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
        optimizer=optax.adam(0.1),
        mesh="data=1",
        devices=jax.devices()[:1],
    )
    return trainer.assemble({"x": np.zeros((2, 8), np.float32)})


def form_on_gpu(assembled, monkeypatch, **stats):
    """Return a form whose device says this of its memory."""
    form = CanonicalForm(assembled)
    gpu = SimpleNamespace(platform="gpu", process_index=0)
    form._mesh = SimpleNamespace(devices=np.array([gpu]))
    monkeypatch.setattr(canonical, "memory_stats", lambda device: stats)
    return form


@pytest.mark.parametrize(
    ("stats", "fits"),
    [
        ({}, False),
        ({"bytes_limit": 10_000, "bytes_in_use": 1_000, "peak_bytes_in_use": 8_000}, True),
        ({"bytes_limit": 10_000, "bytes_in_use": 1_000, "peak_bytes_in_use": 9_000}, False),
        # The copy is of 872 bytes, a step needs 3,000, and 5% is to spare.
        ({"bytes_limit": 10_000, "bytes_in_use": 5_600, "peak_bytes_in_use": 5_600}, True),
        ({"bytes_limit": 10_000, "bytes_in_use": 5_700, "peak_bytes_in_use": 5_700}, False),
    ],
)
def test_a_copy_stays_on_devices_that_have_room_for_it(assembled, monkeypatch, stats, fits):
    form = form_on_gpu(assembled, monkeypatch, **stats)
    form._beside = 3_000
    assert form._has_room() == fits


def test_a_copy_goes_to_the_host_where_the_memory_of_a_step_is_not_known(assembled, monkeypatch):
    form = form_on_gpu(assembled, monkeypatch, bytes_limit=10**9)
    assert not form._has_room()


def test_where_copies_go_is_decided_by_the_first(assembled, monkeypatch):
    form, state, room = CanonicalForm(assembled), assembled.init(0), [False, True, False]
    monkeypatch.setattr(form, "_has_room", lambda: room.pop(0))
    form.prepare(0)
    for _ in range(3):
        arrays = form.snapshot(state).arrays["params"].values()
        assert {array.sharding.memory_kind for array in arrays} != {"pinned_host"}
    assert room == [False]


@pytest.mark.parametrize("room", [True, False])
def test_both_copies_are_the_state_and_outlive_it(assembled, monkeypatch, room):
    form, state = CanonicalForm(assembled), assembled.init(0)
    monkeypatch.setattr(form, "_has_room", lambda: room)
    form.prepare(0)
    before = jax.device_get(state.params)
    snapshot = form.snapshot(state)
    jax.tree.map(lambda array: array.delete(), state)
    kinds = {array.sharding.memory_kind for array in snapshot.arrays["params"].values()}
    assert ("pinned_host" in kinds) != room
    assert bool(snapshot.finite)
    for array, expected in zip(snapshot.arrays["params"].values(), before, strict=True):
        np.testing.assert_array_equal(np.asarray(array), expected)
