"""Pictures in arrays and in folders, against the same pixels read by hand."""

import numpy as np
import pytest
from PIL import Image

from meshwright.data.images import image_source
from meshwright.errors import UserError

pytestmark = pytest.mark.quick

SHAPE = (6, 8, 3)


def pixels(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SHAPE).astype(np.uint8)


@pytest.fixture
def folder(tmp_path):
    for number, name in enumerate(["cat/1.png", "cat/2.png", "dog/a/3.png", "dog/4.bmp"]):
        path = tmp_path / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(number)).save(path)
    (tmp_path / "pictures" / "dog" / "notes.txt").write_text("no picture")
    return tmp_path / "pictures"


def test_a_folder_of_classes(folder):
    source = image_source(path=str(folder), input_shape=SHAPE)
    assert (len(source), source.classes) == (4, ["cat", "dog"])
    rows = source.rows(np.array([3, 0, 2]))
    assert rows["label"].tolist() == [1, 0, 1]
    # By name within a class: dog/4.bmp before dog/a/3.png.
    expected = np.stack([pixels(2), pixels(0), pixels(3)]) / 255
    np.testing.assert_allclose(rows["image"], expected, rtol=1e-6)
    assert (rows["image"].dtype, rows["label"].dtype) == (np.float32, np.int32)


def test_pictures_are_brought_to_the_shape_of_the_task(folder):
    source = image_source(path=str(folder), input_shape=(4, 4, 1), input_name="x")
    got = source.rows(np.array([1]))["x"]
    expected = np.asarray(Image.fromarray(pixels(1)).convert("L").resize((4, 4))) / 255
    np.testing.assert_allclose(got[0, :, :, 0], expected, rtol=1e-6)


@pytest.mark.parametrize("names", [("image", "label"), ("x", "y"), ("images", "labels")])
@pytest.mark.parametrize("form", ["npz", "folder"])
def test_arrays_of_pictures(tmp_path, names, form):
    images = np.stack([pixels(number) for number in range(5)])
    labels = np.arange(5) % 3
    if form == "npz":
        np.savez(tmp_path / "a.npz", **dict(zip(names, (images, labels), strict=True)))
    else:
        (tmp_path / "a.npz").mkdir()
        for name, array in zip(names, (images, labels), strict=True):
            np.save(tmp_path / "a.npz" / f"{name}.npy", array)
    source = image_source(path=str(tmp_path / "a.npz"), input_shape=SHAPE, num_classes=3)
    rows = source.rows(np.array([4, 1]))
    np.testing.assert_allclose(rows["image"], images[[4, 1]] / 255, rtol=1e-6)
    np.testing.assert_array_equal(rows["label"], [1, 1])
    flat = image_source(path=str(tmp_path / "a.npz"), input_shape=(6 * 8 * 3,))
    assert flat.rows(np.array([0]))["image"].shape == (1, 144)


def test_numbers_with_a_point_stay_what_they_are(tmp_path):
    images = np.linspace(-1, 1, 24).reshape(2, 3, 4)
    np.savez(tmp_path / "a.npz", x=images, y=np.arange(2))
    source = image_source(path=str(tmp_path / "a.npz"), input_shape=(3, 4, 1))
    np.testing.assert_allclose(source.rows(np.arange(2))["image"][..., 0], images, rtol=1e-6)


def test_a_file_that_is_no_picture_stops_or_gives_way_to_the_next(folder):
    (folder / "cat" / "2.png").write_bytes((folder / "cat" / "2.png").read_bytes()[:60])
    source = image_source(path=str(folder), input_shape=SHAPE)
    with pytest.raises(UserError, match=r"cat/2\.png cannot be read"):
        source.rows(np.array([0, 1]))
    skipping = image_source(path=str(folder), input_shape=SHAPE, on_corrupt="skip")
    with pytest.warns(UserWarning, match="1 corrupt record was skipped") as warned:
        rows = skipping.rows(np.array([1, 0, 1]))
    assert len(warned) == 1
    assert rows["label"].tolist() == [1, 0, 1]
    np.testing.assert_array_equal(rows["image"][0], rows["image"][2])
    np.testing.assert_array_equal(rows["image"][0], skipping.rows(np.array([2]))["image"][0])
    assert "2 corrupt records were skipped" in skipping.describe()
    assert len(skipping) == 4


@pytest.mark.parametrize(
    ("arrays", "what"),
    [
        ({"x": np.zeros((2, 6, 8, 3))}, "has no array `label`"),
        ({"x": np.zeros((0, 6, 8, 3)), "y": np.zeros(0, int)}, "is empty"),
        ({"x": np.zeros((2, 6, 8, 3)), "y": np.zeros(3, int)}, "does not have one label per image"),
        ({"x": np.zeros((2, 6, 8)), "y": np.zeros(2, int)}, "do not fit the task"),
        ({"x": np.zeros((2, 6, 8, 3)), "y": np.zeros(2)}, "are not integers"),
        ({"x": np.zeros((2, 6, 8, 3)), "y": np.array([0, 5])}, "has the label 5"),
    ],
)
def test_arrays_that_are_no_labelled_pictures_are_named(tmp_path, arrays, what):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UserError, match=what):
        image_source(path=str(tmp_path / "a.npz"), input_shape=SHAPE, num_classes=5)


def test_a_folder_without_classes_and_a_shape_without_channels_are_named(tmp_path, folder):
    (tmp_path / "flat").mkdir()
    with pytest.raises(UserError, match="has no classes"):
        image_source(path=str(tmp_path / "flat"))
    with pytest.raises(UserError, match="cannot be resized to") as caught:
        image_source(path=str(folder), input_shape=(144,))
    assert "[32,32,3]" in caught.value.fix
