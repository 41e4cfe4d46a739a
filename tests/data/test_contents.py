"""Fingerprints of data: what enters them."""

from types import SimpleNamespace

import numpy as np
import pytest

from meshwright.data import contents
from meshwright.data.contents import data_fingerprint, list_contents
from meshwright.data.elements import Expected
from meshwright.data.user_data import as_data

pytestmark = pytest.mark.quick

SIZE = 200_000


def arrays(**changed):
    return {"x": np.arange(SIZE, dtype=np.float32), "y": np.arange(SIZE) % 7} | changed


def batches(count=6):
    return [{"x": np.full((4, 3), n), "label": [n, n + 1, 0, 1]} for n in range(count)]


def changed_at(position):
    x = arrays()["x"]
    x[position] += 1
    return arrays(x=x)


@pytest.mark.parametrize("position", [0, 20_000, 77_777, SIZE - 1])
def test_a_single_changed_value_is_found_anywhere(position):
    before, now = (data_fingerprint(as_data(d), 0) for d in (arrays(), changed_at(position)))
    assert before.text != now.text
    assert before.compared == "all 2.4 MB"


def test_a_view_has_the_fingerprint_of_its_copy():
    x = np.arange(60.0).reshape(5, 12)[:, ::2]
    first, second = (data_fingerprint(as_data({"x": each}), 0) for each in (x, x.copy()))
    assert first == second


@pytest.mark.parametrize("samples", [False, True])
def test_lists_are_compared_by_what_they_hold(samples):
    def fingerprint(items):
        expected = Expected(batch_size=2 if samples else None)
        return data_fingerprint(as_data(items, expected=expected), 0)

    items = [{"x": np.full(3, n)} for n in range(6)] if samples else batches()
    other = [*items[:3], {**items[3], "x": items[3]["x"] + 1}, *items[4:]]
    assert fingerprint(items) == fingerprint(list(items))
    assert fingerprint(items).text != fingerprint(other).text
    assert fingerprint(items).compared.startswith("all ")


def test_texts_are_compared_by_what_they_say():
    def fingerprint(*texts):
        data = SimpleNamespace(fingerprint=lambda: list_contents([{"prompt": t} for t in texts])[0])
        return data_fingerprint(data, 0)

    assert fingerprint("2+3=").text != fingerprint("2+4=").text
    assert fingerprint("2+3=").compared.startswith("all ")


def test_large_data_are_compared_at_places_drawn_from_the_seed(monkeypatch):
    monkeypatch.setattr(contents, "WHOLE_BYTES", 100_000)
    monkeypatch.setattr(contents, "SAMPLED_BYTES", 100_000)
    monkeypatch.setattr(contents, "BLOCK_BYTES", 1000)
    first = data_fingerprint(as_data(arrays()), 0)
    assert first == data_fingerprint(as_data(arrays()), 0)
    assert first.text != data_fingerprint(as_data(arrays()), 1).text
    assert first.compared == "102.0 kB of 2.4 MB"
    x = arrays()["x"]
    x[50_000:150_000] += 1
    assert first.text != data_fingerprint(as_data(arrays(x=x)), 0).text
