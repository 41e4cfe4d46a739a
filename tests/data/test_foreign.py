"""Datasets of other libraries and of users: which samples a step gets from them."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import grain
import numpy as np
import pytest
from library_standins import (
    DataLoader,
    IterableDataset,
    StreamedTable,
    Table,
    TensorFlowDataset,
    TorchDataset,
)

import meshwright as mw
from meshwright.data.elements import Expected
from meshwright.data.protocols import OutOfData
from meshwright.data.user_data import as_data
from meshwright.errors import UserError

pytestmark = pytest.mark.quick

COUNT, SIZE = 22, 8
X = np.random.default_rng(0).normal(size=(COUNT, 3)).astype("float32")
Y = np.arange(COUNT)
ARRAYS = {"x": X, "y": Y}
SAMPLES = [{"x": X[n], "y": Y[n]} for n in range(COUNT)]
BATCHES = [{"x": X[n : n + SIZE], "y": Y[n : n + SIZE]} for n in range(0, COUNT, SIZE)]
GRAIN = grain.MapDataset.source(SAMPLES)


def generate():
    yield from SAMPLES


SHUFFLED_BY_THE_SEED = {
    "torch dataset": lambda: TorchDataset(ARRAYS),
    "list of samples": lambda: SAMPLES,
    "table": lambda: Table({"x": X.tolist(), "y": Y.tolist()}),
    "marked": lambda: mw.Samples(SAMPLES),
}

IN_THEIR_ORDER = {
    "Grain map": lambda: GRAIN,
    "Grain iter": lambda: GRAIN.to_iter_dataset(),
    "torch iterable": lambda: IterableDataset(ARRAYS),
    "tf.data": lambda: TensorFlowDataset(SAMPLES),
    "generator function": lambda: generate,
    "generator": lambda: (SAMPLES[n % COUNT] for n in range(3 * COUNT)),
}

IN_BATCHES = {
    "Grain map": lambda: GRAIN.batch(SIZE),
    "Grain iter": lambda: GRAIN.to_iter_dataset().batch(SIZE),
    "DataLoader": lambda: DataLoader(TorchDataset(ARRAYS), SIZE),
    "tf.data": lambda: TensorFlowDataset(BATCHES),
    "function": lambda: lambda: iter(BATCHES),
}


def numbers(data, steps):
    got = [data.batch(step, SIZE) for step in range(steps)]
    for batch in got:
        np.testing.assert_array_equal(np.asarray(batch["x"]), X[np.asarray(batch["y"])])
    return [np.asarray(batch["y"]).tolist() for batch in got]


@pytest.mark.parametrize("kind", SHUFFLED_BY_THE_SEED)
def test_samples_by_number_are_shuffled_as_arrays_are(kind):
    data = as_data(SHUFFLED_BY_THE_SEED[kind](), 3, expected=Expected(batch_size=SIZE))
    assert data.num_samples == COUNT
    assert numbers(data, 6) == numbers(as_data(ARRAYS, 3), 6)
    whole, part = data.batch(2, SIZE)["x"], data.batch(2, SIZE, np.array([5, 1]))["x"]
    np.testing.assert_array_equal(part, whole[[5, 1]])


@pytest.mark.parametrize("kind", IN_THEIR_ORDER)
def test_samples_in_an_order_of_their_own_fill_batches_across_epochs(kind):
    data = as_data(IN_THEIR_ORDER[kind](), expected=Expected(batch_size=SIZE))
    assert list(chain(*numbers(data, 8))) == (list(range(COUNT)) * 3)[: 8 * SIZE]


@pytest.mark.parametrize("kind", IN_BATCHES)
def test_a_short_last_batch_is_left_out_of_training_only(kind):
    data = as_data(IN_BATCHES[kind]())
    whole = [list(range(8)), list(range(8, 16))]
    assert numbers(data, 5) == [*whole, *whole, whole[0]]
    assert data.num_dropped == 6
    held_out = as_data(IN_BATCHES[kind](), expected=Expected(like=BATCHES[0], training=False))
    if hasattr(held_out, "one_pass"):
        held_out.one_pass = True
    assert list(chain(*numbers(held_out, 3))) == list(range(COUNT))
    with pytest.raises(OutOfData):
        held_out.batch(3, SIZE)


def test_grain_shuffles_every_epoch_anew_as_it_was_told_to():
    shuffled = GRAIN.shuffle(seed=5)
    expected = [int(shuffled[n]["y"]) for n in range(5 * SIZE)]
    for given in (shuffled, shuffled.repeat()):
        data = as_data(given, expected=Expected(batch_size=SIZE))
        assert list(chain(*numbers(data, 5))) == expected
    assert data.num_samples is None
    assert sorted(expected[:COUNT]) == Y.tolist()
    assert expected[COUNT : COUNT + 8] != expected[:8]


def test_a_streamed_table_is_told_the_epoch():
    data = as_data(StreamedTable({"x": X, "y": Y}), expected=Expected(batch_size=SIZE))
    expected = [np.random.default_rng(epoch).permutation(COUNT) for epoch in range(2)]
    assert list(chain(*numbers(data, 5))) == np.concatenate(expected)[: 5 * SIZE].tolist()


@pytest.mark.parametrize("batched", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_grain_stream_continues_at_the_position_of_a_checkpoint(batched):
    def make():
        made = GRAIN.shuffle(seed=2).to_iter_dataset()
        return as_data(
            made.batch(SIZE) if batched else made,
            expected=Expected(batch_size=None if batched else SIZE),
        )

    whole = numbers(make(), 9)
    for stop in (2, 5):
        before, after = make(), make()
        numbers(before, stop + 2)
        position = before.position(stop)
        after.first_batch(None)
        after.go_to(stop, position)
        assert [after.batch(step, SIZE)["y"].tolist() for step in range(stop, 9)] == whole[stop:]


def test_epochs_of_streams_end_where_the_data_do_and_can_be_extended():
    data = as_data(generate, expected=Expected(batch_size=SIZE))
    data.stop_after(2)
    assert len(numbers(data, 6)) == 6
    with pytest.raises(OutOfData):
        data.batch(6, SIZE)
    data.stop_after(3)
    expected = (list(range(COUNT)) * 4)[: 9 * SIZE]
    assert data.batch(6, SIZE)["y"].tolist() == expected[6 * SIZE : 7 * SIZE]
    with pytest.raises(UserError, match=r"1\.5 epochs cannot be counted"):
        data.stop_after(1.5)
    once = as_data(generate(), expected=Expected(batch_size=SIZE))
    with pytest.raises(UserError, match="can be read only once") as caught:
        once.stop_after(2)
    assert "the function generate itself, without ()" in caught.value.fix


def test_samples_and_batches_are_told_apart_by_the_training_data():
    evaluation = Expected(like=BATCHES[0], training=False)
    assert as_data(SAMPLES, expected=evaluation).num_samples == COUNT
    assert as_data(BATCHES, expected=evaluation).first_batch(None)["x"].shape == (SIZE, 3)
    # Sequences as long as the batch could be either, but not beside known shapes.
    rows = [{"x": np.zeros(SIZE)}] * 4
    like = {"x": np.zeros((2, SIZE))}
    assert as_data(rows, expected=replace(evaluation, like=like)).num_samples == 4


REFUSED = {
    "either": (
        [{"x": np.zeros(SIZE)}] * 4,
        SIZE,
        "the elements of the list could be samples or batches of 8",
        "mw.Samples(data)",
    ),
    "batches": (
        GRAIN.batch(SIZE),
        SIZE,
        "the elements of the Grain MapDataset could be samples or batches of 8",
        "leave out batch_size if they are batches",
    ),
    "samples": (
        GRAIN,
        None,
        "the first element of the Grain MapDataset is a single sample, not a batch",
        "write batch_size=…",
    ),
    "other dims": (
        [(np.zeros((4, 4)), np.zeros(3))],
        None,
        "the arrays of the first element of the list have different numbers of samples",
        "write batch_size=… if each element is one sample",
    ),
    "filtered": (
        GRAIN.filter(lambda sample: False),
        SIZE,
        "the Grain MapDataset has indices without a sample",
        "data.to_iter_dataset()",
    ),
    "loader of another size": (
        DataLoader(TorchDataset(ARRAYS), SIZE),
        4,
        "the DataLoader makes batches of 8, and batch_size=4",
        "DataLoader(…, batch_size=4)",
    ),
    "text column": (
        Table({"x": [1.0, 2.0], "title": ["a", "b"]}),
        2,
        "the column `title` of the dataset holds text",
        "data.remove_columns(['title'])",
    ),
    "splits": (
        {"test": Table({"x": [1.0]}), "train": Table({"x": [1.0]})},
        1,
        "the data are a dict of several splits",
        'data["train"]',
    ),
    "None": (None, 1, "the data are None", "write a dict of arrays"),
    "path": (Path("x.npz"), 1, "the data are a single PosixPath", "dict(np.load(path))"),
    "class": (TorchDataset, 1, "the data are the class TorchDataset", "TorchDataset(…)"),
    "set": ({1, 2}, 1, "the data are a set", "a list of batches"),
    "keys": ({0: X}, 1, "the arrays of the dataset have no names", "{'x': x, 'y': y}"),
    "ragged lists": ({"x": [[1], [1, 2]]}, 1, "`x` is not an array of samples", "pad"),
    "objects": ({"x": np.array([1, None])}, 1, "`x` is not an array of samples", "numbers"),
    "function": (lambda: 3, 1, "the function <lambda> returns no batches", "generator function"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_unclear_or_wrong_is_refused_with_what_to_write(kind):
    given, size, what, fix = REFUSED[kind]
    with pytest.raises(UserError) as caught:
        as_data(given, expected=Expected(batch_size=size))
    assert caught.value.what == what
    assert fix in caught.value.fix


WRONG_SAMPLES = {
    "shape": ([np.zeros(3), np.zeros(2)], "another shape than that of sample"),
    "keys": ([{"x": 1.0}, {"z": 1.0}], "has other fields than sample"),
    "text": ([(1, "a"), (2, "b")], "is text, not a number"),
    "None": ([None, None], "is None"),
    "object": ([{"x": np.array([None])}] * 2, "is an array of dtype object"),
    "dates": ([{"x": np.array(["2020-01-01"], "datetime64[D]")}] * 2, "datetime64"),
    "column": (Table({"x": [[1.0], [1.0, 2.0]]}), "`x` of sample"),
}


@pytest.mark.parametrize("kind", WRONG_SAMPLES)
def test_samples_that_do_not_fit_together_are_named(kind):
    given, what = WRONG_SAMPLES[kind]
    with pytest.raises(UserError, match=what):
        as_data(given, expected=Expected(batch_size=4)).batch(0, 4)


def test_a_frame_is_refused_with_the_line_that_converts_it():
    class DataFrame:
        shape, columns = (2, 1), ["a"]

        def to_dict(self):
            raise AssertionError

    with pytest.raises(UserError, match="the data are a DataFrame") as caught:
        as_data(DataFrame())
    assert caught.value.fix == "write {name: data[name].to_numpy() for name in data.columns}"


def test_tensors_that_cannot_be_converted_say_so():
    class OnDevice:
        shape, dtype = (2,), "float32"

        def __array__(self, dtype=None, copy=None):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

        def detach(self):
            return self

    from meshwright.data.batches import read_batch

    with pytest.raises(UserError, match="cannot become an array") as caught:
        read_batch({"x": OnDevice()})
    assert caught.value.fix == "write tensor.detach().cpu()"
