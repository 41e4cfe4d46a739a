"""Estimates from traced programs, against placements, compiled programs and closed forms."""

import math

import jax
import optax
import pytest

from meshwright.config.batch import solve_batch
from meshwright.config.schema import ShardingConfig
from meshwright.hardware import parse_hardware
from meshwright.models import build_model
from meshwright.plan import Plan
from meshwright.planner.estimate.estimator import Estimator, _Case
from meshwright.planner.estimate.traced_programs import GradientPrograms, variant_of
from meshwright.planner.fit.fit_check import least_memory
from meshwright.planner.search.search import BOUND_SLACK
from meshwright.planner.workload.gradient_program import SAMPLES
from meshwright.planner.workload.in_memory import peak_of
from meshwright.planner.workload.sizes import DeviceSizes
from meshwright.step.assemble import assemble
from meshwright.tasks import find_task

VOCABULARY, LENGTH, WIDTH, BLOCKS = 512, 64, 64, 4
OPTIMIZER = optax.adamw(1e-3)
TASK = find_task("language_modeling")(vocab_size=VOCABULARY, context_length=LENGTH)


def model(rngs):
    sizes = {"vocab_size": VOCABULARY, "context_length": LENGTH, "dropout": 0.0}
    return build_model("gpt", rngs=rngs, num_blocks=BLOCKS, hidden_size=WIDTH, num_heads=4, **sizes)


@pytest.fixture(scope="module")
def estimator():
    return Estimator(model, TASK.loss, OPTIMIZER, TASK.example_batch(8))


def make_plan(mesh, rows=4, microbatches=1, precision="no", **sharding):
    replicas = mesh.get("data", 1) * mesh.get("fsdp", 1)
    batch = solve_batch(
        replicas=replicas, micro_batch_size=rows, gradient_accumulation_steps=microbatches
    )
    pipeline = {"schedule": "1f1b", "num_microbatches": microbatches} if "pipe" in mesh else {}
    chosen = ShardingConfig(**{"blocks": "scan", **sharding})
    return Plan(mesh=mesh, batch=batch, sharding=chosen, precision=precision, **pipeline)


def assembled_for(plan):
    batch = TASK.example_batch(plan.batch.global_batch_size)
    devices = jax.devices()[: plan.num_devices]
    return assemble(model, TASK.loss, OPTIMIZER, plan, batch, clip_norm=1.0, devices=devices)


def on(plan, chip="H100"):
    return parse_hardware(f"{plan.num_devices}x{chip}")


# The same of other plans, some with stages, is an everyday test below.
@pytest.mark.full
def test_an_estimate_does_not_depend_on_those_before_it(estimator):
    hybrid = make_plan({"data": 2, "fsdp": 4}, blocks="unroll", remat="full")
    first = make_plan({"fsdp": 4}, blocks="unroll", remat="full")
    fresh = Estimator(model, TASK.loss, OPTIMIZER, TASK.example_batch(8))
    alone = fresh.estimate(hybrid, on(hybrid)).memory
    assert estimator.estimate(first, on(first)).memory != alone
    assert estimator.estimate(hybrid, on(hybrid)).memory == alone


MESHES = [
    {},
    {"data": 8},
    {"fsdp": 8},
    {"fsdp": 4, "tensor": 2},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"pipe": 2, "data": 4},
    {"pipe": 2, "fsdp": 2, "tensor": 2},
]


def _placed_state():
    for zero in (1, 3):
        for mesh in MESHES:
            # With axes of three kinds.
            everyday = (zero, mesh) == (3, MESHES[6])
            marks = () if everyday else pytest.mark.full
            yield pytest.param(mesh, zero, id=f"{mesh}-{zero}", marks=marks)


