"""ViT: patches cut where they should be, classified in any size that divides."""

import math

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
    with pytest.raises(ValueError, match="image_size=28 is not divisible by patch_size=8"):
        nnx.eval_shape(lambda: ViT(patch_size=8, rngs=nnx.Rngs(0)))


def test_the_published_form_equals_numpy(fill):
    sizes = {"image_size": 6, "patch_size": 3, "channels_in": 2, "hidden_size": 8, "num_heads": 2}
    published = {"mlp_size": 12, "class_token": True, "norm_epsilon": 1e-3, "exact_gelu": True}
    model = fill(lambda: ViT(**sizes, **published, num_classes=5, rngs=nnx.Rngs(0)))
    model.eval()
    image = np.random.default_rng(1).normal(size=(3, 6, 6, 2)).astype(np.float32)
    found = nnx.jit(lambda model, image: model(image))(model, image)
    np.testing.assert_allclose(found, published_vit(params_of(model), image), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "rate",
    ["dropout", pytest.param("embedding_dropout", marks=pytest.mark.full), "attention_dropout"],
)
def test_every_rate_of_dropout_changes_training_alone(fill, rate):
    sizes = {"image_size": 4, "patch_size": 2, "num_blocks": 1, "hidden_size": 8}
    model = fill(lambda: ViT(**sizes | {"dropout": 0.0, rate: 0.5}, rngs=nnx.Rngs(0)))
    run = nnx.jit(lambda model, image: model(image))
    image = np.random.default_rng(0).normal(size=(2, 4, 4, 1)).astype(np.float32)
    assert np.abs(run(model, image) - run(model, image)).max() > 0
    model.eval()
    assert np.abs(run(model, image) - run(model, image)).max() == 0


def params_of(model):
    paths = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): np.float64(leaf[...]) for path, leaf in paths}


def published_vit(params, image):
    """Follow the paper line by line, in float64: one image, patch, block and head at a time."""
    erf = np.vectorize(math.erf)

    def norm(x, name):
        centered = x - x.mean(-1, keepdims=True)
        deviation = np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-3)
        return centered / deviation * params[f"{name}.scale"] + params[f"{name}.bias"]

    def attend(x, name):
        total = params[f"{name}.out.bias"]
        for head in range(2):
            query, key, value = (
                x @ params[f"{name}.{part}.kernel"][:, head] + params[f"{name}.{part}.bias"][head]
                for part in ("query", "key", "value")
            )
            weights = np.exp(query @ key.T / np.sqrt(4))
            weights /= weights.sum(-1, keepdims=True)
            total = total + weights @ value @ params[f"{name}.out.kernel"][head]
        return total

    def dense(x, name):
        return x @ params[f"{name}.kernel"] + params[f"{name}.bias"]

    logits = []
    for one in image:
        corners = [(row, column) for row in (0, 3) for column in (0, 3)]
        patches = np.stack([one[r : r + 3, c : c + 3].ravel() for r, c in corners])
        x = np.concatenate([params["class_token"], dense(patches, "embed")]) + params["positions"]
        for block in ("blocks.0", "blocks.1"):
            x = x + attend(norm(x, f"{block}.attention_norm"), f"{block}.attention")
            wide = dense(norm(x, f"{block}.mlp_norm"), f"{block}.up")
            x = x + dense(wide * (1 + erf(wide / np.sqrt(2))) / 2, f"{block}.down")
        logits.append(dense(norm(x, "norm")[0], "head"))
    return np.stack(logits)


def test_todays_form_has_no_class_token():
    model = nnx.eval_shape(lambda: ViT(rngs=nnx.Rngs(0)))
    assert model.class_token is None
    assert model.positions.shape == (16, 64)
