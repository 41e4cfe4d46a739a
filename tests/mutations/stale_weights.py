"""Stale weights: gathered in an earlier step, or updated for one of their uses only."""

import dataclasses

import jax
import jax.numpy as jnp
import odd_models
from mutations.mutation import Mutation
from mutations.proofs_of import FSDP_PLAIN, FSDP_TOKENS, STAGES, Verify
from mutations.sabotage import equation, new_parameters, replace

from meshwright.pipeline.execute.executor import StageExecutor
from meshwright.step import train_step


def _stale(is_stale):
    """Let gradients be those at the weights of the step before, for some leaves."""

    def make(right):
        def call(self, state, batch):
            now = jax.tree.map(jnp.copy, state.params)
            before = self.__dict__.get("_before", now)
            self._before = now
            names = [step.leaf.path for step in self.traced.layout.select("param")]
            used = [
                jnp.copy(old) if is_stale(name) else jnp.copy(new)
                for name, old, new in zip(names, before, now, strict=True)
            ]
            started = [jnp.copy(value) for value in used]
            after, metrics = right(self, dataclasses.replace(state, params=used), batch)
            params = [
                jax.device_put(new + (moved - start), new.sharding)
                for new, moved, start in zip(now, after.params, started, strict=True)
            ]
            return dataclasses.replace(after, params=params), metrics

        return call

    return replace(train_step.TrainStep, "__call__", make)


def _not_written(right):
    """Let the optimizer update parameters as they were before the model wrote to them."""

    def compute(function, params, *rest):
        return dataclasses.replace(right(function, params, *rest), params=list(params))

    return compute


FSDP_WRITTEN = Verify(
    "fsdp=4", odd_models.Written, odd_models.loss, lambda step: odd_models.batch()
)

MUTATIONS = (
    Mutation(
        "gathered weights are those of the step before",
        _stale(lambda name: True),
        FSDP_PLAIN,
        ("float64 loss", "float64 parameters", "own_precision loss"),
        seen="weights gathered ahead and not invalidated",
        names="step 2",
    ),
    Mutation(
        "the blocks of a pipeline use the weights of the step before",
        _stale(lambda name: name.startswith("blocks.")),
        STAGES,
        ("float64 loss", "float64 parameters"),
        seen="pipelines without a flush",
        names="step 2",
    ),
    Mutation(
        "tied weights get the gradient of one of their uses",
        equation(
            "gather",
            "embed",
            lambda run, table, ids: run(jax.lax.stop_gradient(table), ids),
        ),
        FSDP_TOKENS,
        ("float64 gradients", "own_precision gradients"),
        seen="tied embeddings",
        names="embed.embedding",
    ),
    Mutation(
        "tied weights get the gradient of the last stage only",
        replace(
            StageExecutor, "_embed_gradient", lambda right: lambda self, carry, back, row: carry
        ),
        STAGES,
        ("float64 gradients", "own_precision gradients"),
        seen="tied embeddings on the first and the last stage",
        names="embed.embedding",
    ),
    Mutation(
        "one leaf is never updated",
        new_parameters(lambda path, before, after: before if path == "up.bias" else after),
        FSDP_PLAIN,
        ("own_precision parameters", "float64 parameters"),
        seen="parameters that are in no group of the optimizer",
        names="up.bias",
    ),
    Mutation(
        "what a model writes to its parameters is lost",
        replace(train_step, "compute_gradients", _not_written),
        FSDP_WRITTEN,
        ("own_precision state", "float64 parameters"),
        seen="normalized weights",
    ),
)
