"""ViT: patches cut where they should be, classified in any size that divides."""

import numpy as np
import pytest
from flax import nnx

from meshwright.models.vit import ViT, patchify


def test_patchify_equals_slicing():
    image = np.random.default_rng(0).normal(size=(2, 6, 4, 3))
    expected = [
        image[:, row : row + 2, column : column + 2].reshape(2, -1)
        for row in (0, 2, 4)
        for column in (0, 2)
    ]
    np.testing.assert_array_equal(patchify(image, 2), np.stack(expected, axis=1))


def test_without_positions_the_order_of_patches_does_not_matter(fill):
    sizes = {"image_size": 4, "patch_size": 2, "num_blocks": 1, "hidden_size": 8}
    model = fill(lambda: ViT(**sizes, rngs=nnx.Rngs(0)))
    model.eval()
    run = nnx.jit(lambda model, image: model(image))
    image = np.random.default_rng(0).normal(size=(2, 4, 4, 1)).astype(np.float32)
    swapped = np.concatenate([image[:, 2:], image[:, :2]], axis=1)
    assert np.abs(run(model, swapped) - run(model, image)).max() > 1e-4
    model.positions[...] = 0 * model.positions[...]
    np.testing.assert_allclose(run(model, swapped), run(model, image), atol=1e-5)


def test_patches_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="image_size=28 does not divide by patch_size=8"):
        nnx.eval_shape(lambda: ViT(patch_size=8, rngs=nnx.Rngs(0)))
