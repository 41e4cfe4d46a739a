"""How well a model predicts text: nats and bits per token and byte, every token exactly once."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from numpy.typing import NDArray

from meshwright.data.tokenizer import Tokens
from meshwright.errors import UserError
from meshwright.generation.make_decoder import make_decoder
from meshwright.generation.model_facts import vocabulary_of
from meshwright.generation.row_placement import RowPlacement, placement_of
from meshwright.generation.token_decoder import LATER, SplitModel, split_model
from meshwright.text.units import counted

LOGIT_BYTES = 2**28
"""Logits of a batch, in float32, take no more than this per device, if one row does not."""

_Window = tuple[Tokens, NDArray[np.bool_]]
"""What the model sees at once, and which of it counts."""


@dataclass(frozen=True)
class TextScore:
    """How well a model predicts documents.

    Attributes:
        documents: how many.
        tokens: tokens that were predicted, each once.
        first_tokens: tokens that were not, because nothing comes before them.
        bytes: of the text; None if it is not known.
        nats: the sum of -log p over the tokens.
    """

    documents: int
    tokens: int
    first_tokens: int
    bytes: int | None
    nats: float

    def to_json(self) -> dict[str, Any]:
        """Return all numbers."""
        per_token, per_byte = self.nats / self.tokens, self.nats / (self.bytes or math.nan)
        return {
            **asdict(self),
            "nats_per_token": per_token,
            "bits_per_token": per_token / math.log(2),
            "nats_per_byte": per_byte,
            "bits_per_byte": per_byte / math.log(2),
            "perplexity": math.exp(min(per_token, 700.0)),
        }

    def __str__(self) -> str:
        """Return the numbers in two lines."""
        found = self.to_json()
        nats, bits = found["nats_per_byte"], found["bits_per_byte"]
        of_bytes = f", {nats:.4f} nats and {bits:.4f} bits a byte"
        return (
            f"{found['nats_per_token']:.4f} nats and {found['bits_per_token']:.4f} bits a token"
            f"{of_bytes if self.bytes else ''}, perplexity {found['perplexity']:.2f}\n"
            f"{counted(self.tokens, 'token')} of {counted(self.documents, 'document')}, each once; "
            f"{self.first_tokens:,} more had nothing before them"
        )


def windows(tokens: Tokens, length: int, stride: int) -> Iterator[tuple[Tokens, int]]:
    """Yield what the model sees of a document at once, and from where on its tokens are counted.

    Each token but the first is counted exactly once.
    """
    done = 1
    for start in range(0, len(tokens), stride):
        part = tokens[start : start + length]
        if start + len(part) > done:
            yield part, done - start
            done = start + len(part)


def score_documents(
    model: nnx.Module | SplitModel,
    documents: Sequence[Tokens],
    *,
    length: int,
    stride: int | None = None,
    num_bytes: int | None = None,
    placement: RowPlacement | None = None,
    learned: Sequence[NDArray[np.bool_]] | None = None,
) -> TextScore:
    """Sum -log p over every token of documents that has one before it.

    Args:
        model: maps tokens [B, T] to logits [B, T, V].
        documents: their tokens.
        length: the tokens that the model sees at once.
        stride: by how much windows of longer documents move; half their length by default.
        num_bytes: of their text.
        placement: where rows are; by default where the weights are.
        learned: by document, which of its tokens count; all by default.
    """
    stride = stride or max(1, length // 2)
    if not 1 <= stride < length:
        raise UserError(
            f"a stride of {stride} does not fit windows of {length} tokens",
            why="each window must overlap the one before, or tokens have nothing before them",
            fix=f"write a stride from 1 to {length - 1}",
        )
    longest = min(length, max(map(len, documents), default=0))
    learned = [np.ones(len(tokens), bool) for tokens in documents] if learned is None else learned
    parts = [
        (window, np.where(np.arange(len(own)) < first, False, own))
        for tokens, mask in zip(documents, learned, strict=True)
        for (window, first), (own, _) in zip(
            windows(tokens, length, stride), windows(mask, length, stride), strict=True
        )
    ]
    if not parts:
        raise UserError("there is nothing to predict", why="no document has two tokens")
    split = model if isinstance(model, SplitModel) else split_model(model)
    placement = placement or placement_of(split.weights)
    placement, weights, _ = placement.place(split)
    split = replace(split, weights=weights)
    most = max(1, LOGIT_BYTES // (4 * longest * vocabulary_of(split, longest))) * placement.parts
    run, nats = jax.jit(partial(_nats, split.logits_of, placement)), 0.0
    exact, by_length = _needs_exact(split, longest), dict[int, list[_Window]]()
    for part in parts:
        by_length.setdefault(len(part[0]) if exact else longest, []).append(part)
    for size, group in by_length.items():
        rows = min(most, -(-len(group) // placement.parts) * placement.parts)
        for start in range(0, len(group), rows):
            tokens = np.zeros((rows, size), np.int32)
            included = np.zeros((rows, size), bool)
            for row, (own, counts) in enumerate(group[start : start + rows]):
                tokens[row, : len(own)], included[row, : len(own)] = own, counts
            nats += float(np.asarray(run(split.weights, tokens, included), np.float64).sum())
    firsts = sum(int(mask[:1].sum()) for mask in learned)
    total = sum(int(mask.sum()) for mask in learned)
    return TextScore(len(documents), total - firsts, firsts, num_bytes, nats)


def _needs_exact(model: SplitModel, length: int) -> bool:
    """Whether padding would change scores; refuses a model that sees what it should predict."""
    decoder = make_decoder(model, length)
    if decoder.sees == LATER:
        raise UserError(
            f"{model.structure.name} cannot be scored",
            why=f"{decoder.reason}, and those are what it should predict",
            fix="mask later positions in the model, as a decoder does",
        )
    return bool(decoder.sees)


def _nats(
    logits_of: Any, placement: RowPlacement, weights: Any, tokens: Array, counted: Array
) -> Array:
    """Return the sum of -log p of the counted tokens of each row."""
    tokens, counted = placement.rows((tokens, counted))
    logits = logits_of(weights, tokens)[:, :-1]
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    own = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    nats = jax.nn.logsumexp(logits, axis=-1) - own
    return placement.whole(jnp.where(counted[:, 1:], nats, 0).sum(axis=1))
