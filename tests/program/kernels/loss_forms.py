"""Losses as people write them, each a function of logits [B, T, V] and a batch."""

import jax
import jax.numpy as jnp
import optax

CLASSES = 512


def nats(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])


def mean(logits, batch):
    return nats(logits, batch).mean()


def gathered(logits, batch):
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], axis=-1)
    return -picked[..., 0].mean()


def smoothed(logits, batch):
    targets = optax.smooth_labels(jax.nn.one_hot(batch["labels"], CLASSES), 0.1)
    return optax.softmax_cross_entropy(logits, targets).mean()


def z_loss(logits, batch):
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    return mean(logits, batch) + 1e-3 * (normalizer**2).mean()


def token_weights(logits, batch):
    total = (nats(logits, batch) * batch["weights"]).sum()
    return total / batch["weights"].sum()


def sample_weights(logits, batch):
    return (nats(logits, batch).mean(-1) * batch["weights"][:, 0]).mean()


def per_sample(logits, batch):
    return (nats(logits, batch).mean(-1) ** 2).mean()


def distilled(logits, batch):
    teacher = jax.nn.softmax(batch["teacher"])
    return -(teacher * jax.nn.log_softmax(logits)).sum(-1).mean()


def capped(logits, batch):
    return mean(30 * jnp.tanh(logits / 30), batch)


def in_float32(logits, batch):
    return mean(logits.astype(jnp.float32), batch)


def with_accuracy(logits, batch):
    right = (logits.argmax(-1) == batch["labels"]).mean()
    return mean(logits, batch) + jax.lax.stop_gradient(right)


def focal(logits, batch):
    chance = jnp.exp(-nats(logits, batch))
    return ((1 - chance) ** 2 * nats(logits, batch)).mean()


def with_entropy(logits, batch):
    logs = jax.nn.log_softmax(logits)
    return gathered(logits, batch) - 0.1 * -(jnp.exp(logs) * logs).sum(-1).mean()


REPLACED = {
    "mean": (mean, "with its gradients"),
    "gathered": (gathered, "with its gradients"),
    "smoothed": (smoothed, "with its gradients"),
    "z_loss": (z_loss, "with its gradients"),
    "token_weights": (token_weights, "with its gradients"),
    "sample_weights": (sample_weights, "recomputed"),
    "per_sample": (per_sample, "recomputed"),
    "distilled": (distilled, "with its gradients"),
    "capped": (capped, "with its gradients"),
    "in_float32": (in_float32, "with its gradients"),
    "with_accuracy": (with_accuracy, "with its gradients"),
    "focal": (focal, "with its gradients"),
    "with_entropy": (with_entropy, "with its gradients"),
}
"""By name: a loss that is replaced, and how."""


def contrastive(logits, batch):
    return mean(logits, batch) + jax.nn.logsumexp(logits, axis=0).mean()


def over_tokens(logits, batch):
    return mean(logits - logits.mean(1, keepdims=True), batch)


def returned(logits, batch):
    return mean(logits, batch) + 1e-3 * (logits @ logits.swapaxes(1, 2)).mean()


def printed(logits, batch):
    jax.debug.callback(lambda value: None, logits)
    return mean(logits, batch)


def sorted_classes(logits, batch):
    return mean(logits, batch) + jax.lax.top_k(logits, 2)[0].mean()


NOT_REPLACED = {
    "contrastive": (contrastive, "the logits are read by"),
    "over_tokens": (over_tokens, "the logits are read by"),
    "returned": (returned, "the logits are read by"),
    "printed": (printed, "the logits are read by"),
    "sorted_classes": (sorted_classes, "the logits are read by top_k"),
}
"""By name: a loss that is evaluated as written, and a part of the reason."""