@pytest.mark.parametrize(("mesh", "zero"), list(_placed_state()))
def test_the_state_is_exact_on_every_mesh(estimator, mesh, zero):
    plan = make_plan(mesh, microbatches=4 if "pipe" in mesh else 1, zero=zero)
    step = assembled_for(plan).step
    placed = zip(
        jax.tree.leaves(step.abstract_state),
        jax.tree.leaves(step.shardings.state),
        strict=True,
    )
    exact = 0
    for leaf, sharding in placed:
        size = leaf.dtype.itemsize
        for length in sharding.shard_shape(leaf.shape):
            size *= length
        exact += size
    # The number of the step is not counted: four bytes.
    assert estimator.estimate(plan, on(plan)).memory.state == exact - 4


def test_cpus_leave_as_much_again_as_is_known_exactly(estimator):
    plan = make_plan({"fsdp": 4, "tensor": 2}, rows=8, microbatches=2)
    memory = estimator.estimate(plan, on(plan, "CPU")).memory
    least = least_memory(assembled_for(plan))
    assert (memory.parameters, memory.optimizer) == (least.parameters, least.optimizer)
    assert (memory.gradients, memory.batch) == (least.gradients, least.batch)
    assert memory.total == 2 * least.total


def test_divided_rows_add_the_keys_and_values_of_other_devices(estimator):
    parts = make_plan({"context": 8}, rows=8, remat="full")
    alone = make_plan({}, rows=1, remat="full")
    memory, other = (estimator.estimate(plan, on(plan)).memory for plan in (parts, alone))
    # Of one block, both of them and their gradients: 4 heads cannot be exchanged for 8 parts.
    assert memory.working - other.working == 7 / 8 * 4 * (8 * LENGTH * WIDTH * 4)
    assert memory.activations == other.activations


def test_activations_grow_with_rows_and_shrink_with_what_is_recomputed(estimator):
    def activations(rows, remat):
        plan = make_plan({}, rows=rows, remat=remat)
        return estimator.estimate(plan, on(plan)).memory.activations

    assert activations(64, "none") == pytest.approx(2 * activations(32, "none"), rel=0.02)
    assert activations(8, "none") > activations(8, "dots") > activations(8, "full")


def test_accumulation_adds_sums_of_gradients(estimator):
    once, often = (
        estimator.estimate(plan, on(plan)).memory
        for plan in (make_plan({}), make_plan({}, microbatches=4))
    )
    parameters = 4 * estimator.num_parameters
    assert often.all_gradients >= once.all_gradients == parameters
    assert often.compiled - once.compiled >= parameters


def test_one_gpu_adds_gradients_to_their_sums_as_they_come(estimator):
    def gradients(mesh, microbatches):
        plan = make_plan(mesh, microbatches=microbatches)
        return estimator.estimate(plan, on(plan, "H200")).memory.gradients

    parameters = 4 * estimator.num_parameters
    assert gradients({}, 4) - gradients({}, 1) <= parameters
    assert gradients({"data": 8}, 4) - gradients({"data": 8}, 1) > parameters


KERNELS, VECTORS = 4 * 12 * WIDTH**2, 4 * 13 * WIDTH
"""Bytes of a block: the kernels of its six products, and its norms and biases."""
EMBEDDINGS, LAST_NORM = 4 * (VOCABULARY + LENGTH) * WIDTH, 4 * 2 * WIDTH
ACTIVATION = 4 * LENGTH * WIDTH


def sent_by(estimator, plan):
    traffic = estimator.estimate(plan, on(plan)).time.traffic
    return {axis: own.sent_bytes for axis, own in traffic.items()}


