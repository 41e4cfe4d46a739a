"""Classification: the mean over samples, masked where the batch is padded."""

import jax
import numpy as np
import pytest

from meshwright.errors import UserError
from meshwright.tasks.classification import Classification

pytestmark = pytest.mark.quick

LOGITS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
LABELS = np.array([0, 2, 1, 1, 0], np.int32)
NATS = np.log(np.exp(LOGITS).sum(axis=-1)) - LOGITS[np.arange(5), LABELS]
TASK = Classification(input_name="x", input_shape=(3,), num_classes=3)


run = jax.jit(lambda batch: TASK.loss(lambda x: x, batch))


@pytest.mark.parametrize("name", ["image", "x"])
def test_equals_numpy(name):
    loss, metrics = run({name: LOGITS, "label": LABELS})
    np.testing.assert_allclose(loss.mean, NATS.mean(), rtol=1e-6)
    assert metrics["accuracy"].total == (LOGITS.argmax(axis=-1) == LABELS).sum()
    assert metrics["accuracy"].weight == 5


def test_masked_samples_do_not_count():
    mask = np.array([1, 1, 0, 1, 0], bool)
    loss, _ = run({"x": LOGITS, "label": LABELS, "mask": mask})
    np.testing.assert_allclose(loss.mean, NATS[mask].mean(), rtol=1e-6)


def test_missing_label_is_explained():
    with pytest.raises(UserError, match="no field 'label'"):
        run({"x": LOGITS})


def test_synthetic_classes_can_be_told_apart_across_batches():
    task = Classification()
    learned, fresh = task.synthetic_batch(1, 256), task.synthetic_batch(2, 64)
    means = np.stack([learned["image"][learned["label"] == c].mean(axis=0) for c in range(10)])
    distance = ((fresh["image"][:, None] - means) ** 2).sum(axis=(2, 3, 4))
    assert (distance.argmin(axis=1) == fresh["label"]).mean() > 0.9
