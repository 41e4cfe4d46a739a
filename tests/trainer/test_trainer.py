"""The trainer as a person meets it: what it accepts, what it refuses, and when it stops."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from closed_form import ClosedForm
from flax import nnx
from quick import quick_module

import meshwright as mw
from meshwright.errors import UserError
from meshwright.hardware import parse_hardware

__all__ = ["quick_module"]
pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("quick_module")]

WIDTH = 16


def fixed(_, shape, dtype):
    """Initialize from numpy: compiling random initializers takes longer than these tests."""
    return jnp.asarray(np.random.default_rng(shape[0]).normal(0, 0.2, shape), dtype)


class Net(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, 32, kernel_init=fixed, rngs=rngs)
        self.down = nnx.Linear(32, WIDTH, kernel_init=fixed, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(32, kernel_init=fixed)(x)
        return nn.Dense(WIDTH, kernel_init=fixed)(nn.relu(x))


def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def batches(count: int, samples: int = 16):
    random = np.random.default_rng(0)
    for _ in range(count):
        x = random.normal(size=(samples, WIDTH)).astype("float32")
        yield {"x": x, "y": x[:, ::-1]}


def trainer(**settings) -> mw.Trainer:
    defaults = {"model": Net, "loss": loss, "optimizer": optax.sgd(0.1), "mesh": "fsdp=4,tensor=2"}
    return mw.Trainer(**{**defaults, **settings})


@pytest.fixture(scope="module")
def assembled():
    """The step of `trainer()`, compiled once for all tests that run it."""
    return trainer().assemble(next(batches(1)))


def one_device(count: int) -> list[float]:
    """Train in plain JAX on one device; return the losses."""
    graphdef, params = nnx.split(Net(rngs=nnx.Rngs(0)))

    @jax.jit
    def step(params, batch):
        value, grads = jax.value_and_grad(lambda p: loss(nnx.merge(graphdef, p), batch))(params)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    losses = []
    for batch in batches(count):
        value, params = step(params, batch)
        losses.append(float(value))
    return losses


def test_the_losses_are_those_of_one_device(assembled):
    result = trainer(log_every=2).fit(batches(5), steps=5, assembled=assembled)
    assert result.assembled is assembled
    expected = one_device(5)
    assert list(result.losses) == [1, 2, 4, 5]
    for step, value in result.losses.items():
        np.testing.assert_allclose(value, expected[step - 1], rtol=1e-5)
    assert result.steps == 5


def test_batches_that_run_out_end_the_run_with_what_was_trained(assembled):
    seen = []
    with pytest.warns(UserWarning, match="ran out after 3 of 9 steps") as warned:
        result = trainer(log_every=100).fit(
            batches(3),
            steps=9,
            on_metrics=lambda step, _: seen.append(step),
            assembled=assembled,
        )
    assert [w.filename for w in warned if "ran out" in str(w.message)] == [__file__]
    assert result.steps == 3
    assert seen == list(result.losses) == [1, 3]
    np.testing.assert_allclose(result.losses[3], one_device(3)[2], rtol=1e-5)
    assert result.model(np.zeros((1, WIDTH), "float32")).shape == (1, WIDTH)


def test_no_more_batches_are_taken_than_needed(assembled):
    stream = batches(5)
    trainer().fit(stream, steps=2, assembled=assembled)
    assert len(list(stream)) == 3


@pytest.mark.parametrize("settings", [{}, {"mesh": ""}])
def test_all_devices_are_on_data_by_default(settings):
    own = mw.Trainer(model=Net, loss=loss, optimizer=optax.sgd(0.1), **settings)
    assert own.assemble(next(batches(1))).plan.mesh == {"data": 8}


def test_auto_takes_what_the_planner_chooses_and_keeps_it(monkeypatch, capfd):
    wide = ClosedForm(blocks=4, hidden=64, heads=4, vocabulary=256, tokens=2**20)
    monkeypatch.setattr("meshwright.trainer.starting.planning.Estimator", lambda *_, **__: wide)
    # Else the choice depends on the memory of the host.
    cpus = parse_hardware("8xCPU")
    monkeypatch.setattr("meshwright.trainer.starting.planning.hardware_of", lambda _: cpus)
    own, batch = trainer(mesh="auto", gradient_accumulation_steps=2), next(batches(1))
    plan = own.assemble(batch).plan
    assert (plan.mesh, plan.batch.gradient_accumulation_steps) == ({"data": 8}, 2)
    assert own.assemble(batch).plan == plan
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "estimated for" in line]
    assert line.startswith('mesh="auto": data=8, 2 microbatches of 1 sample; data parallel')


def test_a_trainer_plans_for_hardware_that_is_elsewhere(tmp_path):
    planned = trainer().plan(batches(1), hardware="2xH100")
    assert planned.plan.num_devices == 2
    assert planned.estimate.time.step > 0
    text = str(planned)
    assert text.startswith("Net, ")
    assert "on 2xH100" in text
    planned.save(tmp_path / "plan.yaml")
    saved = mw.Plan.from_yaml((tmp_path / "plan.yaml").read_text())
    assert saved == planned.plan
    own = mw.Trainer(
        model=Net, loss=loss, optimizer=optax.sgd(0.1), mesh=saved, devices=jax.devices()[:2]
    )
    assert own.fit(batches(1), steps=1).losses
    with pytest.raises(mw.UserError, match="names no chip"):
        trainer().plan(batches(1), hardware="8")


def test_the_batch_of_a_plan_is_that_of_the_last_fit():
    data, own = next(batches(1, samples=64)), trainer(model=lambda rngs: Net(rngs=rngs))
    with pytest.raises(mw.UserError, match="write batch_size=64, or as many samples as one step"):
        own.plan(data, hardware="2xH100")
    own.fit(data, batch_size=16, steps=1)
    with pytest.raises(mw.UserError) as raised:
        own.plan(hardware="2xH100")
    assert raised.value.fix == (
        'write trainer.plan(data, hardware="2xH100") with the data that fit takes'
    )
    planned = own.plan(data, hardware="2xH100")
    assert planned.plan.batch.global_batch_size == 16
    assert str(planned).startswith("the model, ")


def test_a_linen_module_is_trained_as_it_is():
    result = trainer(model=LinenNet(), mesh="data=8").fit(batches(1), steps=1)
    paths = {leaf.path for leaf in result.assembled.traced.layout.leaves if leaf.role == "param"}
    assert "Dense_0.kernel" in paths
    np.testing.assert_allclose(result.losses[1], one_device(1)[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "bf32"}, "there is no precision 'bf32'"),
        ({"optimizer": 3e-4}, "write optimizer=optax.adamw(0.0003)"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 is not valid"),
        ({"log_every": 0}, "log_every=0 is not valid"),
        ({"clip_norm": 0.0}, "stop all learning"),
        ({"loss": None}, "loss(model, batch)"),
    ],
)
def test_wrong_settings_are_refused_when_the_trainer_is_made(settings, message):
    with pytest.raises(UserError) as caught:
        trainer(**settings)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": 5}, "the model is 5, of type int"),
        ({"mesh": 8}, "the mesh is 8, of type int"),
        ({"mesh": "pipe=2"}, "no repeated blocks to divide into pipeline stages"),
        ({"mesh": "data=3"}, "the mesh does not match the 8 devices"),
        (
            {"mesh": "data=8", "gradient_accumulation_steps": 3},
            "a global batch of 24 samples would work",
        ),
    ],
)
def test_what_does_not_fit_the_batch_or_the_devices_is_refused(settings, message):
    with pytest.raises(UserError) as caught:
        trainer(**settings).assemble(next(batches(1)))
    assert message in str(caught.value)


@pytest.mark.parametrize("steps", [-1, 1.5, True])
def test_the_number_of_steps_is_whole_and_not_negative(steps):
    with pytest.raises(UserError, match=r"steps=.* is not valid"):
        trainer().fit(batches(1), steps=steps)


@pytest.mark.parametrize("said", [{}, {"steps": 2, "max_duration": "2ep"}])
def test_how_long_to_train_is_said_once(said):
    with pytest.raises(UserError, match="length of the run must be given exactly once"):
        trainer().fit(batches(1), **said)


def test_no_batches_and_later_batches_of_another_form_are_refused(assembled):
    with pytest.raises(UserError, match="there are no batches"):
        trainer().fit([], steps=1)
    with pytest.raises(UserError, match="batch 1 differs") as caught:
        trainer().fit([*batches(1), *batches(1, samples=24)], steps=2, assembled=assembled)
    assert "24 samples, and the first batch had 16" in caught.value.why


def plan(samples: int = 16) -> mw.Plan:
    batch = {"global_batch_size": samples, "micro_batch_size": samples // 8, "replicas": 8}
    return mw.Plan(
        mesh={"data": 8}, batch={**batch, "gradient_accumulation_steps": 1}, precision="bf16"
    )


def test_a_plan_says_it_all():
    assert trainer(mesh=plan(), precision="bf16").assemble(next(batches(1))).plan == plan()
    with pytest.raises(UserError, match="precision differs from the plan") as caught:
        trainer(mesh=plan(), precision="fp16").assemble(next(batches(1)))
    assert caught.value.why == "the trainer has fp16, the plan bf16"
    with pytest.raises(UserError, match="16 samples, and the plan is for 32"):
        trainer(mesh=plan(32)).assemble(next(batches(1)))


def test_a_loss_that_is_not_finite_is_told_with_its_step(assembled):
    def poisoned():
        good, bad = batches(2)
        yield good
        yield {**bad, "x": bad["x"] * np.nan}

    with pytest.raises(UserError, match="the loss is nan at step 2") as caught:
        trainer(log_every=1).fit(poisoned(), steps=2, assembled=assembled)
    assert caught.value.why.startswith("the batch is not finite itself: `x` has 256 NaN")


@pytest.mark.parametrize(
    "pipeline", ["zb_h1", {"schedule": "zb_h1"}, mw.PipelineConfig(schedule="zb_h1")]
)
def test_a_schedule_may_be_a_name_a_dict_or_a_config(pipeline):
    plan = trainer(mesh="pipe=2,fsdp=4", pipeline=pipeline)._plan(next(batches(1, 32)))
    assert (plan.schedule, plan.num_microbatches) == ("zb_h1", 8)


@pytest.mark.parametrize(
    ("pipeline", "said"),
    [
        ("zb-h1", "did you mean `zb_h1`"),
        ({"schedules": "gpipe"}, "did you mean `schedule`"),
        (4, 'of type int\nwrite pipeline="zb_h1"'),
    ],
)
def test_what_is_no_pipeline_is_refused_at_once(pipeline, said):
    with pytest.raises(UserError, match=said):
        trainer(pipeline=pipeline)


def test_a_mesh_for_more_devices_names_the_way_to_simulate_them():
    with pytest.raises(UserError, match=r"mw.simulate_devices\(16\) before JAX starts"):
        trainer(mesh="fsdp=16")._plan(next(batches(1, 32)))


def test_progress_is_shown_on_request_and_warnings_always(assembled, capfd):
    given = trainer(pipeline="gpipe")
    given.fit(batches(2), steps=2, assembled=assembled, progress=True)
    told = capfd.readouterr().err
    # What a notebook or a script prints: the plan in a line, the result in two.
    assert str(assembled.plan) == assembled.plan.describe()
    print(given.result)
    first, second = capfd.readouterr().out.splitlines()
    size, count = assembled.plan.batch.global_batch_size, assembled.plan.num_devices
    assert first.startswith(f"trained 2 steps of {size} samples on {count} devices in ")
    assert first.endswith(" s: all steps are done")
    losses = list(given.result.losses.values())
    assert second == f"loss {losses[0]:.4f} → {losses[-1]:.4f}"
    assert 'warning: schedule="gpipe" has no effect' in told
    assert "train 2/2  loss" in told
    with pytest.warns(UserWarning, match='schedule="gpipe" has no effect'):
        given.fit(batches(2), steps=2, assembled=assembled, restart=True)
    assert capfd.readouterr().err == ""


def test_a_batch_larger_than_the_data_says_what_it_repeats(assembled):
    few = {name: array[:8] for name, array in next(iter(batches(1))).items()}
    size = assembled.plan.batch.global_batch_size
    with pytest.warns(UserWarning, match=rf"repeats each of the 8 samples {size / 8:.3g} "):
        trainer().fit(few, steps=1, batch_size=size, assembled=assembled)


def test_evaluation_sees_the_same_samples_however_steps_are_divided():
    held_out = next(batches(1, samples=100))
    found = []
    for count in (1, 4):
        given = trainer(
            optimizer=optax.sgd(0.0),
            mesh="data=2",
            devices=jax.devices()[:2],
            gradient_accumulation_steps=count,
        )
        found.append(given.fit(batches(1), steps=1, eval_data=held_out, eval_batches=5).eval_loss)
    assert found[0] == pytest.approx(found[1], rel=1e-6)


class Telling(Net):
    def __call__(self, x):
        x = super().__call__(x)
        jax.debug.callback(lambda value: told.append(float(value)), x[0, 0])
        return x


told: list[float] = []


def test_a_model_may_tell_what_it_computes():
    told.clear()
    given = trainer(model=Telling, mesh="data=2", devices=jax.devices()[:2])
    batch = next(batches(1))
    given.fit([batch], steps=1)
    jax.effects_barrier()
    assert told[0] == pytest.approx(float(Net(rngs=nnx.Rngs(0))(batch["x"])[0, 0]), rel=1e-5)


class Normed(Net):
    def __init__(self, *, rngs: nnx.Rngs):
        super().__init__(rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.norm(super().__call__(x))


def test_statistics_of_hardly_any_samples_are_warned_of():
    batch = next(batches(1))
    (remark,) = trainer(model=Normed, gradient_accumulation_steps=4).assemble(batch).remarks
    assert "the 4 microbatches of a step have 4 samples each" in remark
    assert "gradient_accumulation_steps=2 or less" in remark
    assert trainer(model=Normed).assemble(batch).remarks == ()


@pytest.mark.full
def test_batches_for_evaluation_need_not_fit_the_mesh(assembled):
    held_out = [*batches(1, samples=6), *batches(1, samples=3)]
    result = trainer().fit(batches(2), steps=2, eval_data=held_out, assembled=assembled)
    every = {name: np.concatenate([b[name] for b in held_out]) for name in held_out[0]}
    assert result.eval_loss == pytest.approx(float(loss(result.model, every)), rel=1e-6)
    assert result.eval[2]["eval_samples"] == 9
