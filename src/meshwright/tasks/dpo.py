"""Preferences: raise the probability of chosen answers over rejected ones, by DPO, IPO or ORPO."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from meshwright.errors import Setting, UserError
from meshwright.program.trace.adapters import reference
from meshwright.tasks.task import Batch, Metrics, cross_entropy, read_field, read_weights, weigh
from meshwright.weighted import Weighted

Variant = Literal["dpo", "ipo", "orpo"]
Reference = Literal["precomputed", "adapter_off"]

SIDES = ("chosen", "rejected")
REFERENCE = ("reference_chosen", "reference_rejected")


@dataclass(frozen=True, kw_only=True)
class DPO:
    """Losses on pairs of answers to one prompt; every pair has the same weight.

    A batch holds ``chosen`` and ``rejected`` [B, T+1], the tokens of the prompt and of one answer
    each, and ``chosen_mask`` and ``rejected_mask`` of the same shape: which tokens are the
    answer's. ``reference_chosen`` and ``reference_rejected`` [B] are the log-probabilities of the
    answers in the model that training starts from. The trainer adds them, computed once, unless
    the data bring them or adapters are switched off instead. ``mask`` [B] may say how much each
    pair counts.

    Attributes:
        beta: how strongly the model is held to the reference; for ORPO, the weight of its odds.
        variant: ``dpo``; ``ipo``, which compares means over tokens and aims at a margin of 1/(2β);
            or ``orpo``, which needs no reference and also trains on the chosen answers.
        reference: ``precomputed``, or ``adapter_off``, which computes it in every step with the
            adapters (``lora``) switched off, also for data whose samples have no numbers.
        label_smoothing: the probability that a pair is the wrong way round; only for ``dpo``.
        vocab_size: number of tokens of the synthetic batches.
        context_length: T.
    """

    beta: float = 0.1
    variant: Variant = "dpo"
    reference: Reference = "precomputed"
    label_smoothing: float = 0.0
    vocab_size: int = 1024
    context_length: int = 128

    def __post_init__(self) -> None:
        for name, kinds in (("variant", Variant), ("reference", Reference)):
            if getattr(self, name) not in get_args(kinds):
                fix = f"write {', '.join(get_args(kinds))}"
                _refuse(name, getattr(self, name), "it is not known", fix)
        if not self.beta > 0:
            _refuse("beta", self.beta, "it has to be above 0", "write 0.1, or 0.01 to move further")
        if not 0 <= self.label_smoothing < 0.5:
            fix = "write the share of pairs that are the wrong way round"
            _refuse("label_smoothing", self.label_smoothing, "it has to be from 0 to 0.5", fix)
        if self.label_smoothing and self.variant != "dpo":
            why = f"{Setting('task.variant', self.variant)} has no form of it"
            _refuse("label_smoothing", self.label_smoothing, why, "leave it out")

    def __call__(self, model: Callable[..., Array], batch: Batch) -> tuple[Weighted, Metrics]:
        """Return the loss, so that the task itself is one."""
        return self.loss(model, batch)

    def loss(self, model: Callable[..., Array], batch: Batch) -> tuple[Weighted, Metrics]:
        """Return the loss per pair, and metrics of the pairs.

        ``accuracy`` is the share of pairs whose margin is above 0, ``margin`` β times the
        difference of log-probabilities, less that of the reference. Those of ORPO are means over
        tokens.
        """
        totals, lengths = answers(model, batch)
        means = totals / jnp.maximum(lengths, 1)
        if self.variant == "orpo":
            margins = self.beta * (means[:, 0] - means[:, 1])
            losses = -means[:, 0] - self.beta * jax.nn.log_sigmoid(_odds(means))
        else:
            moved = totals - self._reference(model, batch).astype(totals.dtype)
            margins = self.beta * (moved[:, 0] - moved[:, 1])
            losses = self._pair_losses(moved, lengths, margins)
        weights = read_weights(batch, losses)
        metrics = {"accuracy": weigh(margins > 0, weights), "margin": weigh(margins, weights)}
        for n, side in enumerate(SIDES):
            metrics[f"{side}_logprob"] = weigh(totals[:, n], weights)
            metrics[f"{side}_length"] = weigh(lengths[:, n], weights)
        return weigh(losses, weights), metrics

    def _reference(self, model: Callable[..., Array], batch: Batch) -> Array:
        """Return the log-probabilities of both answers in the reference, [B, 2]."""
        known = batch
        if self.reference == "adapter_off":
            known = reference(self.initial_fields, model, batch)
        return jax.lax.stop_gradient(jnp.stack([_read(known, n) for n in REFERENCE], axis=1))

    def _pair_losses(self, moved: Array, lengths: Array, margins: Array) -> Array:
        """Return the loss of each pair, from how far log-probabilities moved [B, 2] → [B]."""
        if self.variant == "ipo":
            means = moved / jnp.maximum(lengths, 1)
            return (means[:, 0] - means[:, 1] - 1 / (2 * self.beta)) ** 2
        right, wrong = jax.nn.log_sigmoid(margins), jax.nn.log_sigmoid(-margins)
        return -(1 - self.label_smoothing) * right - self.label_smoothing * wrong

    @property
    def initial_names(self) -> tuple[str, ...]:
        """The fields that the initial model computes of each pair, once."""
        given = self.variant == "orpo" or self.reference != "precomputed"
        return () if given else REFERENCE

    def initial_fields(self, model: Callable[..., Array], batch: Batch) -> dict[str, Array]:
        """Return the log-probabilities of both answers in a model, [B] each."""
        totals, _ = answers(model, batch)
        return {name: totals[:, n] for n, name in enumerate(REFERENCE)}

    def example_batch(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of tokens, int32 [B, T+1], masks, bool [B, T+1], and references."""
        shape = (batch_size, self.context_length + 1)
        tokens = {side: jax.ShapeDtypeStruct(shape, np.int32) for side in SIDES}
        masks = {f"{side}_mask": jax.ShapeDtypeStruct(shape, np.bool_) for side in SIDES}
        reference = jax.ShapeDtypeStruct((batch_size,), np.float32)
        return tokens | masks | dict.fromkeys(self.initial_names, reference)

    def synthetic_batch(self, seed: int, batch_size: int) -> dict[str, np.ndarray]:
        """Return rows that count upwards; answers do so, if chosen, or repeat their first token."""
        random = np.random.default_rng(seed)
        length = self.context_length + 1
        start = random.integers(self.vocab_size, size=(batch_size, 1))
        begin = random.integers(1, max(length // 2, 2), size=(batch_size, 1))
        places = np.arange(length)
        rows = {"chosen": start + places, "rejected": start + np.minimum(places, begin)}
        mask = places >= begin
        # Those of a model to which all tokens are equally likely.
        nats = np.log(self.vocab_size) * mask.sum(axis=1)
        reference = {name: -nats.astype(np.float32) for name in self.initial_names}
        tokens = {side: (row % self.vocab_size).astype(np.int32) for side, row in rows.items()}
        return tokens | {f"{side}_mask": mask for side in SIDES} | reference


def answers(model: Callable[..., Array], batch: Batch) -> tuple[Array, Array]:
    """Return the log-probability and the number of tokens of each answer, [B, 2] each."""
    tokens = jnp.stack([read_field(batch, side) for side in SIDES], axis=1)
    masks = jnp.stack([read_field(batch, f"{side}_mask") for side in SIDES], axis=1)
    if masks.shape != tokens.shape:
        raise UserError(
            "the masks do not fit the tokens",
            why=f"they have shape {masks.shape[::2]}, the tokens have {tokens.shape[::2]}",
            fix="give one mask value per token: 1 for those of the answer",
        )
    # Both answers of a pair stay on the devices that have it.
    rows = tokens.reshape(-1, tokens.shape[-1])
    nats = cross_entropy(model(rows[:, :-1]), rows[:, 1:])
    counted = masks.reshape(rows.shape)[:, 1:].astype(nats.dtype)
    pairs = (tokens.shape[0], len(SIDES))
    return -(nats * counted).sum(axis=-1).reshape(pairs), counted.sum(axis=-1).reshape(pairs)


def _read(batch: Batch, name: str) -> Array:
    if name in batch:
        return batch[name]
    raise UserError(
        f"the batch has no field '{name}'",
        why="the trainer computes it once for every sample, of data whose samples have numbers",
        fix="give a dict of arrays, a dataset with a length or mw.PreferenceData; or add the "
        f"field, or write {Setting('task.reference', 'adapter_off')} with adapters, or "
        f"{Setting('task.variant', 'orpo')}, which needs no reference",
    )


def _odds(means: Array) -> Array:
    """Return log(odds of chosen / odds of rejected) from mean log-probabilities [B, 2] → [B]."""
    # log(1 - p) of a probability p that may round to 1.
    rest = jnp.log(-jnp.expm1(jnp.minimum(means, -jnp.finfo(means.dtype).eps)))
    return (means[:, 0] - rest[:, 0]) - (means[:, 1] - rest[:, 1])


def _refuse(name: str, value: str | float, why: str, fix: str) -> None:
    raise UserError(f"{Setting(f'task.{name}', value)} cannot be used", why=why, fix=fix)
