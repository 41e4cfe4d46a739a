"""The loss of GRPO and its gradient, for every variant, against loops in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright import UserError
from meshwright.config.reward_sections import GrpoConfig
from meshwright.tasks.grpo import GRPO, group_advantages, token_log_probs

VOCABULARY, PROMPT, NEW = 7, 3, 5
VARIANTS = {
    "default": {},
    "no_reference": {"beta": 0.0},
    "sequence_mean": {"mean": "sequence"},
    "fixed_length": {"mean": "length", "beta": 0.0},
    "clip_higher": {"epsilon": 0.1, "epsilon_high": 0.4},
    "dual_clip": {"dual_clip": 1.5, "epsilon": 0.05},
    "gspo": {"ratio": "sequence", "mean": "sequence", "beta": 0.0},
    "gspo_token_mean": {"ratio": "sequence"},
    "without_weights": {"importance_cap": None},
    "kl_in_the_reward": {"kl": "reward"},
}


def make(**settings):
    sizes = {"max_prompt_length": PROMPT, "max_generation_steps": NEW, "vocab_size": VOCABULARY}
    return GRPO(**{**sizes, "num_generations": 4, **settings})


def make_batch(task, rows=8, seed=0):
    """Completions of unequal lengths; one is not counted."""
    random = np.random.default_rng(seed)
    batch = {name: np.zeros(s, float) for name, (s, _) in task.fields(rows, 1).items()}
    batch["tokens"] = random.integers(VOCABULARY, size=(rows, task.length)).astype(np.int32)
    for row in range(rows):
        begin = random.integers(1, PROMPT + 1)
        batch["completion_mask"][row, begin - 1 : begin - 1 + random.integers(1, NEW + 1)] = 1
    for name in ("sampler_log_probs", "reference_log_probs"):
        if name in batch:
            batch[name] = -2 + random.normal(size=batch[name].shape)
    if "importance" in batch:
        batch["importance"] = np.exp(random.normal(size=batch["importance"].shape))
    batch["advantages"] = random.normal(size=rows)
    batch["counted"][:] = [1, 1, 0, 1, 1, 1, 1, 1][:rows]
    batch["scored"][:] = batch["varied"][:] = 1
    return batch


def model_of(table):
    return lambda tokens: jnp.asarray(table)[tokens]


def in_numpy(task, table, batch):
    """Return total, weight and the gradient of the total, token by token."""
    total, weight, gradient = 0.0, 0.0, np.zeros_like(table)
    for row, tokens in enumerate(batch["tokens"]):
        if not batch["counted"][row]:
            continue
        places = np.flatnonzero(batch["completion_mask"][row])
        old, advantage = batch["sampler_log_probs"][row], batch["advantages"][row]
        logits = table[tokens[places]]
        chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        new = np.log(chances[np.arange(len(places)), tokens[places + 1]])
        log_ratio = new - old[places]
        whole = task.ratio == "sequence"
        ratios = np.exp(np.full(len(places), log_ratio.mean()) if whole else log_ratio)
        share = {"token": 1, "sequence": 1 / len(places), "length": 1 / NEW}[task.mean]
        weight += len(places) if task.mean == "token" else 1
        slopes = np.zeros(len(places))
        for n, (place, ratio) in enumerate(zip(places, ratios, strict=True)):
            w = 1.0
            if task.importance_cap is not None:
                w = min(batch["importance"][row, place], task.importance_cap)
            high = 1 + (task.epsilon if task.epsilon_high is None else task.epsilon_high)
            held = min(max(ratio, 1 - task.epsilon), high)
            value, slope = ratio * advantage, ratio * advantage
            if held * advantage < value:
                value, slope = held * advantage, 0.0
            if task.dual_clip is not None and advantage < 0 and value < task.dual_clip * advantage:
                value, slope = task.dual_clip * advantage, 0.0
            total -= share * w * value
            if whole:
                slopes -= share * w * slope / len(places)
            else:
                slopes[n] -= share * w * slope
            if task.beta and task.kl == "loss":
                away = batch["reference_log_probs"][row, place] - new[n]
                total += share * w * task.beta * (np.exp(away) - away - 1)
                slopes[n] += share * w * task.beta * (1 - np.exp(away))
        for n, place in enumerate(places):
            step = -chances[n]
            step[tokens[place + 1]] += 1
            gradient[tokens[place]] += slopes[n] * step
    return total, weight, gradient


def parts(task, table, batch):
    """Return total, weight and the gradient of the total, by JAX."""

    def total(table, batch):
        weighted, _ = task.loss(model_of(table), batch)
        return weighted.total, weighted.weight

    (value, weight), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(table, batch)
    return np.asarray(value), np.asarray(weight), np.asarray(gradient)


EVERYDAY = ("dual_clip", "gspo_token_mean")


def loss_of(task, table, batch):
    return jax.jit(lambda batch: task.loss(model_of(table), batch))(batch)


@pytest.mark.parametrize(
    "name",
    [each if each in EVERYDAY else pytest.param(each, marks=pytest.mark.full) for each in VARIANTS],
)
def test_value_and_gradient_equal_numpy_and_parts_add_up(name):
    with jax.enable_x64(True):
        task = make(**VARIANTS[name])
        table = np.random.default_rng(1).normal(size=(VOCABULARY, VOCABULARY))
        batch = make_batch(task)
        found = parts(task, table, batch)
        for own, expected in zip(found, in_numpy(task, table, batch), strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-12, atol=1e-12)
        # Microbatches with unequal numbers of tokens, in another order.
        order = np.random.default_rng(2).permutation(8)
        pieces = [{n: a[rows] for n, a in batch.items()} for rows in (order[:4], order[4:])]
        halves = [parts(task, table, piece) for piece in pieces]
        for own, *several in zip(found, *halves, strict=True):
            np.testing.assert_allclose(own, sum(several), rtol=1e-12, atol=1e-12)


def test_a_batch_without_anything_to_learn_has_no_gradient():
    task = make()
    batch = make_batch(task)
    batch["counted"][:] = 0
    table = np.zeros((VOCABULARY, VOCABULARY), np.float32)
    weighted, metrics = loss_of(task, table, batch)
    assert float(weighted.mean) == 0.0
    assert float(metrics["entropy"].weight) > 0


def test_metrics_say_what_happened():
    task = make(beta=0.1, reward_names=("a", "b"), reward_weights=(1.0, 2.0))
    batch = make_batch(task)
    batch["rewards"] = np.stack([np.arange(8.0), np.ones(8)], axis=1)
    batch["scored"][0] = 0
    batch["truncated"][:2] = 1
    batch["varied"][4:] = 0
    table = np.zeros((VOCABULARY, VOCABULARY), np.float32)
    own = np.asarray(jax.jit(lambda batch: token_log_probs(model_of(table), batch))(batch))
    batch["sampler_log_probs"] = own.copy()
    _, metrics = loss_of(task, table, batch)
    means = {name: float(each.mean) for name, each in metrics.items()}
    assert means["reward"] == pytest.approx(4.0 + 2.0)
    assert means["reward/a"] == pytest.approx(4.0)
    assert means["reward/b"] == pytest.approx(1.0)
    assert means["truncated"] == 0.25
    assert means["zero_variance"] == 0.5
    assert means["reward_failed"] == 0.125
    assert means["mismatch"] == 0.0
    assert means["completion_tokens"] == batch["completion_mask"].sum() / 8


def test_advantages():
    rewards = np.array([[1.0, 3.0, 5.0, np.nan], [2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 4.0]])
    none, varied = group_advantages(rewards, scale="none")
    assert varied.tolist() == [True, False, True]
    assert none.tolist() == [[-2, 0, 2, 0], [0, 0, 0, 0], [-1, -1, -1, 3]]
    out, _ = group_advantages(rewards, scale="none", leave_one_out=True)
    np.testing.assert_allclose(out[0], [1 - 4, 0, 5 - 2, 0])
    np.testing.assert_allclose(out[2], [-4 / 3, -4 / 3, -4 / 3, 4])
    group, _ = group_advantages(rewards, scale="group")
    np.testing.assert_allclose(group[0, :3], none[0, :3] / np.std([1, 3, 5]))
    batch, _ = group_advantages(rewards, scale="batch")
    np.testing.assert_allclose(batch[2], none[2] / np.std([1, 3, 5, 0, 0, 0, 4]))


def test_the_order_of_groups_does_not_matter():
    rewards = np.random.default_rng(0).normal(size=(6, 4))
    order = np.random.default_rng(1).permutation(6)
    for scale in ("group", "batch", "none"):
        found, _ = group_advantages(rewards, scale=scale)
        other, _ = group_advantages(rewards[order], scale=scale)
        np.testing.assert_allclose(found[order], other, rtol=1e-14)


@pytest.mark.parametrize(
    "settings", [{"num_generations": 1}, {"epsilon": 0}, {"mean": "words"}, {"temperature": 0}]
)
def test_settings_without_meaning_are_refused(settings):
    with pytest.raises(UserError, match=next(iter(settings))):
        make(**settings)


def test_weights_by_name_are_in_the_order_of_the_rewards():
    named = {"a": len, "b": min}
    assert GRPO(rewards=named, reward_weights={"b": 2, "a": 1}).reward_weights == [1, 2]
    for rewards in (named, [len, min]):
        with pytest.raises(UserError, match="do not have the names of the rewards"):
            GRPO(rewards=rewards, reward_weights={"b": 2})
    assert GrpoConfig(rewards="exact_match").rewards == ["exact_match"]
