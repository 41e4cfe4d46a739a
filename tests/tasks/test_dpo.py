"""Preferences: losses and gradients of pairs equal closed forms in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.errors import UserError
from meshwright.tasks.dpo import DPO

pytestmark = pytest.mark.quick

RANDOM = np.random.default_rng(0)
PAIRS, LENGTH, VOCAB = 6, 9, 7
TABLE = RANDOM.normal(size=(VOCAB, VOCAB))
"""A softmax regression: the logits of the next token are the row of the last."""


def side():
    tokens = RANDOM.integers(VOCAB, size=(PAIRS, LENGTH)).astype(np.int32)
    begin, end = RANDOM.integers(1, 4, size=(PAIRS, 1)), RANDOM.integers(5, 10, size=(PAIRS, 1))
    places = np.arange(LENGTH)
    return tokens, (places >= begin) & (places < end)


(CHOSEN, CHOSEN_MASK), (REJECTED, REJECTED_MASK) = side(), side()
BATCH = {
    "chosen": CHOSEN,
    "chosen_mask": CHOSEN_MASK,
    "rejected": REJECTED,
    "rejected_mask": REJECTED_MASK,
    "reference_chosen": RANDOM.normal(-10, 2, size=PAIRS),
    "reference_rejected": RANDOM.normal(-10, 2, size=PAIRS),
}


def log_probabilities(tokens, mask):
    """Each row's log-probability with its gradient by the table, and its number of tokens."""
    softmax = np.exp(TABLE) / np.exp(TABLE).sum(axis=1, keepdims=True)
    totals, gradients = np.zeros(PAIRS), np.zeros((PAIRS, VOCAB, VOCAB))
    for row in range(PAIRS):
        for before, token in zip(
            tokens[row, :-1][mask[row, 1:]], tokens[row, 1:][mask[row, 1:]], strict=True
        ):
            totals[row] += np.log(softmax[before, token])
            gradients[row, before] += np.eye(VOCAB)[token] - softmax[before]
    return totals, gradients, mask[:, 1:].sum(axis=1)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def closed_form(variant, beta, smoothing):
    """The mean loss and its gradient."""
    (c, dc, nc), (r, dr, nr) = (
        log_probabilities(CHOSEN, CHOSEN_MASK),
        log_probabilities(REJECTED, REJECTED_MASK),
    )
    wide = np.s_[:, None, None]
    a, b = c - BATCH["reference_chosen"], r - BATCH["reference_rejected"]
    if variant == "dpo":
        h = beta * (a - b)
        losses = -(1 - smoothing) * np.log(sigmoid(h)) - smoothing * np.log(sigmoid(-h))
        slope = -(1 - smoothing) * sigmoid(-h) + smoothing * sigmoid(h)
        gradients = (beta * slope)[wide] * (dc - dr)
    elif variant == "ipo":
        h = a / nc - b / nr - 1 / (2 * beta)
        losses = h**2
        gradients = 2 * h[wide] * (dc / nc[wide] - dr / nr[wide])
    else:
        p, q = np.exp(c / nc), np.exp(r / nr)
        odds = np.log(p / (1 - p)) - np.log(q / (1 - q))
        losses = -c / nc - beta * np.log(sigmoid(odds))
        slope = -beta * sigmoid(-odds)
        chosen = (-1 + slope / (1 - p))[wide] * dc / nc[wide]
        gradients = chosen - (slope / (1 - q))[wide] * dr / nr[wide]
    return losses.mean(), gradients.mean(axis=0)


@pytest.mark.parametrize(
    ("variant", "smoothing"), [("dpo", 0.0), ("dpo", 0.1), ("ipo", 0.0), ("orpo", 0.0)]
)
def test_loss_and_gradient_equal_numpy_in_float64(variant, smoothing):
    task = DPO(variant=variant, beta=0.3, label_smoothing=smoothing)
    with jax.enable_x64(True):
        step = jax.jit(
            jax.value_and_grad(lambda table: task.loss(lambda x: table[x], BATCH)[0].mean)
        )
        loss, gradient = step(jnp.asarray(TABLE))
        assert gradient.dtype == np.float64
        gradient = np.asarray(gradient)
    wanted, expected = closed_form(variant, 0.3, smoothing)
    np.testing.assert_allclose(loss, wanted, rtol=1e-12)
    np.testing.assert_allclose(gradient, expected, rtol=1e-12, atol=1e-14)


def test_metrics_are_means_over_pairs():
    run = jax.jit(lambda batch: DPO(beta=0.5).loss(lambda x: jnp.asarray(TABLE)[x], batch)[1])
    found = {name: float(each.mean) for name, each in run(BATCH).items()}
    (c, _, nc), (r, _, nr) = (
        log_probabilities(CHOSEN, CHOSEN_MASK),
        log_probabilities(REJECTED, REJECTED_MASK),
    )
    margins = 0.5 * (c - r - BATCH["reference_chosen"] + BATCH["reference_rejected"])
    expected = {
        "accuracy": (margins > 0).mean(),
        "margin": margins.mean(),
        "chosen_logprob": c.mean(),
        "rejected_logprob": r.mean(),
        "chosen_length": nc.mean(),
        "rejected_length": nr.mean(),
    }
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_initial_model_is_its_own_reference():
    model = lambda x: jnp.asarray(TABLE)[x]  # noqa: E731
    reference = jax.jit(lambda batch: DPO().initial_fields(model, batch))(BATCH)
    loss, metrics = jax.jit(lambda batch: DPO().loss(model, batch))({**BATCH, **reference})
    assert float(metrics["margin"].total) == 0
    assert float(loss.mean) == pytest.approx(np.log(2))


def test_orpo_does_not_overflow_on_certain_answers():
    table = 1e4 * np.eye(VOCAB)
    rows = {**BATCH, "chosen": np.zeros_like(CHOSEN), "rejected": CHOSEN}
    task = DPO(variant="orpo")
    step = jax.jit(jax.value_and_grad(lambda t: task.loss(lambda x: t[x], rows)[0].mean))
    loss, gradient = step(jnp.asarray(table))
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variant": "kto"}, 'variant="kto" cannot be used'),
        ({"beta": 0.0}, "beta=0.0 cannot be used"),
        ({"label_smoothing": 0.5}, "label_smoothing=0.5 cannot be used"),
        ({"label_smoothing": 0.1, "variant": "ipo"}, "has no form of it"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        mw.DPO(**settings)


def test_masks_must_fit_the_tokens():
    batch = {**BATCH, "chosen_mask": CHOSEN_MASK[:, 1:], "rejected_mask": REJECTED_MASK[:, 1:]}
    with pytest.raises(UserError, match="masks do not fit"):
        DPO().loss(lambda x: jnp.asarray(TABLE)[x], batch)
