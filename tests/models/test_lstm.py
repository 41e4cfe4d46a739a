"""LSTM: the recurrence of the paper."""

import numpy as np
from flax import nnx

from meshwright.models.lstm import LSTM


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_equals_the_recurrence_in_numpy(fill):
    sizes = {"vocab_size": 11, "embed_size": 4, "hidden_size": 3}
    model = fill(lambda: LSTM(**sizes, rngs=nnx.Rngs(0)))
    tokens = np.random.default_rng(0).integers(11, size=(2, 5)).astype(np.int32)
    cell = model.rnn.cell
    wide = lambda variable: np.asarray(variable[...], np.float64)  # noqa: E731

    def gate(inputs, hidden, x, h):
        return x @ wide(inputs.kernel) + h @ wide(hidden.kernel) + wide(hidden.bias)

    c = h = np.zeros((2, 3))
    expected = []
    for t in range(5):
        x = wide(model.embed.embedding)[tokens[:, t]]
        i, f, o = (
            sigmoid(gate(*layers, x, h))
            for layers in ((cell.ii, cell.hi), (cell.if_, cell.hf), (cell.io, cell.ho))
        )
        c = f * c + i * np.tanh(gate(cell.ig, cell.hg, x, h))
        h = o * np.tanh(c)
        expected.append(h @ wide(model.head.kernel) + wide(model.head.bias))
    got = nnx.jit(lambda model, tokens: model(tokens))(model, tokens)
    np.testing.assert_allclose(got, np.stack(expected, axis=1), atol=1e-5)
