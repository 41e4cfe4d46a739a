"""A step by stages is the step of one device on the same microbatches."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from pipeline.models import (
    WIDTH,
    Entangled,
    Tokens,
    entangled_loss,
    tokens_batch,
    tokens_loss,
)
from program.programs import assert_close, equations
from small_models import Norms, Residuals, builder, square_loss, task_batch, vectors
from step.runs import filled, on_mesh, on_one_device

from meshwright.compiled.hlo import parse_hlo
from meshwright.config.batch import solve_batch
from meshwright.config.schema import ShardingConfig
from meshwright.errors import UserError
from meshwright.ledgers import make_ledger
from meshwright.pipeline.execute import pipelined_loss
from meshwright.pipeline.execute.executor import StageExecutor
from meshwright.plan import Plan
from meshwright.step.assemble import assemble

OPTIMIZER = optax.sgd(0.1, momentum=0.9)
CUBE = {"pipe": 2, "fsdp": 2, "tensor": 2}
MODELS = {
    "plain": functools.partial(Tokens),
    "tied": functools.partial(Tokens, tied=True),
    "dropout": functools.partial(Tokens, dropout=0.3),
    "tied dropout": functools.partial(Tokens, tied=True, dropout=0.3),
}


@pytest.fixture(autouse=True)
def _double_precision():
    with jax.enable_x64(True):
        yield


def put(build, loss, batch, mesh, schedule=None, *, count=4, at_a_time=None, chunks=2, **options):
    """Assemble a step; ``count`` microbatches, ``at_a_time`` between two flushes."""
    samples = jax.tree.leaves(batch)[0].shape[0]
    precision, wide = options.pop("precision", "no"), options.pop("wide", True)
    staged = "pipe" in mesh
    plan = Plan(
        mesh=mesh,
        batch=solve_batch(
            replicas=mesh.get("data", 1) * mesh.get("fsdp", 1),
            global_batch_size=samples,
            gradient_accumulation_steps=count,
            sync_gradients_every=options.pop("every", 1),
        ),
        sharding=ShardingConfig(min_shard_size=0, **options),
        schedule=schedule if staged else None,
        num_microbatches=(at_a_time or count) if staged else 1,
        num_chunks=chunks if schedule == "interleaved" else 1,
        precision=precision,
    )
    devices = jax.devices()[: plan.num_devices]
    with jax.enable_x64(False):
        return assemble(
            lambda rngs: build(), loss, OPTIMIZER, plan, batch, devices=devices, wide=wide
        )


def model(name, blocks):
    return functools.partial(MODELS[name], num_blocks=blocks)


@functools.cache
def one_device(name, blocks):
    """Train a model on one device, microbatch after microbatch."""
    with jax.enable_x64(True):
        build, batches = model(name, blocks), [tokens_batch(seed=1), tokens_batch(seed=2)]
        alone = put(build, tokens_loss, batches[0], {})
        return on_one_device(alone, filled(build), batches)


def check(found, expected, tolerance=1e-12):
    np.testing.assert_allclose(found.losses, expected.losses, rtol=tolerance)
    assert_close(found.leaves, expected.leaves, tolerance)


def compare(name, mesh, schedule, *, blocks=4, **options):
    build, batches = model(name, blocks), [tokens_batch(seed=1), tokens_batch(seed=2)]
    assembled = put(build, tokens_loss, batches[0], mesh, schedule, **options)
    found = on_mesh(assembled, filled(build), batches)
    check(found, one_device(name, blocks))
    return assembled, found


@pytest.mark.parametrize(
    ("schedule", "mesh", "options"),
    [
        # Six blocks on four stages; gradients reduced once for four microbatches.
        pytest.param("gpipe", {"pipe": 4}, {"blocks": 6}, marks=pytest.mark.full),
        ("1f1b", {"pipe": 2, "data": 2, "tensor": 2}, {"every": 4}),
        pytest.param("1f1b", CUBE, {}, marks=pytest.mark.full),
        pytest.param("interleaved", {"pipe": 2, "data": 4}, {"every": 4}, marks=pytest.mark.full),
        pytest.param("zb_h1", {"pipe": 4}, {}, marks=pytest.mark.full),
    ],
)
def test_every_schedule_trains_like_one_device(schedule, mesh, options):
    _, found = compare("tied dropout", mesh, schedule, **options)
    assert 0 <= float(found.metrics["accuracy"]) <= 1


@pytest.mark.full
@pytest.mark.parametrize("name", ["plain", "tied", "dropout"])
@pytest.mark.parametrize("mesh", [{"pipe": 4}, CUBE, {"pipe": 2, "data": 4}])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1"])
def test_every_schedule_on_every_mesh(schedule, mesh, name):
    # Two chunks on each of four stages.
    blocks = 8 if schedule == "interleaved" and mesh == {"pipe": 4} else 4
    compare(name, mesh, schedule, blocks=blocks)


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "mesh", "blocks"),
    [
        ("1f1b", {"pipe": 4}, 6),
        ("zb_h1", CUBE, 5),
        ("interleaved", {"pipe": 2, "data": 4}, 5),
        ("gpipe", {"pipe": 2, "fsdp": 2}, 3),
    ],
)
def test_stages_may_have_different_numbers_of_blocks(schedule, mesh, blocks):
    compare("tied dropout", mesh, schedule, blocks=blocks)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize(
    "sharding", [{"remat": "full"}, {"keep_gathered": True}, {"zero": 1}, {"remat": "dots"}]
)
def test_remat_and_lifetimes_of_weights_change_nothing(schedule, sharding):
    compare("tied dropout", {"pipe": 2, "fsdp": 2}, schedule, **sharding)


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "mesh"),
    [
        ("zb_h1", CUBE),
        ("1f1b", {"pipe": 2, "data": 4}),
        ("interleaved", {"pipe": 2, "data": 2, "fsdp": 2}),
        ("gpipe", {"pipe": 4, "data": 2}),
    ],
)
def test_gradients_may_be_reduced_once_per_step(schedule, mesh):
    compare("tied dropout", mesh, schedule, every=4, zero=1)


@pytest.mark.full
def test_gradients_reduced_once_per_step_are_sent_once():
    build, batch, mesh = model("plain", 4), tokens_batch(), {"pipe": 2, "data": 2}
    sent = {}
    for every in (1, 4):
        with jax.enable_x64(False):
            one = put(build, tokens_loss, batch, mesh, "gpipe", every=every, wide=False)
            sent[every] = make_ledger(one, batch).axes["data"].sent_bytes
    # Of four microbatches what a stage has is reduced, by pairs: as many bytes as its parameters.
    own, total = (f(stage.parameters for stage in one.pipeline_report.stages) for f in (max, sum))
    assert 0 <= sent[1] - 4 * 4 * own < 128
    # At the end, each of two stages keeps half of what comes before and after the blocks.
    assert 0 <= sent[4] - 4 * total / 2 < 128


@pytest.mark.full
def test_a_step_may_flush_the_pipeline_several_times():
    compare("tied dropout", {"pipe": 2}, "gpipe", at_a_time=2)


@pytest.mark.full
def test_blocks_that_share_weights_streams_and_losses_are_cut_correctly():
    batch = vectors(width=WIDTH)
    alone = put(Entangled, entangled_loss, batch, {}, count=2)
    expected = on_one_device(alone, filled(Entangled), [batch, batch])
    assembled = put(Entangled, entangled_loss, batch, {"pipe": 2, "data": 2}, "1f1b", count=2)
    check(on_mesh(assembled, filled(Entangled), [batch, batch]), expected, 1e-10)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_transformer_on_three_axes_trains_like_one_device(schedule):
    build = builder("gpt", num_blocks=2, dropout=0.1)
    loss, batch = task_batch("gpt")
    expected = on_one_device(put(build, loss, batch, {}), filled(build), [batch])
    assembled = put(build, loss, batch, CUBE, schedule)
    check(on_mesh(assembled, filled(build), [batch]), expected)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_half_precision_is_that_of_a_mesh_without_stages(precision, schedule):
    batch = tokens_batch()
    with jax.enable_x64(False):
        runs = [
            on_mesh(
                put(
                    MODELS["tied"],
                    tokens_loss,
                    batch,
                    mesh,
                    schedule,
                    wide=False,
                    precision=precision,
                ),
                filled(MODELS["tied"]),
                [batch],
            )
            for mesh in ({}, {"pipe": 2, "fsdp": 2})
        ]
    np.testing.assert_allclose(runs[1].losses, runs[0].losses, rtol=1e-3)
    assert_close(runs[1].leaves, runs[0].leaves, 1e-2)


def test_ticks_copy_no_buffer():
    """Neither the slots of saved values nor the sums of gradients, which are updated in place."""
    batch = tokens_batch()
    assembled = put(MODELS["plain"], tokens_loss, batch, {"pipe": 2}, "1f1b", wide=False)
    program = parse_hlo(assembled.step.lower(jax.tree.leaves(batch)).compile().as_text())
    # Kernels of a stage: they are larger than the messages between stages.
    large = max(stack.step.leaf.nbytes for stack in assembled.step.pipeline.cut.stacks) // 2
    copied = [
        instruction.shape
        for computation in program.computations.values()
        if computation is not program.entry and not computation.name.startswith("fused")
        for instruction in computation.instructions
        if instruction.opcode == "copy" and instruction.shape.bytes >= large
    ]
    assert copied == []


def ticks(schedule, build=MODELS["plain"], **options):
    """Return the equations of a tick, as accelerators run it."""
    batch = tokens_batch()
    assembled = put(build, tokens_loss, batch, {"pipe": 4}, schedule, **options)
    leaves = [step.leaf for step in assembled.traced.layout.step_leaves]
    microbatches = [np.reshape(leaf, (4, 4, *leaf.shape[1:])) for leaf in jax.tree.leaves(batch)]
    with jax.enable_x64(False), pytest.MonkeyPatch.context() as patch:
        on_gpu = functools.partial(StageExecutor, platform="gpu")
        patch.setattr(pipelined_loss, "StageExecutor", lambda *a, platform, **k: on_gpu(*a, **k))
        structs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        program = jax.make_jaxpr(lambda *args: assembled.step.pipeline(*args).gradients)(
            structs, microbatches
        )
    (scan,) = [eqn for eqn, _ in equations(program.jaxpr) if eqn.primitive.name == "scan"]
    return [eqn for eqn, _ in equations(scan.params["jaxpr"].jaxpr)]


@pytest.mark.parametrize(
    ("schedule", "guards"), [("1f1b", 4), pytest.param("zb_h1", 5, marks=pytest.mark.full)]
)
def test_ticks_ask_the_host_as_rarely_as_possible(schedule, guards):
    """Accelerators stop for each loop or branch of a tick: the host decides whether it runs.

    A tick has one for a forward pass, a backward pass and a weight gradient each, one for the head,
    which only one stage has, and one for what is sent. All stages look tokens up.
    """
    names = [eqn.primitive.name for eqn in ticks(schedule, wide=False)]
    assert names.count("while") + names.count("cond") == guards


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb_h1", marks=pytest.mark.full)])
def test_stages_that_drop_what_they_looked_up_train_like_one_device(schedule, monkeypatch):
    def looks_up(self):
        set_up(self)
        assert self.work.only_looks_up
        self._all_look_up = True

    set_up = StageExecutor.__post_init__
    monkeypatch.setattr(StageExecutor, "__post_init__", looks_up)
    compare("tied", {"pipe": 2}, schedule)


def test_an_embedding_with_products_runs_on_its_stage_alone():
    class Projected(Tokens):
        def __init__(self):
            super().__init__()
            self.project = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))

        def __call__(self, tokens):
            x = self.project(self.embed(tokens))
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    names = [eqn.primitive.name for eqn in ticks("1f1b", wide=False, build=Projected)]
    assert names.count("while") + names.count("cond") == 6


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_weights_of_blocks_are_cast_once_per_step(schedule):
    casts = [
        eqn.outvars[0].aval
        for eqn in ticks(schedule, wide=False, precision="bf16")
        if eqn.primitive.name == "convert_element_type"
    ]
    assert any(aval.dtype == "bfloat16" for aval in casts)
    kernels = {(WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)}
    assert [aval for aval in casts if aval.dtype == "bfloat16" and aval.shape in kernels] == []


def test_stages_hold_their_own_blocks_only():
    batch = tokens_batch()
    assembled = put(MODELS["plain"], tokens_loss, batch, {"pipe": 4, "fsdp": 2}, "1f1b")
    placed = {p.path: p for p in assembled.decision.at_rest}
    assert placed["blocks.*.up.kernel"].dims[0] == ("pipe",)
    assert "fsdp" in placed["blocks.*.up.kernel"].axes()
    assert "1 block on each stage" in placed["blocks.*.up.kernel"].reason
    # What belongs to no stage is whole while they work, and sharded over them in between.
    assert placed["embed.embedding"].dims == (("fsdp",), ("pipe",))
    assert [p.dims for p in assembled.decision.optimizer] == [
        p.dims for p in assembled.decision.at_rest
    ]


def test_interleaved_stacks_keep_canonical_paths():
    batch = tokens_batch()
    assembled = put(MODELS["plain"], tokens_loss, batch, {"pipe": 2}, "interleaved")
    layout = assembled.traced.layout
    values = [np.full(leaf.shape, n) for n, leaf in enumerate(layout.leaves)]
    stacked = layout.from_canonical(values)
    step = next(s for s in layout.step_leaves if s.leaf.path == "blocks.*.up.kernel")
    paths = [layout.leaves[step.sources[row]].path for row in step.rows]
    assert paths == [f"blocks.{n}.up.kernel" for n in (0, 2, 1, 3)]
    back = layout.to_canonical(stacked)
    assert all((np.asarray(a) == b).all() for a, b in zip(back, values, strict=True))


def test_blocks_that_cannot_be_divided_are_refused_with_numbers_that_work():
    batch = vectors()
    with pytest.raises(UserError) as caught:
        put(lambda: Residuals(3), square_loss, batch, {"pipe": 4}, "1f1b")
    assert "3 blocks (`blocks.*`) cannot be divided into 4 stages" in caught.value.what
    assert caught.value.fix == 'write mesh="pipe=2", or use a model with 4 blocks'


def test_models_without_blocks_are_refused_with_a_way_out():
    with pytest.raises(UserError, match="no repeated blocks"):
        put(Norms, square_loss, vectors(), {"pipe": 2}, "1f1b")


class Stem(nnx.Module):
    """Statistics of samples before the blocks: the next microbatch would need them too early."""

    def __init__(self):
        self.norm = nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0))
        self.rest = Residuals(2, WIDTH)

    def __call__(self, x):
        return self.rest(self.norm(x))


def test_statistics_outside_of_blocks_are_refused_by_name():
    with pytest.raises(UserError, match=r"norm\.mean"):
        put(Stem, square_loss, vectors(width=WIDTH), {"pipe": 2}, "1f1b")
