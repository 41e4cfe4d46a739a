"""The step of a GPT in pipeline stages, or of the same GPT on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from meshwright.config.batch import solve_batch
from meshwright.config.schema import Precision
from meshwright.models import build_model
from meshwright.plan import Plan
from meshwright.step.assemble import Assembled, assemble
from meshwright.tasks.language_modeling import LanguageModeling


@dataclass(frozen=True)
class StagedGpt:
    """A GPT and its batches.

    Attributes:
        sizes: settings of the model; they include vocab_size and context_length.
        blocks: its blocks.
        rows: rows of tokens in a microbatch.
        precision: the precision it is trained in.
        clip_norm: largest global gradient norm.
    """

    sizes: dict[str, int]
    blocks: int
    rows: int
    precision: Precision = "no"
    clip_norm: float | None = None

    def batch(self, microbatches: int) -> Any:
        """Return a global batch."""
        return self._task().synthetic_batch(0, self.rows * microbatches)

    def batch_shapes(self, microbatches: int) -> Any:
        """Return the shapes of a global batch."""
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype),
            self.batch(microbatches),
        )

    def assemble(
        self,
        batch: Any,
        microbatches: int,
        *,
        stages: int = 1,
        schedule: str | None = None,
        chunks: int = 1,
        devices: Sequence[Any] | None = None,
    ) -> Assembled:
        """Return the step, in stages if there are several."""
        plan = Plan(
            mesh={"pipe": stages} if stages > 1 else {},
            batch=solve_batch(
                replicas=1,
                global_batch_size=self.rows * microbatches,
                gradient_accumulation_steps=microbatches,
            ),
            precision=self.precision,
            schedule=schedule,
            num_microbatches=microbatches if stages > 1 else 1,
            num_chunks=chunks,
        )
        return assemble(
            lambda rngs: build_model(
                "gpt", rngs=rngs, num_blocks=self.blocks, dropout=0.0, **self.sizes
            ),
            self._task().loss,
            optax.adamw(1e-3),
            plan,
            batch,
            clip_norm=self.clip_norm,
            devices=devices,
        )

    def _task(self) -> LanguageModeling:
        return LanguageModeling(
            vocab_size=self.sizes["vocab_size"], context_length=self.sizes["context_length"]
        )