@pytest.mark.parametrize(
    ("mesh", "settings", "passes"),
    [
        ({"data": 8}, {}, {"data": 2}),
        ({"fsdp": 8}, {"keep_gathered": True}, {"fsdp": 2}),
        ({"fsdp": 8}, {"zero": 2}, {"fsdp": 2}),
        ({"data": 2, "fsdp": 4}, {"keep_gathered": True}, {"data": 2 / 4, "fsdp": 2}),
    ],
    ids=str,
)
def test_gradients_and_weights_are_sent_by_the_closed_form(estimator, mesh, settings, passes):
    parameters = 4 * estimator.num_parameters
    closed_form = {
        axis: times * parameters * (mesh[axis] - 1) / mesh[axis] for axis, times in passes.items()
    }
    assert sent_by(estimator, make_plan(mesh, **settings)) == pytest.approx(closed_form)


def test_kernels_of_blocks_are_gathered_in_each_pass_unless_they_are_kept(estimator):
    kept, again = (make_plan({"fsdp": 8}, keep_gathered=keep) for keep in (True, False))
    more = sent_by(estimator, again)["fsdp"] - sent_by(estimator, kept)["fsdp"]
    # Norms and biases are too small to be sharded.
    assert more == pytest.approx(7 / 8 * BLOCKS * KERNELS)


def test_an_updated_weight_is_gathered_only_if_its_update_is_sharded(estimator):
    sharded = BLOCKS * KERNELS + EMBEDDINGS
    closed_form = 7 / 8 * (2 * 4 * estimator.num_parameters + sharded)
    assert sent_by(estimator, make_plan({"fsdp": 8}, zero=1))["fsdp"] == pytest.approx(closed_form)


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "messages"),
    [("1f1b", 2, 4, 4), ("1f1b", 2, 8, 8), ("gpipe", 4, 8, 2 * (8 + 4 - 2))],
)
def test_stages_send_activations_and_what_is_outside_of_them(
    estimator, schedule, stages, microbatches, messages
):
    plan = make_plan({"pipe": stages}, rows=1, microbatches=microbatches)
    plan = plan.model_copy(update={"schedule": schedule})
    outside = 2 * (stages - 1) / stages * (EMBEDDINGS + LAST_NORM)
    assert sent_by(estimator, plan) == pytest.approx({"pipe": messages * ACTIVATION + outside})


def test_the_stage_that_sends_most_over_an_axis_counts(estimator):
    """The first one has the embeddings, which the last one reads, and the last one the norm."""
    own = BLOCKS // 2
    reduced = own * (KERNELS + VECTORS) + EMBEDDINGS
    plan = make_plan({"pipe": 2, "data": 2}, rows=1, microbatches=8)
    assert sent_by(estimator, plan)["data"] == pytest.approx(8 * reduced)
    plan = make_plan({"pipe": 2, "fsdp": 2}, rows=1, microbatches=8)
    gathered = own * 2 * KERNELS + EMBEDDINGS
    scattered = own * KERNELS + EMBEDDINGS
    closed_form = 8 * ((gathered + scattered) / 2 + own * VECTORS)
    assert sent_by(estimator, plan)["fsdp"] == pytest.approx(closed_form)
    plan = make_plan({"pipe": 2, "tensor": 2}, rows=1, microbatches=8)
    # Four reductions for each block and one for the embeddings or logits; norms of logits besides.
    reductions = 8 * (4 * own + 1) * ACTIVATION
    assert sent_by(estimator, plan)["tensor"] == pytest.approx(reductions, rel=0.01)


