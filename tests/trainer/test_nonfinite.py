"""Steps that are not finite: stopped at, skipped, or left out by going back; state kept clean."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from quick import quick_module
from real_processes import run_processes

import meshwright as mw
from meshwright.checkpoint import CheckpointReader

__all__ = ["quick_module"]
pytestmark = [
    pytest.mark.usefixtures("quick_module"),
    pytest.mark.filterwarnings("ignore:the (loss|gradient) is"),
]

PROGRAM = Path(__file__).with_name("nonfinite_in_processes.py").read_text()
STEPS = 12
RNG = np.random.default_rng(0)
ALL = [{"x": RNG.normal(size=(8, 4)).astype("float32")} for _ in range(STEPS + 6)]


class Net(nnx.Module):
    """Dropout and a batch norm: random streams and statistics that a skipped step must keep."""

    def __init__(self, rngs):
        self.up = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.up(x)))


def loss(model, batch):
    return (model(batch["x"]) ** 2).mean() + batch["x"].mean()


def spoiled(*numbers, data=ALL):
    """Batches of which these, counted from 0, have a NaN in one sample."""
    return [
        {"x": np.where(np.arange(8)[:, None] == 3, np.nan, b["x"]).astype("float32")}
        if n in numbers
        else b
        for n, b in enumerate(data)
    ]


def without(*numbers):
    return [batch for n, batch in enumerate(ALL) if n not in numbers]


@functools.cache
def trainer(loss=loss, **settings):
    """Return a trainer, whose programs are compiled once."""
    return mw.Trainer(
        model=Net,
        loss=loss,
        optimizer=optax.adam(optax.linear_schedule(0.02, 0.001, STEPS)),
        mesh="fsdp=2",
        devices=jax.devices()[:2],
        log_every=1,
        **settings,
    )


def fit(data, folder=None, *, steps=STEPS, resume=False, **settings):
    return trainer(**settings).fit(
        data,
        steps=steps,
        run_dir=folder,
        resume="must" if resume else "auto",
        restart=not resume,
        # A repaired batch is another one.
        checkpoint=mw.CheckpointConfig(every=4, accept_changes=resume),
        progress=False,
    )


def arrays(result):
    state = result.state
    keys = [k for k in state.model_state if jnp.issubdtype(k.dtype, jnp.floating)]
    return [np.asarray(x) for x in (*state.params, *state.optimizer, *keys)]


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(arrays(one), arrays(other), strict=True))


def incidents(folder):
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "incident"]


@pytest.mark.full
def test_a_skipped_step_leaves_no_trace(tmp_path):
    skipped = fit(spoiled(5, 6, 10), tmp_path / "a", on_nonfinite="skip")
    clean = fit(without(5, 6, 10), steps=STEPS - 3, on_nonfinite="skip")
    assert list(skipped.losses.values()) == list(clean.losses.values())
    assert list(skipped.losses) == [1, 2, 3, 4, 5, 8, 9, 10, 12]
    assert str(skipped).startswith(f"trained {STEPS - 3} steps of 8 samples and skipped 3 on ")
    assert same(skipped, clean)
    assert [(e["step"], e["action"], e["batch"]) for e in incidents(tmp_path / "a")] == [
        (6, "skip", 5),
        (7, "skip", 6),
        (11, "skip", 10),
    ]
    # The logged rate is the one of the optimizer, whose schedule did not move either.
    lines = map(json.loads, (tmp_path / "a/metrics.jsonl").read_text().splitlines())
    logged = {line["step"]: line for line in lines if line["split"] == "train"}
    schedule = optax.linear_schedule(0.02, 0.001, STEPS)
    assert logged[12]["learning_rate"] == pytest.approx(float(schedule(12 - 1 - 3)))
    assert logged[12]["skipped"] == 3
    assert "skipped" not in logged[5]


@pytest.mark.full
def test_a_resumed_run_remembers_what_it_skipped(tmp_path):
    fit(spoiled(5), tmp_path, steps=8, on_nonfinite="skip")
    resumed = fit(spoiled(5), tmp_path, on_nonfinite="skip", resume=True)
    assert same(resumed, fit(without(5), steps=STEPS - 1, on_nonfinite="skip"))
    assert CheckpointReader(tmp_path / "checkpoints").metadata(STEPS).skipped == 1


@pytest.mark.full
def test_too_many_skipped_in_a_row_stop_the_run(tmp_path):
    with pytest.raises(mw.UserError, match="the loss is nan at step 8") as caught:
        fit(spoiled(4, 5, 6, 7, 8), tmp_path, on_nonfinite="skip", max_skipped=3)
    assert "the 3 steps before it were skipped" in caught.value.why
    # The first three are recorded, and the one that stops the run is not.
    assert f'mw.replay("{tmp_path / "incidents" / "000007"}"' in caught.value.fix
    assert caught.value.exit_code == 4
    # The last good state, with the steps that were skipped.
    assert CheckpointReader(tmp_path / "checkpoints").latest() == 7


@pytest.mark.full
def test_a_run_that_goes_back_never_had_those_samples(tmp_path):
    went_back = fit(spoiled(5, 12), tmp_path, on_nonfinite="rewind")
    # To the checkpoint of step 4, then to that of step 8, without what came since.
    clean = fit(without(4, 5, 10, 11, 12), on_nonfinite="skip")
    assert list(went_back.losses.values()) == list(clean.losses.values())
    assert same(went_back, clean)
    assert (went_back.steps, went_back.steps_before) == (STEPS, 0)
    first, second = incidents(tmp_path)
    assert "back to the checkpoint of step 4, batches 4 to 5 are left out" in first["message"]
    assert "back to the checkpoint of step 8, batches 10 to 12 are left out" in second["message"]
    metadata = CheckpointReader(tmp_path / "checkpoints").metadata(STEPS)
    assert metadata.left_out == [[4, 5], [10, 12]]


@pytest.mark.full
def test_a_run_goes_back_to_its_beginning_and_resumes_without_those_samples(tmp_path):
    part = fit(spoiled(2), tmp_path, steps=6, on_nonfinite="rewind")
    assert part.steps == 6
    resumed = fit(spoiled(2), tmp_path, on_nonfinite="rewind", resume=True)
    assert same(resumed, fit(without(0, 1, 2), on_nonfinite="skip"))


@pytest.mark.full
def test_a_run_goes_back_so_many_times_only(tmp_path):
    with pytest.raises(mw.UserError, match="the loss is nan at step 5") as caught:
        fit(spoiled(4, 5, 6), tmp_path, on_nonfinite="rewind", max_rewinds=2)
    assert "the run went back 2 times" in caught.value.why
    with pytest.raises(mw.UserError, match="needs checkpoints to go back to"):
        fit(ALL, on_nonfinite="rewind")


@pytest.mark.full
def test_epochs_end_with_the_data_after_going_back(tmp_path):
    run = trainer(on_nonfinite="rewind").fit(
        spoiled(5),
        epochs=1,
        run_dir=tmp_path,
        checkpoint=mw.CheckpointConfig(every=4),
        progress=False,
    )
    assert run.steps == len(ALL) - 2
    assert same(run, fit(without(4, 5), steps=len(ALL) - 2, on_nonfinite="skip"))


@pytest.mark.full
def test_stopping_keeps_the_state_before_it(tmp_path):
    with pytest.raises(mw.UserError, match="the loss is nan at step 7") as caught:
        fit(spoiled(6), tmp_path)
    assert "batch 6" in caught.value.why
    assert str(tmp_path / "incidents/000007") in caught.value.fix
    assert CheckpointReader(tmp_path / "checkpoints").steps() == [4, 6]
    # With the batch repaired, the run goes on as if nothing had happened.
    assert same(fit(ALL, tmp_path, resume=True), fit(ALL))


@pytest.mark.full
def test_only_the_backward_pass(tmp_path):
    def steep(model, batch):
        # The root of zero has a value, and no derivative.
        return loss(model, batch) + jnp.sqrt(model.up.bias * batch["x"].max()).sum()

    data = [{"x": np.abs(b["x"])} for b in ALL]
    with pytest.raises(mw.UserError, match="the gradient is not finite at step 1"):
        fit(data, tmp_path, loss=steep, steps=2)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_overflow_in_half_precision(tmp_path, precision):
    def steep(model, batch):
        out = model(batch["x"])
        return (out**2).mean() + jnp.exp(batch["x"].max() * out).mean()

    data = [dict(b) for b in ALL]
    data[5] = {"x": ALL[5]["x"] * 1000}
    result = fit(data, tmp_path, loss=steep, precision=precision, on_nonfinite="skip")
    assert all(np.isfinite(x).all() for x in arrays(result))
    skipped = [] if precision == "fp16" else [6]
    # Loss scaling skips by itself, without an incident.
    assert [e["step"] for e in incidents(tmp_path)] == skipped
    if precision == "fp16":
        assert int(result.state.loss_scale.skipped) >= 1


@pytest.mark.full
def test_fp16_stops_when_its_scale_cannot_get_smaller(tmp_path):
    data = spoiled(*range(3, 24), data=[*ALL, *ALL])
    with pytest.raises(mw.UserError, match="the loss is nan at step 19"):
        fit(data, tmp_path, precision="fp16", steps=30)
    assert CheckpointReader(tmp_path / "checkpoints").latest() == 18


# In one process it is tested every day, and in several also in tests/faults.
@pytest.mark.full
def test_two_processes_agree(tmp_path):
    said = run_processes(PROGRAM, [str(tmp_path)], count=2)
    assert said[0] == said[1]
    what, why, code = said[0]["stop"]
    assert (what, code) == ("the loss is nan at step 4", 4)
    assert "batch 3" in why
    skipped, back, clean = said[0]["losses"]
    assert skipped == back == clean
    assert said[0]["same"] == [True, True]
    assert CheckpointReader(tmp_path / "stop/checkpoints").latest() == 3
    with np.load(tmp_path / "stop/incidents/000004/batch.npz") as batch:
        recorded = batch["0"].view(np.float32).reshape(4, 8)
    assert np.argwhere(np.isnan(recorded)).tolist() == [[3, 0]]
