"""Gemma 3, Llama 3 and Qwen 3: their published formulas in float64, documents and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from quick import quick_options

from meshwright.models import build_model

LENGTH = 12
TOKENS = np.random.default_rng(0).integers(32, size=(2, LENGTH)).astype(np.int32)
SHARED = {
    "vocab_size": 32,
    "context_length": LENGTH,
    "hidden_size": 12,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_size": 20,
}
SIZES = {
    "gemma3": SHARED
    | {"num_blocks": 4, "head_dim": 6, "sliding_window": 4, "global_every": 3}
    | {"rope_base": 1000.0, "rope_local_base": 100.0, "rope_factor": 8.0, "query_scale": 10.0},
    # Of its four frequencies, one is kept, one blended and two are divided.
    "llama3": SHARED
    | {"num_blocks": 2, "head_dim": 8, "rope_base": 1e4, "rope_factor": 8.0}
    | {"rope_original_context": 128, "tied_embeddings": False},
    "qwen3": SHARED | {"num_blocks": 2, "head_dim": 6, "rope_base": 1000.0},
}
KINDS = list(SIZES)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model(kind, fill):
    return fill(lambda: build_model(kind, **SIZES[kind], rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def forward(model):
    graphdef, state = nnx.split(model)
    run = lambda tokens, **more: nnx.merge(graphdef, state)(tokens, **more)  # noqa: E731
    return jax.jit(run, compiler_options=quick_options())


# The formulas of the papers and of the published code, one position and one head at a time.


def rms_norm(x, scale, epsilon):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def rotate(x, position, frequencies):
    """Rotate pairs (x[i], x[i + C/2]), seen as complex numbers."""
    pairs = x[: len(x) // 2] + 1j * x[len(x) // 2 :]
    pairs = pairs * np.exp(1j * position * frequencies)
    return np.concatenate([pairs.real, pairs.imag])


def plain_frequencies(base, head_dim):
    return np.array([base ** (-2 * i / head_dim) for i in range(head_dim // 2)])


def llama3_frequencies(base, head_dim, factor, original, low=1.0, high=4.0):
    frequencies = plain_frequencies(base, head_dim)
    for i, frequency in enumerate(frequencies):
        wavelength = 2 * np.pi / frequency
        if wavelength > original / low:
            frequencies[i] = frequency / factor
        elif wavelength > original / high:
            smooth = (original / wavelength - low) / (high - low)
            frequencies[i] = (1 - smooth) * frequency / factor + smooth * frequency
    return frequencies


def attention(weights, x, norm, frequencies, head_dim, window, scale):
    """One row: x [T, D]."""

    def heads(name):
        return (x @ weights[name]["kernel"]).reshape(len(x), -1, head_dim)

    query, key, value = heads("query"), heads("key"), heads("value")
    if "query_norm" in weights:
        query = norm(query, weights["query_norm"]["scale"])
        key = norm(key, weights["key_norm"]["scale"])
    mixed = np.zeros(query.shape)
    for t, h in np.ndindex(*query.shape[:2]):
        shared = h * key.shape[1] // query.shape[1]
        seen = range(max(0, t - window + 1), t + 1)
        rotated = rotate(query[t, h], t, frequencies)
        scores = [rotated @ rotate(key[s, shared], s, frequencies) for s in seen]
        exp = np.exp(np.array(scores) / np.sqrt(scale))
        mixed[t, h] = exp / exp.sum() @ value[seen, shared]
    return mixed.reshape(len(x), -1) @ weights["out"]["kernel"]


def gated(weights, x, activation):
    gate, up = (x @ weights[name]["kernel"] for name in ("gate", "up"))
    return activation(gate) * up @ weights["down"]["kernel"]


def silu(x):
    return x / (1 + np.exp(-x))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gemma3_row(weights, row, sizes):
    def norm(x, scale):
        return rms_norm(x, 1 + scale, 1e-6)

    head_dim = sizes["head_dim"]
    x = weights["tokens"]["embedding"][row] * np.sqrt(sizes["hidden_size"])
    for n, block in weights["blocks"].items():
        is_global = (n + 1) % sizes["global_every"] == 0
        base = sizes["rope_base"] if is_global else sizes["rope_local_base"]
        frequencies = plain_frequencies(base, head_dim) / (sizes["rope_factor"] ** is_global)
        window = len(row) if is_global else sizes["sliding_window"]
        y = norm(x, block["attention_norm"]["scale"])
        y = attention(
            block["attention"], y, norm, frequencies, head_dim, window, sizes["query_scale"]
        )
        x = x + norm(y, block["attention_out_norm"]["scale"])
        y = gated(block["mlp"], norm(x, block["mlp_norm"]["scale"]), gelu_tanh)
        x = x + norm(y, block["mlp_out_norm"]["scale"])
    return norm(x, weights["norm"]["scale"]) @ weights["tokens"]["embedding"].T


def llama3_row(weights, row, sizes):
    frequencies = llama3_frequencies(
        sizes["rope_base"], sizes["head_dim"], sizes["rope_factor"], sizes["rope_original_context"]
    )
    x = pre_norm_blocks(weights, row, sizes, frequencies, epsilon=1e-5)
    return x @ weights["head"]["kernel"]


def qwen3_row(weights, row, sizes):
    frequencies = plain_frequencies(sizes["rope_base"], sizes["head_dim"])
    x = pre_norm_blocks(weights, row, sizes, frequencies, epsilon=1e-6)
    return x @ weights["tokens"]["embedding"].T


def pre_norm_blocks(weights, row, sizes, frequencies, epsilon):
    def norm(x, scale):
        return rms_norm(x, scale, epsilon)

    head_dim = sizes["head_dim"]
    x = weights["tokens"]["embedding"][row]
    for block in weights["blocks"].values():
        y = norm(x, block["attention_norm"]["scale"])
        attended = attention(
            block["attention"], y, norm, frequencies, head_dim, len(row), scale=head_dim
        )
        x = x + attended
        x = x + gated(block["mlp"], norm(x, block["mlp_norm"]["scale"]), silu)
    return norm(x, weights["norm"]["scale"])


ROWS = {"gemma3": gemma3_row, "llama3": llama3_row, "qwen3": qwen3_row}


def test_logits_are_those_of_the_published_formulas(kind, model, forward):
    weights = jax.tree.map(
        lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(nnx.state(model, nnx.Param))
    )
    expected = np.stack([ROWS[kind](weights, row, SIZES[kind]) for row in TOKENS])
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(forward(TOKENS), expected, atol=2e-5 * np.abs(expected).max())


def test_later_tokens_do_not_change_earlier_logits(forward):
    changed = TOKENS.copy()
    changed[:, 7] = (changed[:, 7] + 1) % 32
    before, after = forward(TOKENS), forward(changed)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert np.all(np.abs(before[:, 7:] - after[:, 7:]).max(axis=-1) > 1e-6)


def test_a_packed_document_has_the_logits_it_has_alone(forward):
    segments = np.array([[1] * 5 + [2] * 7] * 2, dtype=np.int32)
    positions = np.array([[*range(5), *range(7)]] * 2, dtype=np.int32)
    packed = forward(TOKENS, segment_ids=segments, positions=positions)
    alone = forward(np.roll(TOKENS, -5, axis=1))
    np.testing.assert_allclose(packed[:, 5:], alone[:, :7], atol=2e-5)
    np.testing.assert_allclose(packed[:, :5], forward(TOKENS)[:, :5], atol=2e-5)


def test_half_precision_keeps_positions_and_statistics_in_float32(kind):
    """Without these, positions past 256 would be rounded."""
    build = lambda: build_model(kind, **SIZES[kind], rngs=nnx.Rngs(0))  # noqa: E731

    def run(tokens):
        model = build()
        nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model)))
        model.tokens.dtype = jnp.bfloat16
        return model(tokens)

    closed = jax.make_jaxpr(run)(TOKENS)
    dtypes = {
        (eqn.primitive.name, eqn.invars[0].aval.dtype.name)
        for eqn in equations(closed.jaxpr)
        if eqn.primitive.name in ("cos", "sin", "exp", "sqrt", "dot_general")
    }
    assert ("dot_general", "float32") not in dtypes
    assert {dtype for name, dtype in dtypes if name != "dot_general"} == {"float32"}


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")
        ):
            if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                yield from equations(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize(
    ("sizes", "length", "message"),
    [
        ({"num_kv_heads": 3}, 4, "num_heads=4 is not divisible by num_kv_heads=3"),
        ({}, 13, "knows 12 positions, but the batch has 13 tokens"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(kind, sizes, length, message):
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    with pytest.raises(ValueError, match=message):
        nnx.eval_shape(
            lambda t: build_model(kind, **SIZES[kind] | sizes, rngs=nnx.Rngs(0))(t), tokens
        )


def test_the_lookup_of_the_padding_token_gives_no_gradient(fill):
    sizes = SIZES["gemma3"] | {"num_blocks": 1, "tied_embeddings": True}
    tokens = np.array([[5, 3, 5, 7]])

    def gradients(pad):
        """Of the embedding, through the lookup alone and through the tied model."""
        model = fill(lambda: build_model("gemma3", **sizes, pad_token_id=pad, rngs=nnx.Rngs(0)))
        graph, state = nnx.split(model)

        def both(state):
            through = [lambda model: model.embed(tokens), lambda model: model(tokens)]
            losses = [lambda s, f=f: jnp.square(f(nnx.merge(graph, s))).sum() for f in through]
            return [jax.grad(loss)(state)["tokens"]["embedding"][...] for loss in losses]

        found = jax.jit(both, compiler_options=quick_options())(state)
        return [np.asarray(each) for each in found]

    (lookup, tied), (usual, _) = gradients(5), gradients(None)
    assert np.abs(usual[5]).max() > 0
    np.testing.assert_array_equal(lookup, usual * (np.arange(32) != 5)[:, None])
    # The output layer still trains the row.
    assert np.abs(tied[5]).max() > 0


def test_decoders_drop_weights_of_attention(fill):
    sizes = SIZES["qwen3"] | {"num_blocks": 1, "attention_dropout": 0.5}
    model = fill(lambda: build_model("qwen3", **sizes, rngs=nnx.Rngs(0)))
    run = nnx.jit(lambda model, tokens: model(tokens))
    assert np.abs(run(model, TOKENS) - run(model, TOKENS)).max() > 0
    model.eval()
    assert np.abs(run(model, TOKENS) - run(model, TOKENS)).max() == 0
