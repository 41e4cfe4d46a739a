"""Replaying a step that was not finite: bit for bit, with its module and its samples."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from quick import quick_module

import meshwright as mw
from meshwright.checkpoint import read_params
from meshwright.cli.main import main
from meshwright.report import read_run
from meshwright.trainer.incidents.flight_record import FORMAT, read_record
from meshwright.trainer.incidents.replay import Replay
from meshwright.trainer.incidents.responsible import Responsible

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 4)).astype("float32")
BAD = 13
"""The sample that is not like the others."""


class Root(nnx.Module):
    """The root of a weighted sum, whose derivative at zero is infinite."""

    def __init__(self):
        self.weights = nnx.Param(jnp.ones(4))

    def __call__(self, x):
        return jnp.sqrt((x * self.weights).sum(-1, keepdims=True))


class Net(nnx.Module):
    """A layer, then something that does not stand every input."""

    def __init__(self, rngs, last=None):
        self.up = nnx.Linear(4, 8, rngs=rngs)
        self.last = last or Root()

    def __call__(self, x):
        return self.up(x), self.last(x)


class Exp(nnx.Module):
    """An exponential that overflows for large inputs, divided by itself."""

    def __call__(self, x):
        grown = jnp.exp(x)
        return grown / grown.sum(-1, keepdims=True)


class Loop(nnx.Module):
    """Doubles its input in a loop, until it overflows."""

    def __call__(self, x):
        return jax.lax.scan(lambda c, _: (c * 2, c), x, length=4)[1].mean(0)


def loss(model, batch):
    out, last = model(batch["x"])
    return (out**2).mean() + last.astype(jnp.float32).mean()


def record(folder, x, build=Net, **settings):
    """Train until the step stops the run; return the folder of its record."""
    trainer = mw.Trainer(
        model=build, loss=loss, optimizer=optax.adam(0.01), mesh="data=2",
        devices=jax.devices()[:2], **settings,
    )  # fmt: skip
    with pytest.raises(mw.UserError, match=r"is (nan|inf|not finite) at step 1"):
        trainer.fit({"x": x}, steps=1, batch_size=40, run_dir=folder, progress=False)
    return folder / "incidents/000001"


def positive(**values):
    x = np.abs(X) + 0.1
    for row in values.values():
        x[BAD] = row
    return x


@pytest.mark.full
def test_a_gradient_that_only_the_backward_pass_makes_infinite(tmp_path):
    path = record(tmp_path, positive(row=0))
    found = mw.replay(path, model=Net, loss=loss, optimizer=optax.adam(0.01))
    assert (found.reproduced, found.same_bits, found.bad_arrays) == (True, True, ())
    assert np.isfinite(float(found.loss[1]))
    first = found.origin.first
    assert (first.module, first.backward) == ("last", True)
    assert found.responsible.samples == (BAD,)
    assert found.responsible.finite_without
    # The record says which samples they are, and has the state before the step.
    facts = json.loads((path / "record.json").read_text())
    assert sorted(facts["samples"]) == list(range(40))
    assert facts["random_streams"] == []
    assert read_params(path)["up.kernel"].shape == (4, 8)
    assert "first: " in str(found)
    assert "in `last`, in the backward pass" in str(found)
    assert f"samples: sample {BAD}; without it the step is finite" in str(found)


@pytest.mark.parametrize("found", [FORMAT - 1, FORMAT + 1])
def test_a_record_of_another_format_is_refused(tmp_path, found):
    (tmp_path / "record.json").write_text(json.dumps({"format": found}))
    with pytest.raises(mw.UserError, match="has another format") as caught:
        mw.replay(tmp_path, model=Net, loss=loss)
    why = f"its format is {found}, and this version of meshwright reads format {FORMAT} only"
    assert caught.value.why == why


@pytest.mark.full
def test_a_batch_that_is_not_finite_itself(tmp_path):
    path = record(tmp_path, positive(row=np.nan))
    found = mw.replay(path, model=Net, loss=loss, devices=jax.devices()[:1])
    assert found.step == 1
    assert found.where.startswith("one device instead of data=2")
    assert [(a.name, a.nans, a.samples) for a in found.bad_arrays] == [("x", 4, (BAD,))]
    assert found.origin.operation == "batch array x"
    assert str(found).splitlines()[1].startswith("the batch is not finite itself: `x` has 4 NaN")
    # The folder of all incidents will do, if there is only one.
    assert read_record(path.parent).folder == path
    whole = (path / "batch.npz").read_bytes()
    for content in (b"", whole[: len(whole) // 2]):
        (path / "batch.npz").write_bytes(content)
        with pytest.raises(mw.UserError, match="cannot be read"):
            read_record(path)


@pytest.mark.full
def test_an_overflow_that_becomes_a_nan_later(tmp_path):
    path = record(tmp_path, positive(row=200), lambda rngs: Net(rngs, Exp()), precision="bf16")
    found = mw.replay(path, model=lambda rngs: Net(rngs, Exp()), loss=loss)
    first = found.origin.first
    assert (first.module, first.operation, first.backward) == ("last", "exp", False)
    assert (first.before[0].dtype, first.before[0].largest) == ("bfloat16", 200.0)
    assert (first.after.infs, found.origin.operation) == (4, "div")
    assert found.responsible.samples == (BAD,)


@pytest.mark.full
def test_a_loop_and_microbatches(tmp_path):
    path = record(
        tmp_path, positive(row=1e38), lambda rngs: Net(rngs, Loop()), gradient_accumulation_steps=4
    )
    found = mw.replay(path, model=lambda rngs: Net(rngs, Loop()), loss=loss)
    first = found.origin.first
    assert (first.module, first.operation, first.backward) == ("last", "mul", False)
    assert found.responsible.samples == (BAD,)


def test_what_cannot_be_replayed(tmp_path):
    with pytest.raises(mw.UserError, match="is not the record of an incident"):
        mw.replay(tmp_path)
    path = record(tmp_path, positive(row=0))
    with pytest.raises(mw.UserError, match="how to build the model of") as caught:
        mw.replay(path)
    assert "model=Net, loss=loss" in caught.value.fix
    with pytest.raises(mw.UserError, match="the model is not the one of"):
        mw.replay(path, model=lambda rngs: Net(rngs, Exp()), loss=loss)


CODE = """
import numpy as np
from flax import nnx

