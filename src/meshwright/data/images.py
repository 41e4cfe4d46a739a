"""Images: in arrays, or in files with one folder per class."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.arrays import read_arrays
from meshwright.data.contents import array_contents
from meshwright.data.corrupt import CorruptRecords, OnCorrupt
from meshwright.data.files import find_path, list_files
from meshwright.data.fingerprints import fingerprint_of
from meshwright.data.protocols import HostBatch, Source
from meshwright.errors import Setting, UserError, missing_package

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm")
IMAGE_NAMES = ("image", "images", "x", "data")
LABEL_NAMES = ("label", "labels", "y", "target")


def image_source(
    *,
    path: str,
    input_shape: tuple[int, ...] = (28, 28, 1),
    input_name: str = "image",
    num_classes: int | None = None,
    on_corrupt: OnCorrupt = "stop",
) -> Source:
    """Return the images of a file of arrays, or of a folder with one subfolder per class.

    Args:
        path: an .npz file or a folder of .npy files with ``image`` and ``label`` (or ``x`` and
            ``y``), or a folder of folders of image files.
        input_shape: height, width and channels (1 or 3), to which files are resized. Arrays may
            also have a flat shape.
        input_name: the name of the images in the batch.
        num_classes: number of classes; labels must be below it.
        on_corrupt: what to do about a file that is not an image.
    """
    where = find_path(path)
    if where.is_dir() and not any(where.glob("*.npy")):
        return ImageFolder(where, input_shape, input_name, num_classes, on_corrupt)
    return ImageArrays(
        read_arrays(path), input_shape, input_name, num_classes, str(Setting("data.path", path))
    )


class ImageArrays:
    """Images and labels in arrays; integers from 0 to 255 are scaled to numbers from 0 to 1."""

    def __init__(
        self,
        arrays: dict[str, Any],
        input_shape: tuple[int, ...],
        input_name: str,
        num_classes: int | None,
        name: str,
    ) -> None:
        self.images: NDArray[Any] = _named(arrays, IMAGE_NAMES, name)
        self.labels: NDArray[Any] = np.asarray(_named(arrays, LABEL_NAMES, name))
        self.input_shape, self.input_name, self.name = tuple(input_shape), input_name, name
        self._check()
        check_labels(self.labels, num_classes, name)

    def __len__(self) -> int:
        return len(self.images)

    def rows(self, ids: NDArray[np.int64]) -> HostBatch:
        """Return float32 images, and int32 ``label``."""
        images = np.asarray(self.images[ids])
        scale = 1 / 255 if images.dtype == np.uint8 else 1
        images = images.astype(np.float32).reshape(len(ids), *self.input_shape) * np.float32(scale)
        return {self.input_name: images, "label": self.labels[ids].astype(np.int32)}

    def fingerprint(self) -> str:
        """Return a fingerprint of the images and labels."""
        arrays = [self.images, self.labels]
        contents = [
            (array.shape, str(array.dtype), content)
            for array, content in zip(arrays, array_contents(arrays), strict=True)
        ]
        return fingerprint_of("images", contents, self.input_shape)

    def describe(self) -> str:
        """Return the number of images in one line."""
        return f"{self.name}: {len(self):,} images of {list(self.images.shape[1:])}"

    def _check(self) -> None:
        if not len(self.images):
            raise UserError(f"{self.name} is empty", why="it holds no images")
        if len(self.images) != len(self.labels):
            raise UserError(
                f"{self.name} does not have one label per image",
                why=f"{len(self.images):,} images and {len(self.labels):,} labels",
            )
        if self.images.dtype.kind not in "uif":
            raise UserError(
                f"{self.name} holds no images", why=f"their dtype is {self.images.dtype}"
            )
        if math.prod(self.images.shape[1:]) != math.prod(self.input_shape):
            shape = list(self.images.shape[1:])
            raise UserError(
                f"the images of {self.name} do not fit the task",
                why=f"they are {shape} and {Setting('task.input_shape', self.input_shape)}",
                fix=f"write {Setting('task.input_shape', shape)}",
            )


class ImageFolder:
    """Images in files, one folder per class, read when they are needed.

    With ``on_corrupt=skip``, a file that is not an image is replaced by the next one that is, so
    that the numbers of all other samples stay the same. A label is an index into the classes.
    """

    def __init__(
        self,
        folder: Path,
        input_shape: tuple[int, ...],
        input_name: str,
        num_classes: int | None,
        on_corrupt: OnCorrupt,
    ) -> None:
        self.folder, self.input_shape, self.input_name = folder, tuple(input_shape), input_name
        self.name = str(Setting("data.path", str(folder)))
        if len(input_shape) != 3 or input_shape[2] not in (1, 3):
            raise UserError(
                f"images cannot be resized to {Setting('task.input_shape', input_shape)}",
                fix="write height, width and channels (1 or 3), such as "
                f"{Setting('task.input_shape', (32, 32, 3))}",
            )
        self.classes = sorted(
            f.name for f in folder.iterdir() if f.is_dir() and not f.name.startswith(".")
        )
        if not self.classes:
            raise UserError(
                f"{self.name} has no classes",
                why="there are no folders in it",
                fix="put the images of each class into a folder of their own",
            )
        listed = [list_files(str(folder / name), ENDINGS) for name in self.classes]
        self.files = [file for files in listed for file in files]
        self._labels = np.repeat(np.arange(len(listed), dtype=np.int32), [len(f) for f in listed])
        check_labels(self._labels, num_classes, self.name)
        self._corrupt = CorruptRecords(on_corrupt)
        _import_pillow()

    def __len__(self) -> int:
        return len(self.files)

    def rows(self, ids: NDArray[np.int64]) -> HostBatch:
        """Return float32 images from 0 to 1, and int32 ``label``."""
        read = [self._read(int(number)) for number in ids]
        labels = self._labels[[number for number, _ in read]]
        return {self.input_name: np.stack([image for _, image in read]), "label": labels}

    def fingerprint(self) -> str:
        """Return a fingerprint of the files' names and sizes."""
        facts = [(str(f.relative_to(self.folder)), f.stat().st_size) for f in self.files]
        return fingerprint_of("image folder", facts, self.input_shape)

    def describe(self) -> str:
        """Return the number of images in one line."""
        line = f"{self.name}: {len(self):,} images of {len(self.classes)} classes"
        return "; ".join(filter(None, [line, self._corrupt.summary()]))

    def _read(self, number: int) -> tuple[int, NDArray[np.float32]]:
        for place in range(number, number + len(self.files)):
            file = self.files[place % len(self.files)]
            try:
                return place % len(self.files), _open(file, self.input_shape)
            except (OSError, ValueError, SyntaxError) as error:
                # Pillow raises a SyntaxError for some broken files.
                first = not self._corrupt.count
                self._corrupt.add(str(file), f"it is not a complete image: {error}")
                if first:
                    self._corrupt.warn()
        raise UserError(f"{self.name} is empty", why="no file is a complete image")


