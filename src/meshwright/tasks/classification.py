"""Classification: one label per sample."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jax import Array

from meshwright.tasks.task import (
    Batch,
    Metrics,
    cross_entropy,
    is_correct,
    read_field,
    read_weights,
    weigh,
)
from meshwright.weighted import Weighted


@dataclass(frozen=True, kw_only=True)
class Classification:
    """Cross entropy of class logits [B, num_classes] against integer labels.

    A batch holds ``image`` or ``x`` [B, ...], ``label`` int [B], and optionally ``mask`` [B]: how
    much each sample counts.

    Attributes:
        input_name: the field the example and synthetic batches hold, ``image`` or ``x``.
        input_shape: shape of one sample.
        num_classes: number of classes; labels are below it.
    """

    input_name: str = "image"
    input_shape: tuple[int, ...] = (28, 28, 1)
    num_classes: int = 10

    def loss(self, model: Callable[..., Array], batch: Batch) -> tuple[Weighted, Metrics]:
        """Return nats per sample and the metric ``accuracy``."""
        logits = model(read_field(batch, "image", "x"))
        labels = read_field(batch, "label")
        nats = cross_entropy(logits, labels)
        weights = read_weights(batch, nats)
        return weigh(nats, weights), {"accuracy": weigh(is_correct(logits, labels), weights)}

    def example_batch(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of the input, float32 [B, ...], and of ``label``, int32 [B]."""
        return {
            self.input_name: jax.ShapeDtypeStruct((batch_size, *self.input_shape), np.float32),
            "label": jax.ShapeDtypeStruct((batch_size,), np.int32),
        }

    def synthetic_batch(self, seed: int, batch_size: int) -> dict[str, np.ndarray]:
        """Return one fixed random pattern per class under noise of the same strength."""
        random = np.random.default_rng(seed)
        label = random.integers(self.num_classes, size=batch_size)
        inputs = random.standard_normal((batch_size, *self.input_shape), np.float32)
        for sample, number in zip(inputs, label, strict=True):
            # From the class alone: every batch must have the same classes, of which it may see few.
            sample += np.random.default_rng(number).standard_normal(self.input_shape, np.float32)
        return {self.input_name: inputs, "label": label.astype(np.int32)}