def test_a_stage_keeps_what_it_recomputes_for_all_of_its_blocks(estimator):
    def working(stages):
        plan = make_plan({"pipe": stages}, microbatches=8, remat="full")
        return estimator.estimate(plan, on(plan)).memory.working

    # One device keeps the same for each block, if nothing is recomputed.
    once, half = (make_plan({}, rows=rows) for rows in (4, 2))
    kept = [estimator.estimate(plan, on(plan)).memory.activations for plan in (once, half)]
    of_block = 2 * (kept[0] - kept[1]) / BLOCKS
    more = working(BLOCKS // 2) - working(BLOCKS)
    assert more == pytest.approx(of_block, rel=0.25)


def test_operations_are_those_of_the_formula(estimator):
    plan = make_plan({}, precision="bf16")
    works = estimator.works(plan, parse_hardware("1xH200"))
    tokens, flops = plan.batch.micro_batch_size * LENGTH, works.flops * works.times
    products = flops[works.kind == "product"].sum()
    weights = 12 * BLOCKS * WIDTH**2 + VOCABULARY * WIDTH
    assert products == pytest.approx(6 * weights * tokens)
    attention = flops[["attention" in kind for kind in works.kind]].sum()
    pairs = (LENGTH + 1) / 2
    assert attention == pytest.approx(14 * BLOCKS * WIDTH * tokens * pairs, rel=2e-3)


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.full)])
def test_what_plans_share_does_not_depend_on_their_order(estimator, few):
    staged = make_plan({"pipe": 2, "fsdp": 2}, microbatches=8, precision="bf16")
    plans = [
        staged,
        staged.model_copy(update={"schedule": "zb_h1"}),
        make_plan({"fsdp": 4}, precision="bf16"),
    ]
    if not few:
        plans += [
            make_plan({"pipe": 4, "fsdp": 2}, microbatches=8, precision="bf16"),
            make_plan({"fsdp": 2, "tensor": 2}, precision="bf16"),
        ]
    fresh = Estimator(model, TASK.loss, OPTIMIZER, TASK.example_batch(8))
    first = [estimator.estimate(plan, on(plan)) for plan in plans]
    last = [fresh.estimate(plan, on(plan)) for plan in reversed(plans)]
    for alone, shared in zip(first, reversed(last), strict=True):
        assert alone.memory == shared.memory
        assert alone.time == shared.time


@pytest.mark.full
def test_bounds_take_one_program_for_all_meshes_and_are_hardly_too_long():
    fresh = Estimator(model, TASK.loss, OPTIMIZER, TASK.example_batch(8))
    plans = [make_plan(mesh, microbatches=8, precision="bf16") for mesh in MESHES]
    bounds = [fresh.bound(plan, on(plan)) for plan in plans]
    assert fresh._gradients._traced.cache_info().currsize == 1
    for plan, bound in zip(plans, bounds, strict=True):
        own = fresh.estimate(plan, on(plan))
        assert own.time.step / 2 < bound.time.step <= own.time.step / BOUND_SLACK
        assert bound.memory.state == own.memory.state
    assert fresh._gradients._traced.cache_info().currsize > 1


@pytest.mark.parametrize("remat", ["dots", pytest.param("full", marks=pytest.mark.full)])
def test_joined_rows_change_nothing_where_the_rest_is_recomputed(estimator, remat):
    hardware = parse_hardware("2xH100")
    plan = make_plan({"tensor": 2}, precision="bf16", remat=remat)
    joined = variant_of(plan, hardware)
    assert joined.rows
    programs, needs = GradientPrograms(estimator._programs), []
    for variant in (joined, joined._replace(rows=False)):
        program = programs._scheduled("bf16", variant, "scan", "scan")
        heads = {leaf.dims[-1][0].id: 2 for leaf in program.classes.leaves if leaf.dims[-1:]}
        sizes = DeviceSizes(4.0, program.classes.batch, heads)
        works = program.work.on(sizes)
        needs.append((works.flops.sum(), works.nbytes.sum(), peak_of(program.timeline, sizes)))
    (flops, nbytes, peak), (other_flops, other_nbytes, other_peak) = needs
    assert (flops, nbytes, peak.nbytes) == (other_flops, other_nbytes, other_peak.nbytes)


def test_faster_chips_and_more_devices_take_less_time(estimator):
    plan = make_plan({}, precision="bf16")
    slow, fast = (
        estimator.estimate(plan, parse_hardware(f"1x{chip}")).time.step
        for chip in ("A100-80GB", "H200")
    )
    assert slow > fast
    staged = make_plan({"pipe": 2}, microbatches=8, precision="bf16")
    time = estimator.estimate(staged, parse_hardware("2xH200")).time
    assert time.bubble > 0
    assert 0 < time.mfu < 1


