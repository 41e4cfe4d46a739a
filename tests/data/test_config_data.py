"""From the data section to data: what is trained on and what is held out."""

import numpy as np
import pytest

from meshwright.config.groups import group_options
from meshwright.config.schema import DataConfig
from meshwright.data.config_data import DATA_KINDS, ConfigData
from meshwright.data.indexed_data import SyntheticData
from meshwright.errors import UserError
from meshwright.tasks import find_task

pytestmark = pytest.mark.quick

TASK = find_task("language_modeling")(vocab_size=300, context_length=8)
SHARED = {"sequence_length": 8, "vocab_size": 300}

OWN = """
import numpy as np

class Rows:
    def __init__(self, *, path: str = "none", seed: int = 0, count: int = 100):
        self.path, self.seed, self.count = path, seed, count
    def __len__(self):
        return self.count
    def rows(self, ids):
        return {"x": ids}
"""


def make(task=TASK, seed=0, **section) -> ConfigData:
    return ConfigData(DataConfig(**section), seed, SHARED, task)


def rows_of(data, count: int) -> np.ndarray:
    return data.batch(0, count)["tokens"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_bytes(bytes(np.random.default_rng(0).integers(0, 256, 8001).astype(np.uint8)))
    return str(path)


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_data.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_every_kind_has_a_file_in_the_config_group():
    assert set(group_options()["data"]) == set(DATA_KINDS)


def test_a_part_of_the_data_is_held_out_and_never_trained_on(text):
    made = make(kind="text", path=text, eval_fraction=0.1)
    assert made.held_out is not None
    assert (made.train.num_samples, made.held_out.num_samples) == (900, 100)
    train = {row.tobytes() for row in rows_of(made.train, 900)}
    held_out = {row.tobytes() for row in rows_of(made.held_out, 100)}
    assert (len(train), len(held_out), len(train & held_out)) == (900, 100, 0)


def test_what_is_held_out_comes_in_a_fixed_order_whatever_the_seed(text):
    first, second = (make(kind="text", path=text, seed=seed) for seed in (0, 1))
    np.testing.assert_array_equal(rows_of(first.held_out, 20), rows_of(second.held_out, 20))
    assert not np.array_equal(rows_of(first.train, 20), rows_of(second.train, 20))
    assert first.held_out.num_samples == 20


def test_a_path_of_its_own_for_evaluation_leaves_all_data_for_training(text, tmp_path):
    (tmp_path / "eval.txt").write_text("x" * 90)
    made = make(kind="text", path=text, eval_path=str(tmp_path / "eval.txt"))
    assert made.train.num_samples == 1000
    assert made.held_out.num_samples == 11
    assert set(rows_of(made.held_out, 10).ravel().tolist()) == {ord("x")}


def test_made_up_evaluation_differs_from_made_up_training():
    made = make(kind="synthetic")
    assert isinstance(made.held_out, SyntheticData)
    assert not np.array_equal(rows_of(made.train, 4), rows_of(made.held_out, 4))
    assert made.train.fingerprint() != made.held_out.fingerprint()


def test_nothing_of_ones_own_data_is_held_out_unless_asked_for(own):
    made = make(kind="own_data:Rows")
    assert made.train.num_samples == 100
    assert made.held_out is None
    asked = make(kind="own_data:Rows", eval_fraction=0.2)
    assert (asked.train.num_samples, asked.held_out.num_samples) == (80, 20)
    other = make(kind="own_data:Rows", eval_path="there", seed=5)
    assert (other.held_out.source.path, other.held_out.source.seed) == ("there", 5)


def test_data_in_the_order_of_the_samples(text):
    made = make(kind="text", path=text, shuffle=False, eval_fraction=0)
    rows = rows_of(made.train, 3)
    np.testing.assert_array_equal(rows[1:, 0], rows[:-1, -1])
    assert made.held_out is None


def test_sources_follow_the_sizes_of_the_task_unless_given(text):
    assert rows_of(make(kind="text", path=text).train, 2).shape == (2, 9)
    made = make(kind="text", path=text, sequence_length=5)
    assert rows_of(made.train, 2).shape == (2, 6)


@pytest.mark.parametrize(
    ("section", "what"),
    [
        ({"kind": "tokens"}, "`data.path` is missing"),
        ({"kind": "text", "pth": "x"}, "there is no `data.pth`"),
        ({"kind": "text", "packing": "boxes"}, "`data.packing=boxes` is not valid"),
        ({"kind": "txt"}, "`data.kind=txt` is not known: did you mean `text`?"),
        ({"kind": "digits", "eval_path": "x"}, "data.eval_path=x cannot be read"),
    ],
)
def test_mistakes_in_the_section_are_named(section, what):
    with pytest.raises(UserError) as caught:
        assert make(**section).held_out
    assert caught.value.what == what


def test_nothing_is_read_to_check_a_section():
    make(kind="text", path="does/not/exist").check()
    with pytest.raises(UserError, match="does not exist"):
        assert make(kind="text", path="does/not/exist").train
