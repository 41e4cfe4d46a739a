"""On meshes, kernels give the numbers of one device and send no more than the plain program."""

import jax
import optax
import pytest
from flax import nnx
from program.kernels.kernel_runs import assert_equal, differentiate
from quick import quick_compilation

import meshwright as mw
from meshwright.config.batch import solve_batch
from meshwright.models import build_model
from meshwright.plan import Plan
from meshwright.step.assemble import assemble
from meshwright.tasks.language_modeling import LanguageModeling

__all__ = ["quick_compilation"]

TASK = LanguageModeling(vocab_size=512, context_length=16)
SAMPLES = 16

CELLS = [
    pytest.param("fsdp=4,tensor=2", {}, id="fsdp and tensor"),
    pytest.param("pipe=2,data=4", {}, id="stages"),
    pytest.param("data=8", {}, id="data"),
    pytest.param("fsdp=8", {"precision": "bf16"}, id="bf16"),
    pytest.param("fsdp=4,tensor=2", {"precision": "bf16"}, id="bf16 and tensor"),
    pytest.param("fsdp=4,tensor=2", {"blocks": "scan"}, id="rolled"),
    pytest.param("fsdp=4,tensor=2", {"precision": "fp16"}, id="fp16"),
    pytest.param("data=4,tensor=2", {"remat": "dots", "precision": "bf16"}, id="remat"),
    pytest.param("pipe=2,data=4", {"precision": "bf16", "blocks": "scan"}, id="bf16 in stages"),
    pytest.param("data=8", {"accumulation": 2, "sync": 2}, id="one sum of gradients"),
    pytest.param("fsdp=8", {"accumulation": 2, "zero": 2}, id="accumulated"),
]


SIZES = {
    "vocab_size": 512,
    "context_length": 16,
    "num_blocks": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "dropout": 0.0,
}


def build(rngs):
    return build_model("gpt", rngs=rngs, **SIZES)


def trainer(mesh, kernels, *, accumulation=1, sync=1, precision="no", **sharding):
    return mw.Trainer(
        model=build,
        loss=TASK.loss,
        optimizer=optax.adamw(1e-3),
        mesh=mesh,
        precision=precision,
        kernels=kernels,
        gradient_accumulation_steps=accumulation,
        sync_gradients_every=sync,
        sharding=mw.ShardingConfig(min_shard_size=0, **sharding),
    )


def batches(step):
    return TASK.synthetic_batch(step, SAMPLES)


def check(mesh, options):
    """Prove the step with kernels, and compare what it sends with the step without."""
    certificate = trainer(mesh, "xla", **options).verify(batches, steps=2)
    assert certificate.equal, [failure.sentence() for failure in certificate.failures()]
    assert any("attention" in line and "xla" in line for line in certificate.kernels)
    found, plain = (mw.ledger(trainer(mesh, k, **options), batches(0)) for k in ("xla", "none"))
    again = [line for line in certificate.kernels if "loss" in line and "recomputed" in line]
    for axis, own in plain.axes.items():
        sent = found.axes[axis].sent_bytes
        # A loss that is recomputed needs the maximum and the sum of each of the device's rows
        # again, where tensor divides the classes; totals are a few numbers.
        rows = SAMPLES * SIZES["context_length"] // 4 if again and axis == "tensor" else 0
        assert sent <= own.sent_bytes * 1.01 + 8 * rows, (axis, sent, own.sent_bytes)


@pytest.mark.full
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(("mesh", "options"), CELLS)
def test_kernels_on_a_mesh(mesh, options):
    check(mesh, options)


def small(num_blocks):
    return lambda: build_model("gpt", rngs=nnx.Rngs(0), **{**SIZES, "num_blocks": num_blocks})


MESHES = [("fsdp=2,tensor=2", 1), pytest.param("pipe=2,data=2", 2, marks=pytest.mark.full)]


@pytest.mark.parametrize(("mesh", "num_blocks"), MESHES)
def test_gradients_on_a_mesh_equal_those_of_one_device(mesh, num_blocks):
    sharding = mw.ShardingConfig(min_shard_size=0)
    batch = TASK.synthetic_batch(0, 4)
    found = differentiate(small(num_blocks), TASK.loss, batch, "xla", mesh=mesh, sharding=sharding)
    expected = differentiate(small(num_blocks), TASK.loss, batch, "none")
    kinds = {use.kind for use in found.uses if use.kernel}
    assert kinds == {"attention", "loss", "norm", "activation"}
    assert_equal(found, expected)


@pytest.mark.full
@pytest.mark.usefixtures("quick_compilation")
def test_a_table_that_is_looked_up_too_is_reduced_once():
    """The gradients of the last projection and of the lookup are added before they are sent."""
    found, plain = (
        mw.ledger(
            mw.Trainer(
                model=small(1),
                loss=TASK.loss,
                optimizer=optax.sgd(0.1),
                mesh="data=2",
                kernels=kernels,
                devices=jax.devices()[:2],
            ),
            TASK.synthetic_batch(0, 4),
        )
        for kernels in ("xla", "none")
    )
    assert found.axes["data"].sent_bytes <= plain.axes["data"].sent_bytes


def test_the_last_stage_computes_logits_once():
    """It takes the gradients of the loss in the same tick, together with the loss."""
    batch = solve_batch(replicas=2, micro_batch_size=2, gradient_accumulation_steps=4)
    stages = {"schedule": "1f1b", "num_microbatches": 4}
    plan = Plan(mesh={"pipe": 2, "data": 2}, batch=batch, kernels="xla", **stages)
    samples = TASK.synthetic_batch(0, batch.global_batch_size)
    devices = jax.devices()[:4]
    assembled = assemble(build, TASK.loss, optax.sgd(0.1), plan, samples, devices=devices)
    text = assembled.step.lower(assembled.put_batch(samples)).as_text()
    products = [line.rpartition("->")[2] for line in text.splitlines() if "dot_general" in line]
    assert sum(f"x{TASK.vocab_size}x" in result for result in products) == 1
