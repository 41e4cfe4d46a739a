"""Loops over groups of blocks that are recomputed block by block."""

import jax
import optax
import pytest
from flax import nnx

import meshwright as mw
from meshwright.models import build_model
from meshwright.program.blocks.block_lists import cut_iteration
from meshwright.program.blocks.to_scan import roll_program
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.on_mesh import layer_scans
from meshwright.program.trace.model_leaves import split_model
from meshwright.program.trace.traced_loss import trace_loss
from meshwright.tasks import find_task

SIZES = {
    "vocab_size": 64,
    "context_length": 8,
    "num_blocks": 4,
    "hidden_size": 16,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "mlp_size": 32,
    "sliding_window": 4,
    "global_every": 2,
}
TASK = find_task("language_modeling")(vocab_size=64, context_length=8)


def model(rngs):
    return build_model("gemma3", rngs=rngs, **SIZES)


def test_an_iteration_is_cut_into_its_blocks():
    leaves = split_model(model(nnx.Rngs(0)))
    rolled = roll_program(trace_loss(TASK.loss, leaves, TASK.synthetic_batch(0, 2))).traced
    (scan,) = [e for e in rolled.closed.jaxpr.eqns if e.primitive.name == "scan"]
    body = scan.params["jaxpr"].jaxpr
    blocks = cut_iteration(body)
    assert len(blocks) == SIZES["global_every"]
    assert [eqn for block in blocks for eqn in block.eqns] == list(body.eqns)


@pytest.mark.parametrize(
    ("mesh", "remat", "precision"), [("fsdp=2", "full", "bf16"), ("data=2", "dots", "no")]
)
def test_blocks_that_are_recomputed_one_by_one_train_like_one_device(
    mesh, remat, precision, monkeypatch
):
    # As on GPUs: CPUs recompute all blocks of an iteration at the same time.
    monkeypatch.setattr(MeshView, "platform", property(lambda view: "gpu"))
    cut = []
    monkeypatch.setattr(layer_scans, "cut_iteration", lambda p: cut.append(p) or cut_iteration(p))
    trainer = mw.Trainer(
        model=model,
        loss=TASK.loss,
        optimizer=optax.sgd(0.1),
        mesh=mesh,
        devices=jax.devices()[:2],
        precision=precision,
        sharding=mw.ShardingConfig(blocks="scan", remat=remat),
    )
    certificate = trainer.verify(lambda step: TASK.synthetic_batch(step, 4), steps=1)
    assert certificate.equal, [failure.sentence() for failure in certificate.failures()]
    assert cut