class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.layer = nnx.Linear(8, 8, rngs=rngs)
    def __call__(self, x):
        return self.layer(x)

def loss(model, batch):
    return (model(batch["x"]) ** 2).mean()

def batches(step, batch_size):
    x = np.random.default_rng(step).normal(size=(batch_size, 8)).astype("float32")
    if step == 2:
        x[5, 3] = np.inf
    return {"x": x}
"""


def test_the_command_line(tmp_path, monkeypatch, capfd):
    (tmp_path / "ownparts.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    settings = [f"{k}.kind=ownparts:{v}" for k, v in (("model", "Net"), ("task", "loss"))]
    settings += ["data.kind=ownparts:batches", "training.global_batch_size=16", "simulate=8"]
    settings += ["model.mesh_shape=null", "training.steps=4", "hydra.run.dir=run"]
    assert main(["train", *settings]) == 4
    error = " ".join(capfd.readouterr().err.split())
    assert "error: the loss is inf at step 3" in error
    assert "meshwright replay " in error
    assert "if only some samples fail, training.on_nonfinite=skip continues without the" in error
    assert "if all do, the parameters are the cause: go back to a checkpoint with" in error
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["steps"], result["failed"]) == (2, True)
    assert result["stopped"] == "failed: the loss is inf at step 3"
    assert read_run(tmp_path / "run")["failure"] == result["stopped"]
    assert main(["replay", "run/incidents/000003", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["loss_bit_equal"]
    assert [(a["name"], a["samples"]) for a in found["bad_arrays"]] == [("x", [5])]
    assert found["samples"] == {"samples": [5], "finite_without": True}
    assert main(["replay"]) == 2
    sys.modules.pop("ownparts", None)


def test_a_step_that_fails_with_every_sample_is_blamed_on_the_parameters(tmp_path):
    def told(samples: tuple[int, ...], finite_without: bool | None) -> str:
        responsible = Responsible(samples, finite_without)
        numbers = ("nan", "nan")
        facts = (numbers, numbers, True, True, "1 device", (), None, responsible, True)
        return str(Replay(tmp_path, 3, 2, *facts))

    advice = "leaving out the batch would not help: the parameters are the cause: go back to a"
    assert advice in told((0, 1, 2), None)
    assert advice not in told((1,), True)
