"""Tests of mixtures: shares at every row, nothing lost or repeated, and sources that do not fit."""

import pickle

import numpy as np
import pytest

import meshwright as mw
from meshwright.config.schema import DataConfig
from meshwright.data.arrays import ArraySource
from meshwright.data.config_data import ConfigData
from meshwright.data.elements import Expected
from meshwright.data.mixture import MixtureData, mix, shares_of
from meshwright.data.order import sample_ids
from meshwright.data.turns import Turns
from meshwright.data.user_data import as_data
from meshwright.errors import UserError

pytestmark = pytest.mark.quick

ROWS = 10_000


def weights_of(count, seed):
    """Return weights that are hard to keep: equal, tiny, or of many decimals."""
    random = np.random.default_rng(seed)
    drawn = random.choice([1.0, 0.1, 1 / 3, 0.007], count) * random.choice([1, random.random()])
    return {str(n): float(weight) for n, weight in enumerate(drawn)}


def shares(weights):
    return shares_of(weights, weights)


@pytest.mark.parametrize(
    "count", [2, 3, *(pytest.param(n, marks=pytest.mark.full) for n in (4, 5, 6)), 7]
)
def test_at_every_row_each_source_has_its_share_to_within_one(count):
    for seed in range(3):
        own = shares(weights_of(count, 10 * count + seed))
        sources, numbers = Turns([(0, own)]).rows(0, ROWS)
        given = np.cumsum(np.eye(count, dtype=np.int64)[sources], axis=0)
        expected = np.arange(1, ROWS + 1)[:, None] * np.array(own, float)
        # The best that is possible for any shares.
        assert np.abs(given - expected).max() <= 1 - 1 / (2 * count - 2) + 1e-9
        for source, total in enumerate(given[-1]):
            np.testing.assert_array_equal(numbers[sources == source], np.arange(total))


def test_the_largest_deficit_would_not_keep_the_shares():
    own = [0.80592177559, 0.00152275709, 2.05304464e-05, 0.0029624349, 0.14963661685,
           0.00589170066, 0.03404418444]  # fmt: skip
    owed, worst = np.zeros(7), 0.0
    for _ in range(300):
        owed += np.array(own) / sum(own)
        owed[owed.argmax()] -= 1
        worst = max(worst, np.abs(owed).max())
    assert worst > 1


def test_rows_do_not_depend_on_where_reading_begins():
    stages = [(0, shares(weights_of(4, 0))), (1500, shares(weights_of(4, 1)))]
    sources, numbers = Turns(stages).rows(0, 4000)
    for start, count in [(0, 1), (1499, 2), (1500, 1), (2048, 64), (3990, 10), (7, 1600)]:
        for turns in (Turns(stages), pickle.loads(pickle.dumps(Turns(stages)))):
            part = turns.rows(start, count)
            np.testing.assert_array_equal(part[0], sources[start : start + count])
            np.testing.assert_array_equal(part[1], numbers[start : start + count])


def sources(**sizes):
    """Return sources whose rows hold the number of the source and of the sample."""
    return {
        name: ArraySource(x=np.stack([np.full(size, n), np.arange(size)], axis=1))
        for n, (name, size) in enumerate(sizes.items())
    }


def mixture(**weights):
    return MixtureData(sources(a=70, b=11, c=5), weights, seed=3)


def read(data, steps, batch_size=8):
    return np.concatenate([data.batch(step, batch_size)["x"] for step in steps])


