"""Where batches come from: the same for the same seed and step, whoever gives them."""

import zlib
from dataclasses import replace

import numpy as np
import pytest

from meshwright.checkpoint import CheckpointMetadata
from meshwright.data.contents import data_fingerprint
from meshwright.data.indexed_data import SyntheticData
from meshwright.data.user_data import as_data, is_batch_function, read_data
from meshwright.errors import UserError
from meshwright.tasks.classification import Classification
from meshwright.tasks.language_modeling import LanguageModeling
from meshwright.tasks.reconstruction import Reconstruction
from meshwright.trainer.starting.resume import check_same_run

pytestmark = pytest.mark.quick


class Rows:
    def __len__(self):
        return 10

    def rows(self, ids):
        return {"x": 10 * ids}


class Batches:
    def __init__(self, *, start: int = 0):
        self.start = start

    def batch(self, step, batch_size):
        return {"x": np.full(batch_size, self.start + step)}


def function(step, batch_size, *, start: int = 0):
    return {"x": np.full(batch_size, start + step)}


def factory(start: int):
    return Batches(start=start)


def broken():
    raise OSError("no such disk")


def test_a_source_is_read_in_an_order_of_the_seed():
    data = as_data(read_data("own:Rows", Rows, {}), seed=3)
    epoch = np.concatenate([data.batch(step, 5)["x"] for step in (0, 1)])
    assert sorted(epoch) == list(range(0, 100, 10))
    np.testing.assert_array_equal(data.batch(1, 5)["x"], epoch[5:])
    other = as_data(read_data("own:Rows", Rows, {}), seed=4)
    assert not np.array_equal(np.concatenate([other.batch(s, 5)["x"] for s in (0, 1)]), epoch)


@pytest.mark.parametrize("builder", [Batches, function, factory])
def test_ones_own_batches_come_from_a_class_a_function_or_what_one_returns(builder):
    data = read_data("own:it", builder, {"start": 7})
    np.testing.assert_array_equal(data.batch(2, 3)["x"], [9, 9, 9])


def test_a_function_of_step_and_batch_size_gives_batches_itself():
    assert is_batch_function(function)
    assert not is_batch_function(factory)
    assert not is_batch_function(Batches)


def test_the_fingerprint_of_a_function_follows_its_settings():
    prints = {read_data("own:f", function, {"start": n}).fingerprint() for n in (0, 1, 1)}
    assert len(prints) == 2


def test_what_gives_no_batches_is_named():
    with pytest.raises(UserError, match=r"data\.kind=own:dict returns no batches") as caught:
        read_data("own:dict", dict, {})
    assert "it returned a dict" in caught.value.why
    assert "batch(self, step, batch_size)" in caught.value.fix


def test_a_failure_while_it_is_made_names_the_users_line():
    with pytest.raises(UserError, match=r"data\.kind=own:broken cannot be built") as caught:
        read_data("own:broken", broken, {})
    line, *frames = caught.value.why.splitlines()
    assert line.startswith("test_indexed_data.py, line ")
    assert line.endswith("OSError: no such disk")
    assert frames[0].startswith(f'File "{__file__}", line ')


def test_made_up_batches_depend_on_seed_and_step_only():
    def draw(seed: int, size: int):
        return {"x": np.random.default_rng(seed).normal(size=size)}

    def batch(seed: int, step: int) -> np.ndarray:
        return SyntheticData(draw, seed).batch(step, 4)["x"]

    np.testing.assert_array_equal(batch(1, 2), batch(1, 2))
    assert len({batch(seed, step)[0] for seed in (0, 1) for step in (0, 1)}) == 4


@pytest.mark.parametrize(
    ("task", "content"),
    [
        (Classification(input_shape=(4,)), 2431323794),
        (LanguageModeling(vocab_size=64, context_length=4), 3654202314),
        (Reconstruction(input_shape=(4,)), 602508662),
    ],
)
def test_made_up_samples_stay_the_same(task, content):
    """If the content changes, so must the fingerprint, or runs resume on other samples."""
    batch = task.synthetic_batch(7, 3)
    arrays = [np.round(1000 * np.asarray(batch[name])).astype(np.int64) for name in sorted(batch)]
    assert zlib.crc32(b"".join(array.tobytes() for array in arrays)) == content


def test_a_run_on_other_made_up_samples_is_not_resumed_without_a_word():
    before, found = (
        data_fingerprint(SyntheticData(Classification(num_classes=n).synthetic_batch, 0), 0)
        for n in (10, 11)
    )
    saved = CheckpointMetadata(step=5, seed=0, dataset=before.text, global_batch_size=8)
    settings = {"data": found, "global_batch_size": 8}
    with pytest.raises(UserError, match="differs from that of the checkpoint") as caught:
        check_same_run(saved, {}, accept=False, **settings)
    assert f"fingerprint was {before.text} and is {found.text}" in caught.value.why
    assert len(check_same_run(saved, {}, accept=True, **settings)) == 1
    shorter = replace(saved, num_samples=10)
    (text,) = check_same_run(shorter, {}, accept=True, num_samples=30, **settings)
    assert text.endswith(": it had 10 samples and has 30")
