"""Language modeling: predict every token from those before it."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jax import Array

from meshwright.errors import UserError
from meshwright.program.trace.keep_apart import accepted_names, asks_to_keep_apart, keep_apart
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
class LanguageModeling:
    """Next-token cross entropy; every token has the same weight.

    A batch holds ``tokens`` [B, T+1], or ``inputs`` and ``targets`` [B, T] already shifted.
    Optional fields:

    - ``mask`` [B, T]: how much each target counts;
    - ``segment_ids``, of the shape of ``tokens`` or ``inputs``: the number of the document each
      token belongs to, 0 for padding. With ``tokens``, targets in another document than their
      input do not count; with ``inputs``, ``mask`` has to say so, because the last target's
      document is not in the batch;
    - ``positions``, of the same shape: the position of each token within its document.

    Segment ids and positions are passed to models whose call takes ``segment_ids`` and
    ``positions``. If a model takes no segment ids, and all three fields are there, as of packed
    conversations, its attention is kept within documents in the program that a trainer traces.

    Attributes:
        vocab_size: number of tokens of the synthetic batches.
        context_length: T.
    """

    vocab_size: int = 1024
    context_length: int = 128

    def loss(self, model: Callable[..., Array], batch: Batch) -> tuple[Weighted, Metrics]:
        """Return nats per token (perplexity is exp of its mean) and the metric ``accuracy``."""
        inputs, targets = read_pair(batch)
        segments = batch.get("segment_ids")
        known = [name for name in ("segment_ids", "positions") if name in batch]
        given = {name: batch[name][:, : inputs.shape[1]] for name in known}
        if asks_to_keep_apart(model, batch):
            logits = keep_apart(model, inputs, **given)
        else:
            accepted = accepted_names(model, known) if known else []
            logits = model(inputs, **{name: given[name] for name in accepted})
        nats = cross_entropy(logits, targets)
        weights = read_weights(batch, nats)
        if segments is not None:
            weights = weights * within_document(segments, inputs)
        return weigh(nats, weights), {"accuracy": weigh(is_correct(logits, targets), weights)}

    def example_batch(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape of ``tokens``: int32 [B, T+1]."""
        return {"tokens": jax.ShapeDtypeStruct((batch_size, self.context_length + 1), np.int32)}

    def synthetic_batch(self, seed: int, batch_size: int) -> dict[str, np.ndarray]:
        """Return rows that count in steps of 1 to 4 from a random token, modulo the vocabulary."""
        random = np.random.default_rng(seed)
        start = random.integers(self.vocab_size, size=(batch_size, 1))
        stride = random.integers(1, 5, size=(batch_size, 1))
        tokens = (start + stride * np.arange(self.context_length + 1)) % self.vocab_size
        return {"tokens": tokens.astype(np.int32)}


def read_pair(batch: Batch) -> tuple[Array, Array]:
    """Return inputs [B, T] and the targets [B, T] one token ahead of them."""
    if "inputs" in batch:
        return batch["inputs"], read_field(batch, "targets")
    tokens = read_field(batch, "tokens", "inputs")
    return tokens[:, :-1], tokens[:, 1:]


def within_document(segments: Array, inputs: Array) -> Array:
    """Return where a target belongs to the document of its input: bool [B, T]."""
    batch_size, length = inputs.shape
    if segments.shape == (batch_size, length):
        return segments != 0
    if segments.shape == (batch_size, length + 1):
        return (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
    raise UserError(
        "the segment_ids do not fit the tokens",
        why=f"they have shape {segments.shape}, the inputs have {inputs.shape}",
        fix="give one document number per token",
    )
