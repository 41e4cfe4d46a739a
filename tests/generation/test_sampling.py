"""Sampling against NumPy in float64: what is left to draw from, the draw, its log-probabilities."""

import jax
import numpy as np
import pytest

from meshwright.errors import UserError
from meshwright.generation.sampling import (
    SHARE,
    Draws,
    Sampling,
    choose,
    gumbel,
    likeliest_blocks,
)

ROWS, TOKENS = 6, 40


@pytest.fixture(scope="module")
def logits():
    found = np.random.default_rng(0).normal(size=(ROWS, TOKENS)) * 3
    found[0, :5] = found[0, 5]  # a tie
    return found


def log_softmax(x):
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def left_in_numpy(logits, sampling, seen, count):
    """Return what is drawn from, written as the definitions say it, with sorting."""
    x = logits.astype(np.float64)
    for token, bias in sampling.logit_bias.items():
        x[:, token] += bias
    penalty = sampling.repetition_penalty
    x = np.where(seen, np.where(x > 0, x / penalty, x * penalty), x)
    for token in sampling.stop_tokens:
        x[count < sampling.min_new_tokens, token] = -np.inf
    if sampling.greedy:
        return np.where(np.arange(TOKENS) == x.argmax(axis=-1)[:, None], 0.0, -np.inf)
    x = x / sampling.temperature
    for row in x:
        if sampling.top_k:
            row[row < np.sort(row)[-sampling.top_k]] = -np.inf
        order = np.argsort(-row)
        total = np.cumsum(np.exp(log_softmax(row))[order])
        if sampling.top_p < 1:
            row[row < row[order[np.argmax(total >= sampling.top_p)]]] = -np.inf
        if sampling.min_p:
            row[row < row.max() + np.log(sampling.min_p)] = -np.inf
    return x


CASES = {
    "greedy": Sampling(),
    "greedy, all before it": Sampling(
        logit_bias={3: 9.0}, repetition_penalty=1.7, stop_tokens=(3, 7), min_new_tokens=2
    ),
    "temperature": Sampling(temperature=0.7),
    "top_k": Sampling(temperature=1.5, top_k=4),
    "top_p": Sampling(temperature=1.0, top_p=0.8),
    "min_p": Sampling(temperature=1.0, min_p=0.1),
    "all": Sampling(
        logit_bias={1: -2.5, 39: 4.0},
        repetition_penalty=1.3,
        stop_tokens=(39, 2),
        min_new_tokens=3,
        temperature=1.3,
        top_k=12,
        top_p=0.9,
        min_p=0.02,
    ),
}


PARTS = ("greedy, all before it", "temperature", "top_k")
"""Cases that are parts of others."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] * (n in PARTS)) for n in CASES]
)
def test_tokens_and_log_probabilities_are_those_of_numpy(name, logits):
    sampling, random = CASES[name], np.random.default_rng(1)
    seen, count = random.random((ROWS, TOKENS)) < 0.3, np.arange(ROWS, dtype=np.int32)
    draws = Draws(*random.integers(0, 50, (3, ROWS)).astype(np.int32))
    numbers = sampling.numbers(TOKENS, seed=5)
    with jax.enable_x64(True):
        chosen = choose(sampling.method, numbers, *jax.device_put((logits, draws, seen, count)))
        noise = np.asarray(gumbel(numbers.seed, draws, TOKENS), np.float64)
    left = left_in_numpy(logits, sampling, seen, count)
    token = (left + (0 if sampling.greedy else noise)).argmax(axis=-1)
    rows = np.arange(ROWS)
    np.testing.assert_array_equal(chosen.token, token)
    np.testing.assert_allclose(chosen.log_prob, log_softmax(logits)[rows, token], atol=1e-12)
    # The numbers, such as the temperature, are in float32.
    np.testing.assert_allclose(chosen.drawn_log_prob, log_softmax(left)[rows, token], atol=1e-5)


def test_bits_are_of_the_seed_the_prompt_the_sample_and_the_position_alone():
    of = lambda seed, *draw: np.asarray(  # noqa: E731
        gumbel(np.uint32(seed), Draws(*np.array(draw, np.int32)[:, None]), 8)
    )
    first = of(1, 2, 3, 4)
    together = gumbel(np.uint32(1), Draws(*np.array([[9, 2], [9, 3], [9, 4]], np.int32)), 8)
    np.testing.assert_array_equal(together[1:], first)
    others = [of(0, 2, 3, 4), of(1, 0, 3, 4), of(1, 2, 0, 4), of(1, 2, 3, 0), of(1, 3, 2, 4)]
    assert all((other != first).all() for other in others)


@pytest.mark.full
def test_draws_have_the_probabilities_of_the_distribution():
    rows = 4096
    logits = np.tile(np.log(np.array([0.5, 0.3, 0.15, 0.05])), (rows, 1)).astype(np.float32)
    sampling = Sampling(temperature=1.0)
    zeros = np.zeros(rows, np.int32)
    draws = Draws(zeros, zeros, np.arange(rows, dtype=np.int32))
    chosen = choose(sampling.method, sampling.numbers(4, 0), logits, draws, zeros, zeros)
    shares = np.bincount(chosen.token, minlength=4) / rows
    # Four standard deviations of a share.
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.15, 0.05], atol=4 * 0.5 / rows**0.5)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_k": -3}, "top_k=-3"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty=nan"),
    ],
)
def test_values_without_a_meaning_are_refused(wrong, says):
    with pytest.raises(UserError, match=says):
        Sampling(**wrong)


def test_unknown_stop_tokens_are_refused():
    with pytest.raises(UserError, match="stop_tokens has the token 40"):
        Sampling(stop_tokens=(40,)).numbers(TOKENS, 0)


@pytest.mark.parametrize("ties", [pytest.param(False, marks=pytest.mark.full), True])
def test_draws_from_the_likeliest_blocks_are_those_from_all_tokens(ties, monkeypatch):
    random = np.random.default_rng(3)
    logits = random.normal(size=(64, 8_201)).astype(np.float32) * 3
    logits = np.round(logits * 4) / 4 if ties else logits
    sampling = Sampling(temperature=0.9, top_k=7, top_p=0.95)
    numbers, draws = sampling.numbers(8_201, seed=1), Draws(*random.integers(0, 50, (3, 64)))
    assert likeliest_blocks(logits, 32)[0].shape[1] < 8_201 // SHARE

    def drawn():
        run = jax.jit(lambda *inputs: choose(sampling.method, numbers, *inputs))
        return run(logits, draws, np.zeros((64, 1), bool), np.zeros(64, np.int32))

    few = drawn()
    monkeypatch.setattr("meshwright.generation.sampling.SHARE", 10**6)
    every = drawn()
    np.testing.assert_array_equal(few.token, every.token)
    np.testing.assert_allclose(few.log_prob, every.log_prob, rtol=1e-6)
    np.testing.assert_allclose(few.drawn_log_prob, every.drawn_log_prob, rtol=1e-5, atol=1e-6)
