"""Language modelling: every counted token counts once, whatever the batch looks like."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.errors import UserError
from meshwright.tasks.language_modeling import LanguageModeling

pytestmark = pytest.mark.quick

VOCAB = 16
TASK = LanguageModeling(vocab_size=VOCAB, context_length=6)
RANDOM = np.random.default_rng(0)
TABLE = RANDOM.normal(size=(VOCAB, VOCAB))
TOKENS = RANDOM.integers(VOCAB, size=(4, 7)).astype(np.int32)
NATS = np.log(np.exp(TABLE).sum(axis=-1))[TOKENS[:, :-1]] - TABLE[TOKENS[:, :-1], TOKENS[:, 1:]]
HITS = TABLE.argmax(axis=-1)[TOKENS[:, :-1]] == TOKENS[:, 1:]


def bigram(tokens, segment_ids=None):
    """A model whose logits are a row of TABLE for each token."""
    return jnp.asarray(TABLE, jnp.float32)[tokens]


run = jax.jit(lambda batch: TASK.loss(bigram, batch))


def assert_counts(batch, weights):
    loss, metrics = run(batch)
    np.testing.assert_allclose(loss.weight, weights.sum())
    np.testing.assert_allclose(loss.total, (NATS * weights).sum(), rtol=1e-6)
    np.testing.assert_allclose(metrics["accuracy"].total, (HITS * weights).sum())
    np.testing.assert_allclose(metrics["accuracy"].weight, weights.sum())


def test_every_token_counts_once():
    assert_counts({"tokens": TOKENS}, np.ones((4, 6)))


def test_shifted_pairs_equal_tokens():
    assert_counts({"inputs": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}, np.ones((4, 6)))


def test_mask_says_how_much_a_target_counts():
    mask = RANDOM.integers(2, size=(4, 6)).astype(bool)
    assert_counts({"tokens": TOKENS, "mask": mask}, mask.astype(float))


def test_targets_in_another_document_and_padding_do_not_count():
    segments = np.array([[1, 1, 1, 2, 2, 0, 0]] * 4, np.int32)
    weights = np.array([[1, 1, 0, 1, 0, 0]] * 4, float)
    assert_counts({"tokens": TOKENS, "segment_ids": segments}, weights)


def test_segments_of_shifted_pairs_drop_padding_only():
    segments = np.array([[1, 1, 1, 2, 2, 0]] * 4, np.int32)
    weights = np.array([[1, 1, 1, 1, 1, 0]] * 4, float)
    pair = {"inputs": TOKENS[:, :-1], "targets": TOKENS[:, 1:], "segment_ids": segments}
    assert_counts(pair, weights)


def test_model_sees_the_segments_of_its_inputs():
    @jax.jit
    def seen_by_the_model(batch):
        seen = []

        def model(tokens, *, segment_ids):
            seen.append(segment_ids)
            return bigram(tokens)

        TASK.loss(model, batch)
        return seen

    segments = np.arange(28).reshape(4, 7)
    (seen,) = seen_by_the_model({"tokens": TOKENS, "segment_ids": segments})
    np.testing.assert_array_equal(seen, segments[:, :-1])


def test_a_model_that_takes_positions_gets_those_of_its_inputs():
    positions = np.arange(28).reshape(4, 7)

    def model(tokens, *, positions):
        return bigram(tokens) + positions[:, :, None]

    def shifted(tokens):
        return model(tokens, positions=positions[:, :-1])

    got, _ = TASK.loss(model, {"tokens": TOKENS, "positions": positions})
    expected, _ = TASK.loss(shifted, {"tokens": TOKENS})
    np.testing.assert_array_equal(got.total, expected.total)


def test_a_model_that_takes_neither_still_predicts_within_documents_only():
    segments = np.array([[1, 1, 1, 2, 2, 0, 0]] * 4)
    batch = {"tokens": TOKENS, "segment_ids": segments, "positions": segments}
    got, _ = TASK.loss(lambda tokens: bigram(tokens), batch)
    assert got.weight == 4 * 3


def test_unequal_microbatches_add_up_to_the_whole():
    mask = np.array([[1] * 6, [0] * 6, [1] * 2 + [0] * 4, [1] * 5 + [0]], bool)
    parts = [{"tokens": TOKENS[i : i + 2], "mask": mask[i : i + 2]} for i in (0, 2)]
    summed = jax.tree.map(jnp.add, *(run(part) for part in parts))
    whole = run({"tokens": TOKENS, "mask": mask})
    np.testing.assert_allclose(summed[0].mean, whole[0].mean, rtol=1e-6)
    np.testing.assert_allclose(summed[0].mean, NATS[mask].mean(), rtol=1e-6)


def test_uniform_model_has_the_perplexity_of_the_vocabulary():
    uniform = lambda tokens: jnp.zeros((*tokens.shape, VOCAB))  # noqa: E731
    loss, _ = jax.jit(lambda batch: TASK.loss(uniform, batch))({"tokens": TOKENS})
    np.testing.assert_allclose(np.exp(loss.mean), VOCAB, rtol=1e-6)


def test_synthetic_rows_count_in_a_constant_step():
    tokens = TASK.synthetic_batch(3, 64)["tokens"]
    steps = np.diff(tokens, axis=1) % VOCAB
    assert (steps == steps[:, :1]).all()
    assert set(np.unique(steps)) == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"text": TOKENS}, "no field 'tokens' or 'inputs'"),
        ({"inputs": TOKENS}, "no field 'targets'"),
        ({"tokens": TOKENS, "mask": np.ones((4, 7))}, r"shape \(4, 7\), the targets have \(4, 6\)"),
        ({"tokens": TOKENS, "segment_ids": TOKENS[:, :3]}, "one document number per token"),
    ],
)
def test_batches_that_do_not_fit_are_explained(batch, message):
    with pytest.raises(UserError, match=message):
        jax.eval_shape(lambda batch: TASK.loss(bigram, batch), batch)