def test_each_source_is_read_in_its_own_order_whatever_reads_it():
    data = mixture(a=6, b=3, c=1)
    whole = read(data, range(40))
    for number, size in enumerate((70, 11, 5)):
        own = whole[whole[:, 0] == number, 1]
        alone = sample_ids(seed=3, step=0, batch_size=len(own), num_samples=size)
        np.testing.assert_array_equal(own, alone)
    # Processes that read a part of each batch: at every row, each source has its share.
    for count in (1, 2, 4):
        parts = np.split(np.arange(80), count)
        processes = [mixture(a=6, b=3, c=1) for _ in parts]
        rows = [
            each.batch(step, 80, part)["x"]
            for step in range(ROWS // 80)
            for each, part in zip(processes, parts, strict=True)
        ]
        together = np.concatenate(rows)
        np.testing.assert_array_equal(together[: len(whole)], whole)
        given = np.cumsum(np.eye(3)[together[:, 0]], axis=0)
        expected = np.arange(1, ROWS + 1)[:, None] * np.array([0.6, 0.3, 0.1])
        assert np.abs(given - expected).max() < 1
    copy = pickle.loads(pickle.dumps(mixture(a=6, b=3, c=1)))
    np.testing.assert_array_equal(read(copy, [39]), whole[312:])


def test_other_weights_after_a_resume_lose_and_repeat_nothing():
    before = mixture(a=6, b=3, c=1)
    first = read(before, range(10))
    after = mixture(a=1, b=1, c=8)
    after.go_to(10, before.position(10))
    rows = np.concatenate([first, read(after, range(10, 30))])
    for number, size in enumerate((70, 11, 5)):
        own = rows[rows[:, 0] == number, 1]
        alone = sample_ids(seed=3, step=0, batch_size=len(own), num_samples=size)
        np.testing.assert_array_equal(own, alone)
    counts = after.counts(30, 8)
    for name, then, now in [("a", 0.6, 0.1), ("b", 0.3, 0.1), ("c", 0.1, 0.8)]:
        count, expected = counts[name]
        assert expected == pytest.approx(80 * then + 160 * now)
        assert abs(count - expected) < 1
    # Resumed once more, with the same weights, at a later step.
    again = mixture(a=1, b=1, c=8)
    again.go_to(20, after.position(20))
    np.testing.assert_array_equal(read(again, range(20, 30)), rows[160:])
    assert before.fingerprint() == after.fingerprint()


def test_texts_fill_in_the_arrays_that_conversations_have(tmp_path):
    (tmp_path / "t.txt").write_text("some text to read " * 20)
    said = [{"prompt": "a", "completion": "b" * n} for n in range(1, 9)]
    made = {
        "chat": mw.ChatData(records=said, sequence_length=15, packing="best_fit"),
        "text": mw.TextData(path=str(tmp_path / "t.txt"), sequence_length=15),
    }
    data = as_data(mw.mix(made, weights={"chat": 0.5, "text": 0.5}), 0)
    batch = data.batch(0, 6)
    assert {name: array.shape for name, array in batch.items()} == {
        "tokens": (6, 16), "mask": (6, 15), "segment_ids": (6, 16), "positions": (6, 16),
    }  # fmt: skip
    assert sorted((batch["mask"].sum(axis=1) == 15).tolist()) == [False] * 3 + [True] * 3
    evaluated = as_data(
        mix(made, weights={"chat": 1, "text": 1}), expected=Expected(training=False)
    )
    assert set(evaluated.parts) == {"chat", "text"}
    assert set(evaluated.parts["text"].batch(0, 1)) == set(batch)
    assert evaluated.parts["text"].num_samples == len(made["text"])


def config_data(**keys):
    return ConfigData(DataConfig(kind="mixture", **keys), 0, {"sequence_length": 15}, None)


def test_a_config_names_sources_and_weights(tmp_path):
    (tmp_path / "t.txt").write_text("some text to read " * 90)
    each = {"kind": "text", "path": str(tmp_path / "t.txt")}
    data = config_data(
        sources={"one": each, "two": {**each, "eval_fraction": 0.5}},
        weights={"one": 2, "two": 1}, eval_fraction=0.1, sequence_length=7,
    )  # fmt: skip
    data.check()
    assert data.train.batch(0, 9)["tokens"].shape == (9, 8)
    assert {name: count for name, (count, _) in data.train.counts(1, 9).items()} == {
        "one": 6, "two": 3,
    }  # fmt: skip
    parts = data.held_out.parts
    assert parts["two"].num_samples > 4 * parts["one"].num_samples > 0
    assert "66.667% one" in data.train.describe()


TEXT = {"kind": "text"}
BAD = {
    "no weights": ({"sources": {"a": TEXT}}, "`data.weights` is missing"),
    "no weight": (
        {"sources": {"a": TEXT, "b": TEXT}, "weights": {"a": 1}},
        "`b` is in data.sources",
    ),
    "no source": ({"sources": {"a": TEXT}, "weights": {"a": 1, "b": 1}}, "`b` is in data.weights"),
    "below 0": ({"sources": {"a": TEXT}, "weights": {"a": -1}}, "data.weights are not weights"),
    "all 0": ({"sources": {"a": TEXT}, "weights": {"a": 0}}, "data.weights are not weights"),
    "a kind": ({"sources": {"a": {"kind": "texts"}}, "weights": {"a": 1}}, "`data.kind=texts`"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_mixture_is_refused(case):
    keys, message = BAD[case]
    with pytest.raises(UserError, match=message):
        config_data(**keys).check()


def test_sources_that_do_not_fit_are_refused():
    other = {"a": ArraySource(x=np.ones((4, 2))), "b": ArraySource(x=np.ones((4, 3)))}
    with pytest.raises(UserError, match="`x` of the source `b` has another shape"):
        MixtureData(other, {"a": 1, "b": 1}, 0).batch(0, 2)
    other["b"] = ArraySource(y=np.ones((4, 2)))
    with pytest.raises(UserError, match="the source `a` has no `y`"):
        MixtureData(other, {"a": 1, "b": 1}, 0).batch(0, 2)
    with pytest.raises(UserError, match="`a` cannot be mixed"):
        as_data(mix({"a": iter([])}, weights={"a": 1}))
