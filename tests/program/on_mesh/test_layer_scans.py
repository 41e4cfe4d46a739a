"""Loops over groups of blocks that are recomputed block by block."""

import jax
import optax
import pytest
from small_models import Turns, square_loss, vectors

import meshwright as mw
from meshwright.program.blocks.block_lists import cut_iteration
from meshwright.program.blocks.to_scan import roll_program
from meshwright.program.evaluate.mesh_view import MeshView
from meshwright.program.on_mesh import layer_scans
from meshwright.program.trace.model_leaves import split_model
from meshwright.program.trace.traced_loss import trace_loss


def test_an_iteration_is_cut_into_its_blocks():
    leaves = split_model(Turns())
    rolled = roll_program(trace_loss(square_loss, leaves, vectors(2))).traced
    (scan,) = [e for e in rolled.closed.jaxpr.eqns if e.primitive.name == "scan"]
    body = scan.params["jaxpr"].jaxpr
    blocks = cut_iteration(body, by_block=True)
    assert len(blocks) == 2
    assert [eqn for block in blocks for eqn in block.eqns] == list(body.eqns)


@pytest.mark.parametrize(
    ("mesh", "remat", "precision"),
    [
        ("fsdp=2", "full", "bf16"),
        pytest.param("data=2", "dots", "no", marks=pytest.mark.full),
    ],
)
def test_blocks_that_are_recomputed_one_by_one_train_like_one_device(
    mesh, remat, precision, monkeypatch
):
    # As on GPUs: CPUs recompute all blocks of an iteration at the same time.
    monkeypatch.setattr(MeshView, "platform", property(lambda view: "gpu"))
    cut = []

    def cut_iteration_noticed(program, *, by_block):
        cut.append(by_block)
        return cut_iteration(program, by_block=by_block)

    monkeypatch.setattr(layer_scans, "cut_iteration", cut_iteration_noticed)
    trainer = mw.Trainer(
        model=lambda rngs: Turns(rngs=rngs),
        loss=square_loss,
        optimizer=optax.sgd(0.1),
        mesh=mesh,
        devices=jax.devices()[:2],
        precision=precision,
        sharding=mw.ShardingConfig(blocks="scan", remat=remat),
    )
    certificate = trainer.verify(lambda step: vectors(4, seed=step), steps=1)
    assert certificate.equal, [failure.sentence() for failure in certificate.failures()]
    assert any(cut)
