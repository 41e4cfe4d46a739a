"""Generated digits: 28 × 28 images of 0 to 9, each slightly different; nothing to download."""

import math

import numpy as np
from numpy.typing import NDArray

from meshwright.data.fingerprints import fingerprint_of
from meshwright.data.order import mix
from meshwright.data.protocols import HostBatch
from meshwright.errors import Setting, UserError

SIDE = 28
NUM_DIGITS = 20_000

_GLYPHS = (
    "01110100011001110101110011000101110",
    "00100011000010000100001000010001110",
    "01110100010000100010001000100011111",
    "11111000100010000010000011000101110",
    "00010001100101010010111110001000010",
    "11111100001111000001000011000101110",
    "00110010001000011110100011000101110",
    "11111000010001000100010000100001000",
    "01110100011000101110100011000101110",
    "01110100011000101111000010001001100",
)
"""The digits on a grid of 7 rows by 5 columns."""


class DigitSource:
    """Images of digits, shifted, rotated, scaled and noisy; sample i is always the same.

    The shape of an image has 784 elements.
    """

    def __init__(
        self,
        *,
        input_shape: tuple[int, ...] = (SIDE, SIDE, 1),
        input_name: str = "image",
        num_samples: int = NUM_DIGITS,
    ) -> None:
        if math.prod(input_shape) != SIDE * SIDE:
            raise UserError(
                f"digits do not fit {Setting('task.input_shape', input_shape)}",
                why=f"an image has {SIDE} × {SIDE} = {SIDE * SIDE} elements",
                fix=f"write {Setting('task.input_shape', (SIDE, SIDE, 1))}, or use other data",
            )
        if num_samples < 1:
            raise UserError(
                "the dataset is empty", why=str(Setting("data.num_samples", num_samples))
            )
        self.input_shape, self.input_name = tuple(input_shape), input_name
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def rows(self, ids: NDArray[np.int64]) -> HostBatch:
        """Return float32 images from 0 to 1, and int32 ``label``."""
        labels = np.minimum(_uniform(ids, 0) * 10, 9).astype(np.int32)
        pixels = np.arange(SIDE * SIDE, dtype=np.uint64)
        noise = _to_unit(mix(mix(ids.astype(np.uint64) + np.uint64(99))[:, None] + pixels))
        images = _draw(ids, labels) + 0.15 * noise
        images = np.clip(images, 0, 1).astype(np.float32).reshape(len(ids), *self.input_shape)
        return {self.input_name: images, "label": labels}

    def fingerprint(self) -> str:
        """Return a fingerprint of the number and shape of the images."""
        return fingerprint_of("digits", len(self), self.input_shape, self.input_name)

    def describe(self) -> str:
        """Return the number of images in one line."""
        return f"{len(self):,} generated digits"


def _draw(ids: NDArray[np.int64], labels: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return the strokes: each pixel is looked up in its glyph by an inverse affine map."""
    spread = [2 * _uniform(ids, number)[:, None] - 1 for number in range(1, 6)]
    angle, scale = 0.25 * spread[0], 2.9 * (1 + 0.15 * spread[1])
    slant, across, down = 0.2 * spread[2], 3 * spread[3], 2 * spread[4]
    pixel = np.arange(SIDE * SIDE)
    y = pixel // SIDE - (SIDE - 1) / 2 - down
    x = pixel % SIDE - (SIDE - 1) / 2 - across
    turned_x = (np.cos(angle) * x + np.sin(angle) * y) / scale
    turned_y = (np.cos(angle) * y - np.sin(angle) * x) / scale
    return _look_up(labels, turned_y + 3, turned_x + slant * turned_y + 2)


def _look_up(
    labels: NDArray[np.int32], row: NDArray[np.float64], column: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Interpolate the glyphs bilinearly between grid points; 0 outside."""
    glyphs = np.zeros((10, 9, 7))
    glyphs[:, 1:-1, 1:-1] = np.array([[int(dot) for dot in g] for g in _GLYPHS]).reshape(10, 7, 5)
    row, column = np.clip(row + 1, 0, 7.999), np.clip(column + 1, 0, 5.999)
    top, left = row.astype(int), column.astype(int)
    below, right = row - top, column - left
    label = labels[:, None]
    upper = glyphs[label, top, left] * (1 - right) + glyphs[label, top, left + 1] * right
    lower = glyphs[label, top + 1, left] * (1 - right) + glyphs[label, top + 1, left + 1] * right
    return upper * (1 - below) + lower * below


def _uniform(ids: NDArray[np.int64], number: int) -> NDArray[np.float64]:
    """Return a fixed pseudorandom number from 0 to 1 per sample, different for each ``number``."""
    return _to_unit(mix(mix(ids.astype(np.uint64) + np.uint64(7)) + np.uint64(number << 32)))


def _to_unit(values: NDArray[np.uint64]) -> NDArray[np.float64]:
    return (values >> np.uint64(11)) / 2.0**53
