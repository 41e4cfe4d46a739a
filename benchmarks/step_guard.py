"""Compares our step with the same step written by hand, so that nobody slows it down unnoticed.

Both train gpt2_tiny (no dropout, float32) with AdamW and report loss, accuracy and gradient norm.
They take turns on one device; the first step shows that they compute the same.

    python benchmarks/step_guard.py
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")

import jax.numpy as jnp
import optax
from record import median_interval, verdict, write_record
from small_gpt import assemble_gpt

from meshwright.tasks import find_task

ROUNDS, STEPS, ROWS, LENGTH, VOCABULARY, HEADS = 20, 2, 4, 128, 1024, 4
AT_LEAST_ROUNDS, BUDGET = 8, 60.0
"""On a loaded machine fewer rounds are run: until the seconds of the budget are over."""
AT_MOST = 1.05


def norm(x: Any, weights: dict[str, Any], name: str) -> Any:
    """Layer norm."""
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    scaled = (x - mean) * jax.lax.rsqrt(variance + 1e-5)
    return scaled * weights[f"{name}.scale"] + weights[f"{name}.bias"]


def linear(x: Any, weights: dict[str, Any], name: str) -> Any:
    """A product and a bias."""
    return x @ weights[f"{name}.kernel"] + weights[f"{name}.bias"]


def logits_of(weights: dict[str, Any], tokens: Any) -> Any:
    """Return the logits of gpt2_tiny."""
    x = weights["vocabulary.tokens.embedding"][tokens]
    x = x + weights["vocabulary.positions.embedding"][: tokens.shape[1]]
    mask = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
    for number in range(4):
        block = f"blocks.{number}"
        hidden = norm(x, weights, f"{block}.attention_norm")
        query, key, value = (
            linear(hidden, weights, f"{block}.attention.{part}").reshape(*x.shape[:2], HEADS, -1)
            for part in ("query", "key", "value")
        )
        scores = jnp.einsum("bthc,bshc->bhts", query, key) / query.shape[-1] ** 0.5
        mixing = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))
        mixed = jnp.einsum("bhts,bshc->bthc", mixing, value).reshape(x.shape)
        x = x + linear(mixed, weights, f"{block}.attention.out")
        hidden = linear(norm(x, weights, f"{block}.mlp_norm"), weights, f"{block}.mlp.up")
        x = x + linear(jax.nn.gelu(hidden), weights, f"{block}.mlp.down")
    x = norm(x, weights, "vocabulary.norm")
    return x @ weights["vocabulary.tokens.embedding"].T


def loss_of(weights: dict[str, Any], tokens: Any) -> tuple[Any, Any]:
    """Return loss and accuracy."""
    logits, targets = logits_of(weights, tokens[:, :-1]), tokens[:, 1:]
    # The target is picked by comparison, as in our loss: the gradient of indexing is slow on CPUs.
    picked = jnp.where(jnp.arange(VOCABULARY) == targets[..., None], logits, 0).sum(-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    return losses.mean(), (logits.argmax(-1) == targets).mean()


@functools.partial(jax.jit, donate_argnums=(0, 1))
def by_hand(weights: Any, moments: Any, tokens: Any) -> Any:
    """One step, written by hand."""
    (loss, accuracy), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights, tokens)
    updates, moments = optax.adamw(1e-3).update(gradients, moments, weights)
    figures = {"loss": loss, "accuracy": accuracy, "grad_norm": optax.tree.norm(gradients)}
    return optax.apply_updates(weights, updates), moments, figures


def main() -> None:
    batch = find_task("language_modeling")(vocab_size=VOCABULARY, context_length=LENGTH)
    batch = batch.synthetic_batch(0, ROWS)
    assembled = assemble_gpt({}, per_replica=ROWS, num_blocks=4, hidden_size=256, dropout=0.0)
    state = assembled.init(0)
    weights = {
        path: jnp.copy(value)
        for path, value in assembled.canonical(state).items()
        if path.endswith((".kernel", ".bias", ".scale", ".embedding"))
    }
    moments = optax.adamw(1e-3).init(weights)
    placed, tokens = assembled.put_batch(batch), jnp.asarray(batch["tokens"])
    state, ours = assembled.step(state, placed)
    weights, moments, plain = by_hand(weights, moments, tokens)
    worst = max(abs(float(ours[k]) - float(plain[k])) / abs(float(plain[k]) or 1) for k in plain)
    assert worst < 1e-4, f"they do not compute the same: {ours}, {plain}"

    seconds: dict[str, list[float]] = {"meshwright": [], "by hand": []}
    begun = time.perf_counter()
    for number in range(ROUNDS):
        started = time.perf_counter()
        if number >= AT_LEAST_ROUNDS and started - begun > BUDGET:
            break
        for _ in range(STEPS):
            state, ours = assembled.step(state, placed)
        jax.block_until_ready((state, ours))
        middle = time.perf_counter()
        for _ in range(STEPS):
            weights, moments, plain = by_hand(weights, moments, tokens)
        jax.block_until_ready((weights, plain))
        seconds["meshwright"].append((middle - started) / STEPS)
        seconds["by hand"].append((time.perf_counter() - middle) / STEPS)
    ratios = [a / b for a, b in zip(seconds["meshwright"], seconds["by hand"], strict=True)]
    ratio, *interval = median_interval(ratios)
    figures = {
        "milliseconds": {k: round(statistics.median(v) * 1e3, 2) for k, v in seconds.items()},
        "ratio": {"median": round(ratio, 3), "interval": [round(x, 3) for x in interval]},
        "rounds": len(ratios),
        "largest_difference": worst,
        "targets": {f"meshwright / by hand: at most {AT_MOST}": verdict(ratio, AT_MOST)},
    }
    print(figures)
    write_record("step_guard", figures)


if __name__ == "__main__":
    main()
