"""PipelineStage, pipeline_forward and GPipePipeline: the simplest pipeline of dense layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from meshwright.errors import UserError


class PipelineStage(nnx.Module):
    """Dense layers, each followed by a ReLU.

    Args:
        layer_specs: for each layer, ``in_features`` and ``out_features``; ``relu=False`` leaves the
            ReLU out, as after the layer that gives logits.
        stage_id: the stage's number.
        rngs: random streams.
    """

    def __init__(
        self, layer_specs: Sequence[Mapping[str, Any]], stage_id: int, *, rngs: nnx.Rngs
    ) -> None:
        self.stage_id = stage_id
        self.relu = tuple(bool(spec.get("relu", True)) for spec in layer_specs)
        self.layers = nnx.List(
            [
                nnx.Linear(spec["in_features"], spec["out_features"], rngs=rngs)
                for spec in layer_specs
            ]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Pass x [B, in_features] through the stage's layers."""
        for layer, relu in zip(self.layers, self.relu, strict=True):
            x = nnx.relu(layer(x)) if relu else layer(x)
        return x


def pipeline_forward(
    stages: Sequence[Callable[[Any], Any]], inputs: jax.Array, num_microbatches: int
) -> jax.Array:
    """Pass a batch through stages in S+M-1 ticks, every stage on another microbatch.

    The result is that of the stages one after another on the whole batch, whatever its size.
    """
    if not 1 <= num_microbatches <= inputs.shape[0]:
        raise UserError(
            f"{inputs.shape[0]} samples cannot be divided into {num_microbatches} microbatches",
            fix=f"write num_microbatches={min(inputs.shape[0], max(1, num_microbatches))}",
        )
    microbatches = jnp.array_split(inputs, num_microbatches)
    activations: list[Any] = [None] * len(stages)
    outputs: list[Any] = []
    for tick in range(len(stages) + num_microbatches - 1):
        # The last stage first: each reads what the one before it has left in the previous tick.
        for stage in reversed(range(len(stages))):
            number = tick - stage
            if 0 <= number < num_microbatches:
                x = microbatches[number] if stage == 0 else activations[stage - 1]
                activations[stage] = stages[stage](x)
                if stage == len(stages) - 1:
                    outputs.append(activations[stage])
    return jnp.concatenate(outputs)


class GPipePipeline(nnx.Module):
    """Equal dense layers in stages, run as a pipeline.

    Args:
        num_stages: how many stages.
        layers_per_stage: layers of each.
        hidden_dim: width of every layer.
        rngs: random streams.
    """

    def __init__(
        self, num_stages: int, layers_per_stage: int, hidden_dim: int, *, rngs: nnx.Rngs
    ) -> None:
        self.num_stages = num_stages
        spec = {"in_features": hidden_dim, "out_features": hidden_dim}
        self.stages = nnx.List(
            [PipelineStage([spec] * layers_per_stage, n, rngs=rngs) for n in range(num_stages)]
        )

    def forward_stage(self, stage_id: int, x: jax.Array) -> jax.Array:
        """Pass x [B, hidden_dim] through one stage."""
        return self.stages[stage_id](x)

    def __call__(self, x: jax.Array, num_microbatches: int = 1) -> jax.Array:
        """Pass x [B, hidden_dim] through all stages, in so many microbatches."""
        return pipeline_forward(list(self.stages), x, num_microbatches)