def test_a_model_is_described_without_being_made(estimator):
    assert estimator.num_blocks == BLOCKS
    assert {2, 4} <= estimator.tensor_sizes
    assert 3 not in estimator.tensor_sizes
    assert estimator.tokens_per_sample == LENGTH
    table = VOCABULARY * WIDTH + LENGTH * WIDTH
    assert estimator.num_parameters > table + 12 * BLOCKS * WIDTH**2


@pytest.mark.parametrize(("kind", "kept"), [("resnet", True), ("vit", False)])
def test_batch_norm_keeps_statistics_and_dropout_does_not(kind, kept):
    sizes = {
        "resnet": {"channels_in": 3, "depths": (1,), "width": 8, "num_classes": 10},
        "vit": {"image_size": 8, "channels_in": 3, "patch_size": 4, "num_blocks": 1,
                "hidden_size": 16, "num_heads": 2, "num_classes": 10},
    }[kind]  # fmt: skip
    task = find_task("classification")(input_shape=(8, 8, 3), num_classes=10)

    def build(rngs):
        return build_model(kind, rngs=rngs, **sizes)

    made = Estimator(build, task.loss, OPTIMIZER, task.example_batch(2))
    assert made.keeps_statistics == kept


def test_gpus_hold_the_last_iteration_of_a_loop_twice_where_weights_are_gathered(estimator):
    rows, saved = 4, LENGTH * WIDTH * 2
    plans = [
        make_plan({"fsdp": 8}, rows, precision="bf16", remat="full", keep_gathered=kept)
        for kept in (False, True)
    ]
    twice, once = (estimator.estimate(plan, on(plan)).memory for plan in plans)
    assert once.activations >= BLOCKS * rows * saved
    assert twice.activations == once.activations + rows * saved
    others = [estimator.estimate(plan, on(plan, "TPU-v5e")).memory.activations for plan in plans]
    assert others[0] == others[1]


def test_what_several_products_read_is_saved_once(estimator):
    """Query, key and value read the same rows; a checkpoint rounds them once for each."""
    plan = make_plan({"fsdp": 8}, precision="bf16")
    program = estimator._gradients.of(plan, variant_of(plan, on(plan)))
    shapes = [
        [math.prod(a.size for a in dim) for dim in w.dims] for w in program.blocks.forward.writes
    ]
    # What attention reads, what it has computed, and what the feed-forward layer reads.
    assert shapes.count([BLOCKS, SAMPLES * LENGTH, WIDTH]) == 3


def test_casts_of_weights_that_a_loop_saves_are_divided_as_the_weights_are(estimator):
    plan = make_plan({"fsdp": 8}, precision="bf16")
    case = _Case(plan, on(plan), variant_of(plan, on(plan)))
    program = estimator._gradients.of(plan, case.variant)
    sizes = estimator._sizes(case, program)
    casts = [array for array in program.blocks.forward.writes if array.cast_of is not None]
    # Query, key, value, output, and two products of the feed-forward layer.
    kernels = [array for array in casts if len(array.dims) == 3 and array.size > BLOCKS * WIDTH]
    assert len(kernels) == 6
    assert [sizes.of(array) for array in kernels] == [array.nbytes / 8 for array in kernels]


def test_the_weights_of_a_block_are_sent_together_however_blocks_run(estimator):
    plans = [make_plan({"fsdp": 8}, precision="bf16", blocks=how) for how in ("scan", "unroll")]
    rolled, unrolled = (estimator.estimate(p, on(p)).time.traffic["fsdp"] for p in plans)
    assert rolled.sent_bytes == pytest.approx(unrolled.sent_bytes)
    assert rolled.seconds == pytest.approx(unrolled.seconds, rel=0.02)
