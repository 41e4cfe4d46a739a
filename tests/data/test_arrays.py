"""Arrays on disk under their own names, and what is no array."""

import numpy as np
import pytest

import meshwright as mw
from meshwright.data.arrays import array_files
from meshwright.data.files import MappedArray
from meshwright.errors import UserError

pytestmark = pytest.mark.quick

X, Y = np.random.default_rng(0).normal(size=(10, 3)), np.arange(10)
IDS = np.array([7, 0, 7])


def test_an_npz_file_and_a_folder_of_npy_files_hold_the_same(tmp_path):
    np.savez(tmp_path / "both.npz", x=X, y=Y)
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "folder" / "x.npy", X)
    np.save(tmp_path / "folder" / "y.npy", Y)
    for path in ("both.npz", "folder"):
        rows = array_files(path=str(tmp_path / path)).rows(IDS)
        np.testing.assert_array_equal(rows["x"], X[IDS])
        np.testing.assert_array_equal(rows["y"], Y[IDS])
    folder = array_files(path=str(tmp_path / "folder"))
    assert isinstance(folder.arrays["x"], MappedArray)
    assert folder.fingerprint() == mw.ArraySource(x=X, y=Y).fingerprint()
    assert folder.describe() == "10 samples of x float64[3], y int64[]"


def test_rows_do_not_change_with_the_arrays_they_came_from():
    x = X.copy()
    rows = mw.ArraySource(x=x).rows(IDS)
    x[:] = 0
    np.testing.assert_array_equal(rows["x"], X[IDS])


def test_arrays_in_the_order_of_fortran_are_read_as_they_are(tmp_path):
    np.save(tmp_path / "x.npy", np.asfortranarray(X))
    source = array_files(path=str(tmp_path / "x.npy"))
    np.testing.assert_array_equal(source.rows(IDS)["x"], X[IDS])


@pytest.mark.parametrize("name", ["x.npy", "x.npz"])
def test_a_file_that_is_no_array_is_named(tmp_path, name):
    (tmp_path / name).write_text("something else")
    with pytest.raises(UserError, match=f"cannot read .*{name}"):
        array_files(path=str(tmp_path / name))


def test_objects_are_never_unpickled(tmp_path):
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(UserError, match="cannot read"):
        array_files(path=str(tmp_path / "x.npy"))


def test_a_folder_without_arrays_is_named(tmp_path):
    with pytest.raises(UserError, match="there are no arrays"):
        array_files(path=str(tmp_path))
