"""One step on any mesh is the step on one device."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from program.programs import QUICK, assert_close, quick
from small_models import (
    WIDTH,
    Norms,
    Odd,
    Residual,
    Residuals,
    builder,
    numbers,
    odd_batch,
    odd_loss,
    pair,
    pair_loss,
    square_loss,
    task_batch,
    vectors,
    weighted_loss,
)
from step.runs import by_hand, filled, on_mesh, on_one_device, put_together

from meshwright import Weighted
from meshwright.compiled.memory import memory_of
from meshwright.errors import UserError
from meshwright.sharding.placement import bytes_per_device

X = numbers(1, WIDTH)
BATCHES = [vectors(seed=1), vectors(seed=2)]
CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
BATCH_CUBE = {"data": 2, "fsdp": 4}

CASES = [
    ({"data": 8}, {}),
    ({"fsdp": 8}, {"zero": 1}),
    pytest.param({"tensor": 4}, {}, marks=pytest.mark.full),
    ({"fsdp": 4, "tensor": 2}, {"blocks": "scan"}),
    (CUBE, {"zero": 2}),
]


@pytest.fixture(autouse=True)
def _double_precision():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def plain():
    with jax.enable_x64(True):
        return by_hand(filled(Residuals), square_loss, BATCHES)


def check(found, expected, tolerance=1e-12):
    np.testing.assert_allclose(found.losses, expected.losses, rtol=tolerance)
    assert_close(found.leaves, expected.leaves, tolerance)


@pytest.mark.parametrize(("mesh", "sharding"), CASES)
def test_training_equals_flax_and_optax_on_one_device(mesh, sharding, plain):
    assembled = put_together(Residuals, square_loss, BATCHES[0], mesh, **sharding)
    check(on_mesh(assembled, filled(Residuals), BATCHES), plain)


def single():
    return Residuals(1)


def test_training_with_adamw_equals_flax_and_optax_on_one_device():
    optimizer = optax.adamw(0.01)
    assembled = put_together(single, square_loss, BATCHES[0], CUBE, optimizer=optimizer)
    expected = by_hand(filled(single), square_loss, BATCHES, optimizer=optimizer)
    check(on_mesh(assembled, filled(single), BATCHES), expected)


@pytest.mark.full
@pytest.mark.parametrize("blocks", ["unroll", "scan"])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    "mesh", [{"data": 8}, {"fsdp": 8}, {"tensor": 4}, {"fsdp": 4, "tensor": 2}, CUBE]
)
def test_every_mesh_with_every_zero_stage(mesh, zero, blocks, plain):
    assembled = put_together(Residuals, square_loss, BATCHES[0], mesh, blocks=blocks, zero=zero)
    check(on_mesh(assembled, filled(Residuals), BATCHES), plain)


MODELS = {
    "gpt": (builder("gpt", num_kv_heads=2), *task_batch("gpt"), CUBE),
    "moe": (builder("moe"), *task_batch("moe"), CUBE),
    "lstm": (builder("lstm"), *task_batch("lstm"), CUBE),
    "conv": (builder("conv"), *task_batch("conv"), CUBE),
    "linen": (builder("linen_mlp"), *task_batch("linen_mlp"), CUBE),
    "odd": (Odd, odd_loss, odd_batch(), {"data": 2, "fsdp": 4}),
    "pair": (pair, pair_loss, vectors(), CUBE),
    "norms": (Norms, square_loss, vectors(), CUBE),
}
LONG = {"gpt", "moe", "conv", "norms", "lstm"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=pytest.mark.full) if c in LONG else c for c in sorted(MODELS)],
)
def test_models_nobody_planned_for_train_as_on_one_device(case):
    build, loss, batch, mesh = MODELS[case]
    assembled = put_together(build, loss, batch, mesh)
    model = filled(build)
    found, expected = (run(assembled, model, [batch]) for run in (on_mesh, on_one_device))
    check(found, expected)


def test_four_microbatches_of_unequal_weight_equal_the_whole_batch():
    weight = np.random.default_rng(3).integers(0, 7, size=32).astype(np.float32)
    batches = [{**vectors(32, seed=s), "weight": weight + s} for s in (1, 2)]
    assembled = put_together(
        Residuals, weighted_loss, batches[0], BATCH_CUBE, accumulation=4, blocks="scan"
    )
    expected = by_hand(filled(Residuals), weighted_loss, batches)
    check(on_mesh(assembled, filled(Residuals), batches), expected)


def test_statistics_and_dropout_see_the_same_microbatches_as_one_device():
    batch = vectors()
    assembled = put_together(Norms, square_loss, batch, CUBE, accumulation=2)
    model = filled(Norms)
    found, expected = (run(assembled, model, [batch]) for run in (on_mesh, on_one_device))
    check(found, expected, 1e-10)
    assert int(found.leaves["dropout.rngs.count"]) == 2


def test_clipping_is_optax_clipping_by_the_global_norm():
    clipped = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1))
    expected = by_hand(filled(single), square_loss, BATCHES, optimizer=clipped)
    assembled = put_together(
        single, square_loss, BATCHES[0], CUBE, optimizer=optax.sgd(0.1), clip_norm=0.05
    )
    found = on_mesh(assembled, filled(single), BATCHES)
    check(found, expected)
    assert float(found.metrics["grad_norm"]) > 0.05


class Half(nnx.Module):
    """A frozen and a trained layer."""

    def __init__(self):
        self.frozen = Residual(rngs=nnx.Rngs(0))
        self.trained = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.trained(self.frozen(x))


def test_frozen_weights_are_divided_and_never_change():
    only = nnx.All(nnx.Param, nnx.PathContains("trained"))
    expected = by_hand(filled(Half), square_loss, BATCHES, trainable=only)
    assembled = put_together(Half, square_loss, BATCHES[0], {"fsdp": 8}, trainable=only)
    found = on_mesh(assembled, filled(Half), BATCHES)
    check(found, expected)
    before = dict(nnx.to_flat_state(nnx.state(filled(Half))))
    kernel = before["frozen", "up", "kernel"][...]
    assert np.array_equal(found.leaves["frozen.up.kernel"], np.float64(kernel))
    assert {p.path: p.axes() for p in assembled.decision.at_rest}["frozen.up.kernel"] == {"fsdp"}


@pytest.mark.parametrize("sharding", [{}, {"blocks": "scan", "zero": 2}])
def test_compiled_arguments_are_the_sum_of_the_shards(sharding):
    with jax.enable_x64(False):
        batch = vectors()
        assembled = put_together(Residuals, square_loss, batch, CUBE, wide=False, **sharding)
        compiled = assembled.step.lower(assembled.put_batch(batch)).compile(QUICK)
    sizes = assembled.plan.mesh
    leaves = zip(assembled.traced.leaves, assembled.decision.at_rest, strict=True)
    expected = sum(bytes_per_device(leaf, placement, sizes) for leaf, placement in leaves)
    expected += sum(
        int(np.prod(leaf.shape)) * leaf.dtype.itemsize // leaf.placement.shards(sizes)
        for leaf in assembled.step.optimizer.leaves
    )
    expected += 4  # the number of steps done
    samples = sum(array.nbytes // 4 for array in batch.values())
    assert memory_of(compiled).argument == expected + samples
    # The whole state is updated in place.
    assert memory_of(compiled).alias == expected


def half_precision_step():
    """Return a step of a model whose loss overflows fp16 where ``x`` is large."""
    return put_together(
        Residuals,
        square_loss,
        vectors(),
        {"fsdp": 4, "tensor": 2},
        optimizer=optax.adam(0.01),
        precision="fp16",
        wide=False,
    )


def test_an_update_that_overflows_fp16_is_skipped_and_the_scale_halved():
    with jax.enable_x64(False):
        assembled = half_precision_step()
        state = assembled.adopt(filled(Residuals))
        run = quick(lambda state, batch: assembled.step(state, batch))
        good = vectors()
        state, metrics = run(state, assembled.put_batch(good))
        assert (float(metrics["loss_scale"]), int(metrics["skipped"])) == (2**15, 0)
        bad = {**good, "y": np.where(np.arange(16)[:, None] == 3, 3e38, good["y"])}
        after, metrics = run(state, assembled.put_batch(bad))
        assert (float(metrics["loss_scale"]), int(metrics["skipped"])) == (2**14, 1)
        kept = zip(
            jax.tree.leaves((state.params, state.model_state, state.optimizer, state.step)),
            jax.tree.leaves((after.params, after.model_state, after.optimizer, after.step)),
            strict=True,
        )
        assert all(np.array_equal(old, new) for old, new in kept)
        again, metrics = run(after, assembled.put_batch(good))
        assert (int(again.step), int(metrics["skipped"])) == (2, 1)
        assert not np.array_equal(again.params[0], after.params[0])


def test_skipping_asks_nothing_of_the_host():
    with jax.enable_x64(False):
        text = half_precision_step().step.lower(list(vectors().values())).as_text()
    assert not any(word in text for word in ("callback", "infeed", "outfeed", "stablehlo.send"))


def test_half_precision_keeps_float32_parameters_and_stays_near(plain):
    with jax.enable_x64(False):
        assembled = put_together(
            Residuals, square_loss, BATCHES[0], CUBE, precision="bf16", wide=False
        )
        state = assembled.adopt(filled(Residuals))
        state, metrics = quick(lambda s, b: assembled.step(s, b))(
            state, assembled.put_batch(BATCHES[0])
        )
    assert {str(p.dtype) for p in state.params} == {"float32"}
    # Four products, each rounded to 2⁻⁸.
    assert float(metrics["loss"]) == pytest.approx(plain.losses[0], rel=2**-6)


def test_the_state_is_born_divided_and_equal_to_the_plain_model():
    with jax.enable_x64(False):
        build = lambda: nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))  # noqa: E731
        assembled = put_together(build, square_loss, vectors(), CUBE, wide=False)
        state = assembled.init(0)
        expected = dict(nnx.to_flat_state(nnx.state(build())))
    found = assembled.canonical(state)
    for path, value in expected.items():
        assert np.array_equal(found[".".join(map(str, path))], value[...])
    wanted = jax.tree.leaves(assembled.step.shardings.state)
    for array, sharding in zip(jax.tree.leaves(state), wanted, strict=True):
        assert array.sharding.is_equivalent_to(sharding, array.ndim)


def test_a_model_that_exists_is_adopted_from_any_device_and_survives():
    with jax.enable_x64(False):
        model = filled(Residuals)
        graphdef, leaves = nnx.split(model)
        elsewhere = nnx.merge(graphdef, jax.device_put(leaves, jax.devices()[7]))
        assembled = put_together(Residuals, square_loss, vectors(), {"data": 8}, wide=False)
        state = assembled.adopt(elsewhere)
        assert np.array_equal(assembled.model(state)(X), model(X))
        # On one device nothing needs to move, and yet the update in place must not take the
        # model's own arrays.
        assembled = put_together(Residuals, square_loss, vectors(), {}, wide=False)
        assembled.step(assembled.adopt(model), assembled.put_batch(vectors()))
        assert np.isfinite(model(X)).all()


def test_two_meshes_live_side_by_side_on_different_devices():
    with jax.enable_x64(False):
        results = []
        for first in (0, 4):
            devices = jax.devices()[first : first + 4]
            assembled = put_together(
                single, square_loss, vectors(), {"fsdp": 4}, wide=False, devices=devices
            )
            state = assembled.adopt(filled(single))
            run = quick(lambda state, batch, step=assembled.step: step(state, batch))
            state, metrics = run(state, assembled.put_batch(vectors()))
            assert state.params[0].sharding.device_set == set(devices)
            results.append(float(metrics["loss"]))
    assert results[0] == results[1]


def test_an_annotated_model_trains_where_its_author_said(plain):
    class Annotated(Residuals):
        def __init__(self):
            super().__init__(2)
            for block in self.blocks:
                kernel = block.up.kernel[...]
                block.up.kernel = nnx.Param(kernel, out_sharding=("tensor", "fsdp"))

    assembled = put_together(Annotated, square_loss, BATCHES[0], {"fsdp": 4, "tensor": 2})
    placed = {p.path: p.dims for p in assembled.decision.at_rest}
    assert placed["blocks.1.up.kernel"] == (("tensor",), ("fsdp",))
    check(on_mesh(assembled, filled(Residuals), BATCHES), plain)


def test_a_batch_of_another_size_than_the_plans_is_refused():
    with pytest.raises(UserError, match=r"shape \(16, 16\) for a global batch of 32"):
        put_together(Residuals, square_loss, vectors(), {"data": 8}, samples=32)


def test_printing_from_a_model_works(capfd):
    class Printing(nnx.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH, rngs=nnx.Rngs(0))

        def __call__(self, x):
            jax.debug.print("mean {m:.3f}", m=x.mean())
            return super().__call__(x)

    with jax.enable_x64(False):
        assembled = put_together(Printing, square_loss, vectors(), {"data": 8}, wide=False)
        state = assembled.adopt(filled(Printing))
        assembled.step(state, assembled.put_batch(vectors()))
        jax.effects_barrier()
    assert f"mean {vectors()['x'].mean():.3f}" in capfd.readouterr().out


def test_metrics_are_means_over_the_whole_batch():
    def loss(model, batch):
        y = model(batch["x"])
        counted = Weighted((y * batch["weight"][:, None]).sum(), batch["weight"].sum())
        return square_loss(model, batch), {"mean": y.mean(), "counted": counted}

    with jax.enable_x64(False):
        batch = {**vectors(), "weight": np.arange(16, dtype=np.float32)}
        build = lambda: nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))  # noqa: E731
        assembled = put_together(build, loss, batch, {"data": 8}, accumulation=2, wide=False)
        model = filled(build)
        run = quick(lambda state, batch: assembled.step(state, batch))
        _, metrics = run(assembled.adopt(model), assembled.put_batch(batch))
        y = np.asarray(model(batch["x"]), np.float64)
    weighted = (y * batch["weight"][:, None]).sum() / batch["weight"].sum()
    assert float(metrics["mean"]) == pytest.approx(y.mean(), rel=1e-5)
    assert float(metrics["counted"]) == pytest.approx(weighted, rel=1e-5)
    assert set(metrics) == {"loss", "mean", "counted", "grad_norm"}