def check_labels(labels: NDArray[Any], num_classes: int | None, name: str) -> None:
    """Refuse labels the model has no output for."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UserError(
            f"the labels of {name} are not integers, one per image",
            why=f"they are {labels.dtype}{list(labels.shape)}",
        )
    highest = int(labels.max())
    if labels.min() < 0 or (num_classes is not None and highest >= num_classes):
        wrong = int(labels.min()) if labels.min() < 0 else highest
        raise UserError(
            f"{name} has the label {wrong}, which the model does not know",
            why=f"labels are from 0 to {(num_classes or 2**31) - 1}",
            fix=f"write {Setting('model.num_classes', highest + 1)} or more",
        )


def _open(file: Path, shape: tuple[int, ...]) -> NDArray[np.float32]:
    height, width, channels = shape
    with _import_pillow().open(file) as image:
        pixels = image.convert("L" if channels == 1 else "RGB").resize((width, height))
    return np.asarray(pixels, np.float32).reshape(shape) / np.float32(255)


def _named(arrays: dict[str, Any], names: Sequence[str], source: str) -> Any:
    for name in names:
        if name in arrays:
            return arrays[name]
    raise UserError(
        f"{source} has no array `{names[0]}`",
        why=f"its arrays are {', '.join(arrays) or 'none'}",
        fix=f"name it {', '.join(names[:-1])} or {names[-1]}",
    )


def _import_pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_package("a folder of images", "pillow", "images") from error
    return Image
