"""The settings of a trainer that its plan follows from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from meshwright.config.microbatches import solve_pipeline_batch
from meshwright.config.schema import KernelChoice, PipelineConfig, Precision, ShardingConfig
from meshwright.errors import UserError
from meshwright.inputs.checks import mesh_sizes
from meshwright.mesh.axes import shown_sizes
from meshwright.mesh.build import Device
from meshwright.plan import Plan, pipeline_fields, resolve_mesh
from meshwright.trainer.resuming.fewer_processes import plan_for_those_left
from meshwright.trainer.starting.fit_arguments import read_pipeline


@dataclass(frozen=True)
class PlanSettings:
    """What a plan is made of, under the names that `Trainer` has for it."""

    mesh: str | Mapping[str, int] | Plan
    precision: Precision
    kernels: KernelChoice
    gradient_accumulation_steps: int
    sync_gradients_every: int
    sharding: ShardingConfig
    pipeline: PipelineConfig | Mapping[str, Any] | str
    devices: Sequence[Device] | None

    def plan(self, num_samples: int) -> Plan:
        """Return the plan for global batches of this many samples."""
        count = len(self.devices) if self.devices is not None else jax.device_count()
        return plan_for_those_left(partial(self._for_all, num_samples), count)

    def _for_all(self, num_samples: int, num_devices: int) -> Plan:
        """Return the plan for this many devices, with all processes there."""
        if isinstance(self.mesh, Plan):
            self._check_given(self.mesh, num_samples)
            return self.mesh
        sizes = resolve_mesh(mesh_sizes(self.mesh), num_devices)
        steps, pipeline = self.gradient_accumulation_steps, read_pipeline(self.pipeline)
        batch = solve_pipeline_batch(
            pipeline,
            sizes,
            global_batch_size=num_samples,
            gradient_accumulation_steps=None if steps == 1 else steps,
            sync_gradients_every=self.sync_gradients_every,
        )
        return Plan(
            mesh=shown_sizes(sizes),
            batch=batch,
            sharding=self.sharding,
            precision=self.precision,
            kernels=self.kernels,
            **pipeline_fields(pipeline, sizes, batch),
        )

    def _check_given(self, plan: Plan, num_samples: int) -> None:
        """Raise if settings or batches are not those of a plan that is given as the mesh."""
        batch = plan.batch
        beside: dict[str, tuple[Any, Any, Any]] = {
            "precision": (self.precision, "no", plan.precision),
            "kernels": (self.kernels, "auto", plan.kernels),
            "sharding": (self.sharding, ShardingConfig(), plan.sharding),
            "pipeline": (read_pipeline(self.pipeline), PipelineConfig(), PipelineConfig()),
            **{
                name: (getattr(self, name), 1, getattr(batch, name))
                for name in ("gradient_accumulation_steps", "sync_gradients_every")
            },
        }
        for name, (given, default, planned) in beside.items():
            if given not in (default, planned):
                raise UserError(
                    f"{name} differs from the plan that is given as the mesh",
                    why=f"the trainer has {given}, the plan {planned}",
                    fix=f"leave {name} out, or change it in the plan",
                )
        if num_samples != batch.global_batch_size:
            raise UserError(
                f"the batches have {num_samples} samples, and the plan is for "
                f"{batch.global_batch_size}",
                fix=f"give batches of {batch.global_batch_size}, or make a plan for {num_samples}",
            )
