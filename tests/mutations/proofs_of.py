"""`verify` and the ledger as checks: what fails, and what it names."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import optax
from mutations.models import Deep, Grown, Staged, Transformer, tokens_loss, tokens_of
from mutations.mutation import Patch
from proof.proofs import SAMPLES, Net, Plain, batch_of, certify, plan_of, weighted_loss

from meshwright.config.batch import solve_batch
from meshwright.config.schema import ShardingConfig
from meshwright.ledgers import Ledger, make_ledger
from meshwright.ledgers.ledger_records import HIGHEST
from meshwright.mesh.axes import parse_mesh
from meshwright.plan import Plan
from meshwright.proof import run
from meshwright.step.assemble import assemble


@dataclass(eq=False)
class Verify:
    """`verify` in one configuration.

    What one device computes does not depend on the mesh, so it is computed once and used again
    for every mutation that only concerns the mesh.

    Attributes:
        mesh: the mesh.
        model: the model's class.
        options: further settings of the plan and of `verify`.
    """

    mesh: str
    model: type = Net
    loss: Callable[..., Any] = weighted_loss
    batches: Callable[[int], Any] = batch_of
    options: dict[str, Any] = field(default_factory=dict)
    name: str = "verify"
    _known: dict[str, Any] = field(default_factory=dict)

    def failures(self, *, everything: bool) -> dict[str, str]:
        with Patch.context() as patch:
            if not everything:
                _compute_once(patch, self._known)
            certificate = certify(
                parse_mesh(self.mesh),
                model=self.model,
                loss=self.loss,
                batches=self.batches,
                **self.options,
            )
        return {
            f"{part} {comparison.what}": comparison.first_different
            for part in ("float64", "own_precision", "as_written")
            for comparison in getattr(certificate, part)
            if not comparison.equal
        }


def _compute_once(patch, known):
    """Let `verify` take from ``known`` what one device alone has computed before."""
    for owner, name in ((run, "_initial_values"), (run, "written_gradient")):
        patch.setattr(owner, name, _once(getattr(owner, name), known, name))
    for name in ("reference_in_float64", "as_written"):
        patch.setattr(run._Proof, name, _once(getattr(run._Proof, name), known, name))
    for name in ("wide", "update"):
        compute = vars(run._Proof)[name].func
        patch.setattr(run._Proof, name, property(_once(compute, known, name)))


def _once(compute, known, key):
    def call(*arguments):
        if key not in known:
            known[key] = compute(*arguments)
        return known[key]

    return call


@dataclass(eq=False)
class LedgerOf:
    """The ledger of one configuration: an axis fails that sends more or less than it needs."""

    mesh: str
    model: type = Plain
    loss: Callable[..., Any] = weighted_loss
    batches: Callable[[int], Any] = batch_of
    options: dict[str, Any] = field(default_factory=dict)
    name: str = "ledger"

    def failures(self, *, everything: bool) -> dict[str, str]:
        del everything
        return {
            f"{axis} below the minimum"
            if own.ratio is not None and own.ratio < 1
            else f"{axis} above the minimum": axis
            for axis, own in self.ledger().axes.items()
            if own.suspicious
        }

    def ledger(self) -> Ledger:
        """Compile the step and return its ledger."""
        mesh = parse_mesh(self.mesh)
        batch = self.batches(0)
        assembled = assemble(
            lambda rngs: self.model(rngs=rngs),
            self.loss,
            optax.sgd(0.1),
            plan_of(mesh, **self.options),
            batch,
            devices=jax.devices()[: plan_of(mesh).num_devices],
        )
        return make_ledger(assembled, batch)


@dataclass(eq=False)
class LedgersOf(LedgerOf):
    """Ledgers of one configuration: an axis fails that sends more than in the first of them."""

    name: str = "ledgers compared"
    _first: dict[str, int] = field(default_factory=dict)

    def failures(self, *, everything: bool) -> dict[str, str]:
        del everything
        sent = {axis: own.sent_bytes for axis, own in self.ledger().axes.items()}
        first = self._first = self._first or sent
        return {
            f"more sent over {axis}": axis
            for axis, size in sent.items()
            if size > HIGHEST * first[axis]
        }


def staged_plan(schedule="1f1b", chunks=1):
    """Return the plan of two stages, and two replicas, with four microbatches."""
    batch = solve_batch(replicas=2, global_batch_size=SAMPLES, gradient_accumulation_steps=4)
    return Plan(
        mesh={"pipe": 2, "data": 2},
        batch=batch,
        sharding=ShardingConfig(min_shard_size=1),
        schedule=schedule,
        num_microbatches=4,
        num_chunks=chunks,
    )


def _tokens(mesh, model=Transformer, **options):
    return Verify(mesh, model, tokens_loss, tokens_of, options)


DATA = Verify("data=2")
DATA_PLAIN = Verify("data=4", Plain)
DATA_ACCUMULATED = Verify("data=2", options={"accumulation": 4})
DATA_LOCAL = Verify("data=2", Plain, options={"accumulation": 2, "sync": 2})
DATA_FSDP_LOCAL = Verify("data=2,fsdp=2", Plain, options={"accumulation": 2, "sync": 2, "zero": 1})
FSDP = Verify("fsdp=2")
FSDP_PLAIN = Verify("fsdp=2", Plain)
FSDP_ACCUMULATED = Verify("fsdp=2", Plain, options={"accumulation": 4})
FSDP_CLIPPED = Verify("fsdp=4", Plain, options={"clip_norm": 0.1})
FSDP_BF16 = Verify("fsdp=2", Plain, options={"precision": "bf16"})
DATA_BF16 = Verify("data=8", Plain, options={"precision": "bf16"})
FSDP_FP16 = Verify("fsdp=2", Plain, options={"precision": "fp16", "clip_norm": 0.1})
TENSOR = _tokens("data=2,tensor=2")
FSDP_TOKENS = _tokens("fsdp=2")
DATA_TENSOR = Verify("data=2,tensor=2", Plain)
LOCAL_TOKENS = _tokens("data=2", accumulation=2, sync=2)
SCAN = _tokens("fsdp=2", Deep, blocks="scan", remat="full")
STAGES = _tokens("pipe=2,data=2", Staged, plan=staged_plan())
CHUNKS = _tokens("pipe=2,data=2", Staged, plan=staged_plan("interleaved", 2))
SPLIT_BACKWARD = _tokens("pipe=2,data=2", Staged, plan=staged_plan("zb_h1"))
LEDGER = LedgerOf("data=2", options={"accumulation": 2, "sync": 2})
# The smallest model found in which the layouts of activations alone matter: it divides the channels
# that it concatenates anew, which is more than the minimum in any case.
LEDGERS_GROWN = LedgersOf("fsdp=4,tensor=2", Grown)
# A model of two layers is compiled alike with and without layouts: there is nothing to move.
LEDGER_TOKENS = LedgerOf("fsdp=4", Transformer, tokens_loss, tokens_of)
