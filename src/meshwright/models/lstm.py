"""LSTM: a recurrent language model."""

from typing import cast

from flax import nnx
from jax import Array


class LSTM(nnx.Module):
    """Embedding, one LSTM layer over time, linear head.

    Args:
        vocab_size: V, tokens in the vocabulary.
        embed_size: width of an embedded token.
        hidden_size: width of the recurrent state.
        rngs: streams ``params`` and ``carry``.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 1024,
        embed_size: int = 128,
        hidden_size: int = 256,
        rngs: nnx.Rngs,
    ) -> None:
        self.embed = nnx.Embed(vocab_size, embed_size, rngs=rngs)
        self.rnn = nnx.RNN(nnx.LSTMCell(embed_size, hidden_size, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(hidden_size, vocab_size, rngs=rngs)

    def __call__(self, tokens: Array) -> Array:
        """Return next-token logits [B, T, V] for tokens [B, T]."""
        # Typed as a union because nnx.RNN can also return its last carry.
        return self.head(cast(Array, self.rnn(self.embed(tokens))))
