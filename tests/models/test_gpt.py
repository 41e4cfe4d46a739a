"""GPT: the attention of the paper, causal, grouped or fused, and able to learn."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshwright.models.attention import attend, causal_mask, residual_std
from meshwright.models.gpt import GPT, Attention, FeedForward

SIZES = {
    "vocab_size": 32,
    "context_length": 8,
    "num_blocks": 2,
    "hidden_size": 16,
    "num_heads": 4,
}
TOKENS = np.random.default_rng(0).integers(32, size=(2, 8)).astype(np.int32)


@pytest.fixture(scope="module")
def model(fill):
    return fill(lambda: GPT(**SIZES, dropout=0.5, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def forward(model):
    graphdef, state = nnx.split(model)

    @jax.jit
    def run(tokens, segment_ids=None, positions=None):
        copy = nnx.merge(graphdef, state, copy=True)
        copy.eval()
        return copy(tokens, segment_ids=segment_ids, positions=positions)

    return run


@pytest.fixture(scope="module")
def double(model):
    """The same model in double precision, inside `jax.enable_x64`."""
    graphdef, state = nnx.split(model)

    def run(tokens, segment_ids=None, positions=None):
        wide = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, state)
        copy = nnx.merge(graphdef, wide)
        copy.eval()
        return np.asarray(copy(tokens, segment_ids=segment_ids, positions=positions))

    return run


def count_parameters(model):
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.mark.full
def test_parameter_count_of_gpt2_124m():
    sizes = {"vocab_size": 50257, "context_length": 1024, "num_blocks": 12}
    build = lambda: GPT(**sizes, hidden_size=768, num_heads=12, rngs=nnx.Rngs(0))  # noqa: E731
    assert count_parameters(nnx.eval_shape(build)) == 124_439_808


def test_defaults_are_gpt2_tiny():
    model = nnx.eval_shape(lambda: GPT(rngs=nnx.Rngs(0)))
    per_block = 12 * 256**2 + 13 * 256
    assert count_parameters(model) == (1024 + 128) * 256 + 4 * per_block + 2 * 256
    assert model.blocks[0].attention.num_heads == 4
    assert model.blocks[0].dropout.rate == 0.1


def test_untied_head_adds_one_kernel():
    build = lambda tied: GPT(**SIZES, tied_embeddings=tied, rngs=nnx.Rngs(0))  # noqa: E731
    tied, untied = (nnx.eval_shape(lambda t=tied: build(t)) for tied in (True, False))
    assert count_parameters(untied) - count_parameters(tied) == 16 * 32
    assert untied.vocabulary.head.kernel.shape == (16, 32)


def reference_attention(query, key, value, mask):
    """One query, one head at a time, in float64."""
    out = np.zeros(query.shape)
    group = query.shape[2] // key.shape[2]
    for b, t, h in np.ndindex(*query.shape[:3]):
        seen = np.flatnonzero(mask[b % len(mask), t])
        scores = key[b, seen, h // group] @ query[b, t, h] / np.sqrt(query.shape[-1])
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights / weights.sum() @ value[b, seen, h // group]
    return out


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_attend_equals_one_query_at_a_time(num_kv_heads):
    random = np.random.default_rng(1)
    query = random.normal(size=(2, 5, 4, 3))
    key, value = random.normal(size=(2, 2, 5, num_kv_heads, 3))
    mask = np.asarray(causal_mask(5))
    got = jax.jit(attend)(*(a.astype(np.float32) for a in (query, key, value)), mask)
    np.testing.assert_allclose(got, reference_attention(query, key, value, mask), atol=2e-6)


def test_attend_keeps_float64():
    random = np.random.default_rng(2)
    query, key, value = random.normal(size=(3, 1, 6, 2, 4))
    with jax.enable_x64(True):
        mask = np.asarray(causal_mask(6))
        got = np.asarray(jax.jit(attend)(query, key, value, mask))
    np.testing.assert_allclose(got, reference_attention(query, key, value, mask), atol=1e-14)


def test_later_tokens_do_not_change_earlier_logits(forward):
    changed = TOKENS.copy()
    changed[:, 5] = (changed[:, 5] + 1) % 32
    before, after = forward(TOKENS), forward(changed)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert np.all(np.abs(before[:, 5:] - after[:, 5:]).max(axis=-1) > 1e-6)


def test_packed_documents_do_not_see_each_other(forward):
    segments = np.array([[1] * 3 + [2] * 5] * 2, dtype=np.int32)
    changed = TOKENS.copy()
    changed[:, 0] = (changed[:, 0] + 1) % 32
    before = forward(TOKENS, segment_ids=segments)
    after = forward(changed, segment_ids=segments)
    np.testing.assert_array_equal(before[:, 3:], after[:, 3:])
    assert np.all(np.abs(before[:, :3] - after[:, :3]).max(axis=-1) > 1e-6)


@pytest.mark.full
def test_a_packed_document_has_the_logits_it_has_alone(double):
    segments = np.array([[1] * 3 + [2] * 5] * 2, dtype=np.int32)
    positions = np.array([[0, 1, 2, 0, 1, 2, 3, 4]] * 2, dtype=np.int32)
    # In double precision: the same sums run over other lanes, which round differently.
    with jax.enable_x64(True):
        packed = double(TOKENS, segment_ids=segments, positions=positions)
        alone = double(np.roll(TOKENS, -3, axis=1))
    np.testing.assert_allclose(packed[:, 3:], alone[:, :5], rtol=0, atol=1e-12)


def test_one_document_equals_no_documents(forward):
    ones = np.ones_like(TOKENS)
    np.testing.assert_allclose(forward(TOKENS, segment_ids=ones), forward(TOKENS), atol=1e-6)


@pytest.fixture(scope="module")
def make_attention(fill):
    sizes = {"hidden_size": 16, "num_heads": 4, "out_std": 0.02}

    def make(*, num_kv_heads=4, qkv="separate"):
        build = partial(Attention, **sizes, num_kv_heads=num_kv_heads, qkv=qkv)
        return fill(lambda: build(rngs=nnx.Rngs(0)))

    return make


def copy_linear(source, target, change=lambda array: array):
    target.kernel[...] = change(np.asarray(source.kernel[...]))
    target.bias[...] = change(np.asarray(source.bias[...]))


def assert_same_function(*attentions):
    x = np.random.default_rng(4).normal(size=(2, 8, 16)).astype(np.float32)
    run = nnx.jit(lambda attention, x: attention(x, causal_mask(8)))
    first, second = (run(attention, x) for attention in attentions)
    assert np.abs(first).max() > 0.1
    np.testing.assert_allclose(first, second, atol=1e-6)


def test_grouped_query_equals_full_attention_with_repeated_heads(make_attention):
    grouped, full = make_attention(num_kv_heads=2), make_attention()

    def repeat(array):
        heads = array.reshape(*array.shape[:-1], 2, 4)
        return np.repeat(heads, 2, axis=-2).reshape(*array.shape[:-1], 16)

    copy_linear(grouped.query, full.query)
    copy_linear(grouped.out, full.out)
    copy_linear(grouped.key, full.key, repeat)
    copy_linear(grouped.value, full.value, repeat)
    assert_same_function(grouped, full)


def test_fused_qkv_equals_separate_kernels(make_attention):
    separate, fused = make_attention(), make_attention(qkv="fused")
    parts = (separate.query, separate.key, separate.value)
    kernels = [np.asarray(part.kernel[...]).reshape(16, 4, 4) for part in parts]
    fused.qkv.kernel[...] = np.stack(kernels, axis=1)
    fused.qkv.bias[...] = np.stack([np.asarray(part.bias[...]).reshape(4, 4) for part in parts])
    copy_linear(separate.out, fused.out)
    assert_same_function(fused, separate)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 18}, "hidden_size=18 is not divisible by num_heads=4"),
        ({"num_kv_heads": 3}, "num_heads=4 is not divisible by num_kv_heads=3"),
        ({"num_kv_heads": 2, "qkv": "fused"}, "write qkv='separate'"),
    ],
)
def test_head_counts_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        nnx.eval_shape(lambda: GPT(**SIZES | sizes, rngs=nnx.Rngs(0)))


def test_rows_longer_than_the_context_are_refused():
    tokens = jax.ShapeDtypeStruct((1, 9), jnp.int32)
    with pytest.raises(ValueError, match="knows 8 positions, but the batch has 9 tokens"):
        nnx.eval_shape(lambda t: GPT(**SIZES, rngs=nnx.Rngs(0))(t), tokens)


def test_training_draws_new_dropout_in_every_call(model):
    run = nnx.jit(lambda model, tokens: model(tokens))
    assert np.abs(run(model, TOKENS) - run(model, TOKENS)).max() > 1e-3


def dropped_at(rate):
    """Which of the three rates makes two calls differ, where only one of them is above 0."""
    rates = dict.fromkeys(("dropout", "embedding_dropout", "attention_dropout"), 0.0)
    model = GPT(**SIZES | {"num_blocks": 1}, **rates | {rate: 0.5}, rngs=nnx.Rngs(0))
    mask = causal_mask(8)
    same = {
        "embedding_dropout": lambda: model.vocabulary.encode(TOKENS),
        "attention_dropout": lambda: model.blocks[0].attention(
            jnp.ones((2, 8, 16)) * jnp.arange(8)[:, None], mask, model.blocks[0].dropout.rngs
        ),
        "dropout": lambda: model.blocks[0].dropout(jnp.ones((2, 8, 16))),
    }
    found = [name for name, call in same.items() if np.abs(call() - call()).max() > 0]
    model.eval()
    assert all(np.abs(call() - call()).max() == 0 for call in same.values())
    return found


@pytest.mark.parametrize("rate", ["dropout", "embedding_dropout", "attention_dropout"])
def test_each_rate_of_dropout_has_its_place(rate):
    assert dropped_at(rate) == [rate]


def test_weights_of_attention_are_dropped_after_the_softmax():
    query, key, value = np.random.default_rng(0).normal(size=(3, 1, 8, 2, 4)).astype(np.float32)
    mask = causal_mask(8)
    seen = []
    attend(query, key, value, mask, dropout=lambda weights: seen.append(weights) or weights)
    np.testing.assert_allclose(seen[0].sum(-1), 1.0, rtol=1e-6)
    nothing = attend(query, key, value, mask, dropout=lambda weights: 0 * weights)
    np.testing.assert_array_equal(nothing, 0 * value)


def test_a_rate_for_attention_adds_no_state(model):
    with_rate = nnx.eval_shape(lambda: GPT(**SIZES, attention_dropout=0.5, rngs=nnx.Rngs(0)))
    paths = [[p for p, _ in nnx.to_flat_state(nnx.state(each))] for each in (with_rate, model)]
    assert paths[0] == paths[1]


def test_residual_writers_start_smaller_with_depth():
    assert residual_std(8) == 0.02 / 4
    rngs = nnx.Rngs(jax.random.key(0, impl="rbg"))
    mlp = FeedForward(hidden_size=64, out_std=0.005, rngs=rngs)
    # Sixteen thousand draws: a standard deviation is known to 1%.
    assert np.asarray(mlp.up.kernel[...]).std() == pytest.approx(0.02, rel=0.03)
    assert np.asarray(mlp.down.kernel[...]).std() == pytest.approx(0.005, rel=0.03)


@pytest.mark.full
def test_overfits_one_batch(fill):
    sizes = SIZES | {"num_blocks": 1, "dropout": 0.0}
    model = fill(lambda: GPT(**sizes, rngs=nnx.Rngs(0)), scale=0.02)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer = optax.adam(1e-2)

    def loss(params):
        logits = nnx.merge(graphdef, params, rest, copy=True)(TOKENS[:, :-1])
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:])
        return nats.mean()

    @jax.jit
    def train(params):
        def step(carry, _):
            params, state = carry
            value, gradients = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(gradients, state)
            return (optax.apply_updates(params, updates), state), value

        return jax.lax.scan(step, (params, optimizer.init(params)), length=80)[1]

    losses = train(params)
    assert losses[0] == pytest.approx(np.log(32), abs=0.1)
    assert losses[-1] < 0.05
