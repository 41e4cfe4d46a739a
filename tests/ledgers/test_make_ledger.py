"""The ledger equals theory, and notices a program that does something else."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from quick import quick_module
from small_models import SAMPLES, WIDTH, Residuals, square_loss, vectors

import meshwright as mw
from meshwright.compiled.collectives import Collective
from meshwright.config.batch import solve_batch
from meshwright.config.schema import ShardingConfig
from meshwright.ledgers import make_ledger
from meshwright.ledgers.make_ledger import shares
from meshwright.models import build_model
from meshwright.plan import Plan
from meshwright.step.assemble import assemble
from meshwright.step.train_step import TrainStep
from meshwright.tasks import find_task

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")

OPTIMIZER = optax.sgd(1e-3, momentum=0.9)
SIZES = {"vocab_size": 256, "context_length": 32, "hidden_size": 64, "num_blocks": 2}


def assembled_for(mesh, *, blocks=2, accumulation=1, precision="no", **sharding):
    task = find_task("language_modeling")(vocab_size=256, context_length=32)
    replicas = mesh.get("data", 1) * mesh.get("fsdp", 1)
    plan = Plan(
        mesh=mesh,
        batch=solve_batch(
            replicas=replicas,
            micro_batch_size=1,
            gradient_accumulation_steps=accumulation,
        ),
        sharding=ShardingConfig(min_shard_size=64, **sharding),
        precision=precision,
    )
    batch = task.example_batch(plan.batch.global_batch_size)
    model = lambda rngs: build_model("gpt", rngs=rngs, **SIZES | {"num_blocks": blocks})  # noqa: E731
    return assemble(model, task.loss, OPTIMIZER, plan, batch, clip_norm=1.0), batch


def parameter_bytes(assembled):
    return sum(leaf.nbytes for leaf in assembled.traced.layout.leaves if leaf.role == "param")


# tests/compiled/test_collectives.py compares the same program with theory every day.
@pytest.mark.full
def test_data_parallelism_sends_the_closed_form():
    assembled, batch = assembled_for({"data": 8}, blocks=1)
    ledger = make_ledger(assembled, batch)
    closed_form = 2 * 7 / 8 * parameter_bytes(assembled)
    assert ledger.axes["data"].minimum_bytes == pytest.approx(closed_form)
    assert ledger.sent_bytes == pytest.approx(closed_form, rel=0.001)
    assert ledger.suspicious == []


@pytest.fixture(scope="module")
def on_fsdp():
    """A step on fsdp=8 and its batch."""
    return assembled_for({"fsdp": 8})


@pytest.mark.parametrize(
    ("keep", "passes"), [(False, 3), pytest.param(True, 2, marks=pytest.mark.full)]
)
def test_fsdp_sends_the_closed_form(on_fsdp, keep, passes):
    assembled, batch = assembled_for({"fsdp": 8}, keep_gathered=True) if keep else on_fsdp
    ledger = make_ledger(assembled, batch)
    leaves = assembled.traced.layout.leaves
    blocks = [x for x in leaves if x.role == "param" and x.path.startswith("blocks")]
    again = sum(x.nbytes for x in blocks if not x.path.endswith("bias"))
    # Embeddings and the last norm are used at both ends and stay gathered; no gradient needs to
    # know a bias.
    closed_form = 7 / 8 * (passes * again + 2 * (parameter_bytes(assembled) - again))
    assert ledger.axes["fsdp"].minimum_bytes == pytest.approx(closed_form, rel=0.001)
    assert 0.98 <= ledger.axes["fsdp"].ratio <= 1.05


@pytest.mark.parametrize("frozen", ["up", pytest.param("down", marks=pytest.mark.full)])
def test_frozen_weights_are_gathered_but_have_no_gradient_to_reduce(frozen):
    """Those that read data only once: what they are given has no gradient either."""
    trainable = nnx.All(nnx.Param, nnx.Not(nnx.PathContains(frozen)))
    plan = Plan(
        mesh={"fsdp": 8},
        batch=solve_batch(replicas=8, global_batch_size=SAMPLES),
        sharding=ShardingConfig(min_shard_size=0),
    )
    source = lambda rngs: Residuals(2, rngs=rngs)  # noqa: E731
    assembled = assemble(source, square_loss, optax.sgd(0.1), plan, vectors(), trainable=trainable)
    ledger = make_ledger(assembled, vectors())
    kernel, bias = 7 / 8 * 4 * WIDTH * 2 * WIDTH, 7 / 8 * 4 * 2 * WIDTH
    passes = {
        # The first block's kernel is only read forward, as biases are.
        "up": (1 + 2) * kernel + 2 * bias + (2 + 3) * kernel,
        "down": (2 + 3) * kernel + 2 * 2 * bias + (2 + 2) * kernel,
    }[frozen]
    assert ledger.axes["fsdp"].minimum_bytes == pytest.approx(passes)
    assert ledger.axes["fsdp"].ratio == pytest.approx(1, abs=0.02)


@pytest.fixture(scope="module")
def on_tensor():
    """A step on fsdp=2 × tensor=4, its batch and its ledger, compiled once."""
    assembled, batch = assembled_for({"fsdp": 2, "tensor": 4})
    return assembled, batch, make_ledger(assembled, batch)


def test_tensor_parallelism_needs_one_reduction_per_half_block_and_direction(on_tensor):
    _, _, ledger = on_tensor
    # Per device: one sample of 32 positions × 64 in float32; 4 per block, 2 at the ends.
    activation = 1 * 32 * 64 * 4
    closed_form = (4 * 2 + 2) * 2 * 3 / 4 * activation
    assert ledger.axes["tensor"].minimum_bytes == pytest.approx(closed_form, rel=0.1)
    assert ledger.suspicious == []


def test_argument_bytes_are_the_listed_shards_and_the_batch(on_tensor):
    assembled, batch, ledger = on_tensor
    state = assembled.step.abstract_state
    shards = sum(
        jax.numpy.prod(jax.numpy.array(x.sharding.shard_shape(x.shape))).item() * x.dtype.itemsize
        for x in jax.tree.leaves(state)
        if not jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
    )
    keys = sum(
        8 for x in jax.tree.leaves(state) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
    )
    tokens = batch["tokens"].size // 2 * 4
    assert ledger.argument_bytes == shards + keys + tokens


def test_cpus_do_not_show_what_overlaps(on_tensor):
    _, _, ledger = on_tensor
    written = ledger.model_dump(mode="json")
    assert [own["overlapped"] for own in written["axes"].values()] == [None, None]
    assert [own["overlapped_bytes"] for own in written["axes"].values()] == [None, None]
    assert "no asynchronous collectives" in written["overlap_unknown"]
    lines = str(ledger).splitlines()
    assert all(line.endswith("–") for line in lines[2:4])
    (note,) = [line for line in lines if "not known" in line]
    assert "CPUs" in note
    assert "%" not in str(ledger)


def test_a_program_without_pins_is_noticed(on_fsdp):
    assembled, batch = on_fsdp
    unpinned = dataclasses.replace(assembled.decision, activations={}, gathers={})
    step = TrainStep(assembled.traced, unpinned, assembled.plan, assembled.mesh, OPTIMIZER)
    ledger = make_ledger(dataclasses.replace(assembled, step=step), batch)
    assert ledger.suspicious == ["fsdp"]


def test_a_reduction_over_two_axes_is_shared_between_them():
    reduction = Collective(
        kind="all-reduce", axes=("data", "fsdp"), group_size=8, count=1,
        payload_bytes=800, dtype="f32", module="", phase="update", name="", op_name="",
    )  # fmt: skip
    found = shares(reduction, {"data": 2, "fsdp": 4})
    assert found["fsdp"] == pytest.approx(2 * 3 / 4 * 800)
    assert found["data"] == pytest.approx(2 * 1 / 2 * 200)
    assert sum(found.values()) == pytest.approx(2 * 7 / 8 * 800)


def test_stages_send_what_their_table_has_and_that_is_the_minimum():
    count = 4
    plan = Plan(
        mesh={"pipe": 2, "data": 2},
        batch=solve_batch(replicas=2, global_batch_size=16, gradient_accumulation_steps=count),
        schedule="gpipe",
        num_microbatches=count,
    )
    batch, devices = vectors(), jax.devices()[:4]
    model = lambda rngs: Residuals(2)  # noqa: E731
    assembled = assemble(model, square_loss, optax.sgd(0.1), plan, batch, devices=devices)
    ledger = make_ledger(assembled, batch)
    # Each stage has one block, whose gradients are reduced once per microbatch; in 10 ticks.
    block = sum(leaf.nbytes for leaf in assembled.model_leaves.leaves) // 2
    assert 0 <= ledger.axes["data"].sent_bytes - count * block < 64
    # One of two stages hands on, the other back: two samples of each microbatch on each device.
    (handed,) = [line for line in ledger.lines if line.kind == "collective-permute"]
    assert handed.count == 2 * count
    assert handed.payload_bytes == 2 * count * 2 * WIDTH * 4
    # Each device of the stage that sends most hands on `count` messages of two samples.
    assert ledger.axes["pipe"].minimum_bytes == count * 2 * WIDTH * 4
    assert ledger.axes["data"].minimum_bytes == count * block
    assert ledger.suspicious == [], str(ledger)
    head, columns, *_ = str(ledger).splitlines()
    assert head == "pipe=2 × data=2, bytes each device sends per step"
    assert columns.split() == ["axis", "devices", "sent", "needed", "ratio", "overlapped"]
    assert repr(ledger).startswith("Ledger(mesh={'pipe': 2, 'data': 2}, sent_bytes=")


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        pytest.param({"pipe": 2, "data": 2}, {}, marks=pytest.mark.full),
        pytest.param({"pipe": 2, "tensor": 2}, {}, marks=pytest.mark.full),
        pytest.param({"pipe": 2, "fsdp": 2}, {}, marks=pytest.mark.full),
        pytest.param({"pipe": 2, "fsdp": 2}, {"zero": 1}, marks=pytest.mark.full),
        pytest.param({"pipe": 2, "data": 2}, {"every": 4}, marks=pytest.mark.full),
        # Only the dim of the vocabulary's table that fsdp divides is left for the stages.
        pytest.param({"pipe": 2, "fsdp": 2, "tensor": 2}, {"vocab": 255}, marks=pytest.mark.full),
    ],
)
def test_stages_of_a_language_model_send_the_minimum(mesh, options):
    """Each stage keeps its part of what all add up: gradients of weights outside the blocks."""
    count, vocab = 4, options.get("vocab", 256)
    samples = 2 * count * mesh.get("fsdp", 1) * mesh.get("data", 1)
    plan = Plan(
        mesh=mesh,
        batch=solve_batch(
            replicas=mesh.get("fsdp", 1) * mesh.get("data", 1),
            global_batch_size=samples,
            gradient_accumulation_steps=count,
            sync_gradients_every=options.get("every", 1),
        ),
        sharding=ShardingConfig(min_shard_size=64, zero=options.get("zero", 3)),
        schedule="1f1b",
        num_microbatches=count,
    )
    task = find_task("language_modeling")(vocab_size=vocab, context_length=32)
    batch, devices = task.example_batch(samples), jax.devices()[: plan.num_devices]
    model = lambda rngs: build_model("gpt", rngs=rngs, **SIZES | {"vocab_size": vocab})  # noqa: E731
    assembled = assemble(model, task.loss, optax.sgd(0.1), plan, batch, devices=devices)
    ledger = make_ledger(assembled, batch)
    assert ledger.suspicious == [], str(ledger)
    assert ledger.axes["pipe"].ratio <= 1.05
    reduced = [line for line in ledger.lines if line.kind == "reduce-scatter"]
    assert any("pipe" in line.axes for line in reduced), str(ledger)


class Adapted(nnx.Module):
    def __init__(self, rngs):
        up, down = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)
        self.up = nnx.LoRA(16, 2, 64, base_module=up, rngs=rngs)
        self.down = nnx.LoRA(64, 2, 16, base_module=down, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


def test_frozen_weights_are_divided_over_tensor_and_send_the_minimum():
    trainer = mw.Trainer(
        model=lambda rngs: nnx.Sequential(Adapted(rngs), Adapted(rngs)),
        loss=lambda model, batch: jax.numpy.mean(model(batch["x"]) ** 2),
        optimizer=optax.sgd(0.1),
        mesh="tensor=4",
        trainable=nnx.LoRAParam,
        devices=jax.devices()[:4],
    )
    ledger = trainer.ledger({"x": np.ones((96, 16), np.float32)}, batch_size=32)
    # Forward: one output per `down`, and its two columns of rank 2. Backward: the input of the
    # second `up`, and the ranks of both. The first input has no gradient.
    whole, ranks = 32 * 16 * 4, 32 * 2 * 4
    closed_form = 2 * 3 / 4 * (3 * whole + 4 * ranks)
    assert ledger.axes["tensor"].minimum_bytes == pytest.approx(closed_form)
    assert ledger.axes["tensor"].ratio == pytest.approx(1, abs=0.02), str(ledger)


def test_the_ledger_of_something_else_names_what_to_write():
    with pytest.raises(mw.UserError, match=r"mw.ledger\(mw.Trainer"):
        mw.ledger("gpt", {"x": np.ones((2, 2))})


@pytest.mark.parametrize("precision", [pytest.param("no", marks=pytest.mark.full), "bf16"])
def test_a_weight_that_several_products_read_has_its_gradients_reduced_once(precision):
    """Read twice as it is, and once transposed, as in a tied autoencoder of two views."""

    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.encoder = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)

        def __call__(self, x):
            hidden = jax.numpy.tanh(self.encoder(x)) + jax.numpy.tanh(self.encoder(2 * x))
            return hidden @ self.encoder.kernel.T

    trainer = mw.Trainer(
        model=Tied,
        loss=square_loss,
        optimizer=optax.sgd(0.1),
        mesh="data=2,fsdp=4",
        precision=precision,
        sharding=ShardingConfig(min_shard_size=64),
    )
    axes = trainer.ledger(vectors()).axes
    assert {axis: round(own.ratio, 2) for axis, own in axes.items()} == {"data": 1, "fsdp": 1}


def test_a_residual_layer_whose_input_is_data_needs_no_reduction_over_tensor():
    trainer = mw.Trainer(
        model=lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs),
        loss=lambda model, x: ((x + nnx.tanh(model(x))) ** 2).mean(),
        optimizer=optax.sgd(0.1),
        mesh="data=2,tensor=4",
    )
    axis = trainer.ledger(np.ones((SAMPLES, WIDTH), np.float32)).axes["tensor"]
    assert axis.minimum_bytes < 20  # The sum of the loss.
    assert axis.sent_bytes < 20


class Splines(nnx.Module):
    """Two layers of a function per edge plus a product, and a weight that nothing reads."""

    def __init__(self, rngs):
        self.edges = nnx.List([nnx.Param(rngs.normal((16, 16, 3))) for _ in range(2)])
        self.bases = nnx.List([nnx.Linear(16, 16, use_bias=False, rngs=rngs) for _ in range(2)])
        self.unread = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        for edge, base in zip(self.edges, self.bases, strict=True):
            near = jax.numpy.exp(-((x[..., None] - jax.numpy.arange(3.0)) ** 2))
            x = jax.numpy.einsum("bik,iok->bo", near, edge[...]) + base(x)
        return x


def test_partial_sums_that_are_added_need_one_reduction_and_an_unread_weight_none():
    trainer = mw.Trainer(
        model=Splines,
        loss=lambda model, x: (model(x) ** 2).mean(),
        optimizer=optax.sgd(0.1),
        mesh="data=2,tensor=4",
    )
    found = trainer.ledger(np.ones((SAMPLES, 16), np.float32))
    for axis in found.axes.values():
        assert 0 <= axis.sent_bytes - axis.minimum_bytes < 60
