"""Mistakes in a model, a loss, the data or the sharding: one clear error each, exit code 2."""

import sys

import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright.cli.main import main
from meshwright.errors import UserError

OWN = """
import jax.numpy as jnp
import numpy as np
from flax import nnx

class Net(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.layer = nnx.Linear(4, 8, rngs=rngs)
    def __call__(self, x):
        return self.layer(x)

def loss(model, batch):
    return (model(batch["x"]) ** 2).mean()

def vector_loss(model, batch):
    return (model(batch["x"]) ** 2).mean(-1)

def nan_loss(model, batch):
    return jnp.log(-1 - loss(model, batch))

def data(step, batch_size):
    return {"x": np.random.default_rng(step).normal(size=(batch_size, 4))}

def nan_data(step, batch_size):
    return {"x": np.full((batch_size, 4), np.nan)}

def short_data(step, batch_size):
    return data(step, batch_size - 1)
"""

MISTAKES = {
    "the batch does not divide": (
        ["training.global_batch_size=12"],
        "error: a global batch of 12 samples cannot be divided\n"
        "  8 replicas (data × fsdp) × accumulation 1 = 8, and 12 is not a multiple of 8\n"
        "  a global batch of 8 or 16 samples would work (training.global_batch_size)\n",
    ),
    "the data gives batches of another size": (
        ["data.kind=bad_input:short_data"],
        "give batches of 32",
    ),
    "the loss is a vector": (
        ["task.kind=bad_input:vector_loss"],
        "error: the loss is not a scalar\n  it has shape (32,) and type float32\n"
        "  return its mean, or mw.Weighted(total, weight)\n",
    ),
    "a rule matches nothing": (
        ["sharding.rules={blocks.*.kernel: column}", "mesh.tensor=2"],
        "error: the sharding rule `blocks.*.kernel` matches no parameter\n"
        "  the model has 2 parameters, such as `layer.bias`\n",
    ),
    "a rule nearly matches": (
        ["sharding.rules={layer.kernal: column}", "mesh.tensor=2"],
        "did you mean `layer.kernel`?\n",
    ),
}

NOT_FINITE = {
    "task.kind=bad_input:nan_loss": "it is not finite on the first batch: ",
    "data.kind=bad_input:nan_data": "the batch is not finite itself: `x` has 128 NaN",
}


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Run a command in an empty directory beside a model; return exit code, stdout and stderr."""
    (tmp_path / "bad_input.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = ("model.kind=bad_input:Net", "data.kind=bad_input:data", "task.kind=bad_input:loss")

    def call(command: str, *overrides: str) -> tuple[int, str, str]:
        code = main([command, *own, "training.steps=2", *overrides])
        out, err = capfd.readouterr()
        return code, out, err

    yield call
    sys.modules.pop("bad_input", None)


@pytest.mark.parametrize("command", ["train", "verify", "ledger"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_error_before_anything_is_compiled_or_written(run, tmp_path, command, mistake):
    overrides, message = MISTAKES[mistake]
    code, out, err = run(command, *overrides)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("error: ") == 1
    assert "Traceback" not in err
    assert {path.name for path in tmp_path.iterdir()} <= {"bad_input.py", "__pycache__"}


@pytest.mark.parametrize(
    "command",
    ["train", "inspect", *(pytest.param(c, marks=pytest.mark.full) for c in ("verify", "ledger"))],
)
def test_a_tensor_axis_larger_than_the_heads(capfd, command):
    sizes = ("model.num_heads=2", "model.num_blocks=1", "model.hidden_size=32")
    code = main([command, "mesh.tensor=4", *sizes])
    out, err = capfd.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("error: tensor=4 is larger than the 2 attention heads of `blocks.0.")
    assert "write mesh.tensor=2, or use a model with a multiple of 4 heads" in err


@pytest.mark.parametrize(
    "override",
    [pytest.param(o, marks=[pytest.mark.full] * o.startswith("data")) for o in NOT_FINITE],
)
def test_a_loss_that_is_not_finite_at_the_start_of_training(run, override):
    code, out, err = run("train", override)
    assert (code, out) == (4, "")
    assert f"error: the loss is nan at step 1\n  {NOT_FINITE[override]}" in err
    assert "Traceback" not in err


def test_a_proof_of_a_loss_that_is_not_finite(run):
    code, out, err = run("verify", "task.kind=bad_input:nan_loss")
    assert (code, out) == (2, "")
    assert "error: the loss of the first batch is nan on one device" in err


def test_a_trainer_that_meets_a_loss_that_is_not_finite_in_its_first_step(run):
    import bad_input

    trainer = mw.Trainer(model=bad_input.Net, loss=bad_input.loss, optimizer=optax.sgd(0.1))
    with pytest.raises(UserError, match="the loss is nan at step 1"):
        trainer.fit([{"x": np.full((8, 4), np.nan, np.float32)}], steps=1)


def test_a_proof_of_more_steps_than_there_are_batches(run):
    import bad_input

    trainer = mw.Trainer(model=bad_input.Net, loss=bad_input.loss, optimizer=optax.sgd(0.1))
    with pytest.raises(UserError, match="the data has no batch 1") as caught:
        trainer.verify([{"x": np.ones((8, 4), np.float32)}])
    assert "steps=1" in caught.value.fix


def test_rows_without_tokens(capfd):
    assert main(["ledger", "data.sequence_length=0"]) == 2
    assert (
        "error: data.sequence_length=0 is not valid\n  it is less than 1" in capfd.readouterr().err
    )


SPELLED = {
    "batch": (
        ["training.global_batch_size=12"],
        {},
        "  a global batch of 8 or 16 samples would work (training.global_batch_size)\n",
        "a global batch of 8 or 16 samples would work (batch_size)",
    ),
    "mesh": (
        ["mesh.fsdp=3"],
        {"mesh": "fsdp=3"},
        "  nearest meshes that work: mesh.data=2 mesh.fsdp=4; ",
        'nearest meshes that work: mesh="data=2,fsdp=4"; ',
    ),
    "simulated devices": (
        ["mesh.fsdp=16"],
        {"mesh": "fsdp=16"},
        "  or simulate=16, to try this mesh on 16 virtual CPU devices\n",
        "\nor mw.simulate_devices(16) before JAX starts, to try this mesh on 16 virtual CPU",
    ),
    "accumulation": (
        ["training.gradient_accumulation_steps=4", "training.sync_gradients_every=3"],
        {"gradient_accumulation_steps": 4, "sync_gradients_every": 3},
        "  write training.sync_gradients_every=2 or 4\n",
        "\nwrite sync_gradients_every=2 or 4",
    ),
    "sharding": (
        [
            "mesh.fsdp=8",
            "training.gradient_accumulation_steps=2",
            "training.sync_gradients_every=2",
        ],
        {"mesh": "fsdp=8", "gradient_accumulation_steps": 2, "sync_gradients_every": 2},
        "  write sharding.zero=1 or training.sync_gradients_every=1\n",
        "\nwrite sharding=mw.ShardingConfig(zero=1) or sync_gradients_every=1",
    ),
    "pipeline": (
        ["mesh.pipe=2", "pipeline=interleaved", "pipeline.num_microbatches=3"],
        {"mesh": "pipe=2", "pipeline": {"schedule": "interleaved", "num_microbatches": 3}},
        "  write pipeline.num_microbatches=2 or 4\n",
        "\nwrite num_microbatches=2 or 4",
    ),
    "stages": (
        ["mesh.pipe=2"],
        {"mesh": "pipe=2"},
        "  use mesh.fsdp or mesh.tensor for these devices, or define the stages yourself: ",
        "\nuse fsdp or tensor for these devices, or define the stages yourself: ",
    ),
}


@pytest.mark.parametrize("mistake", SPELLED)
def test_settings_are_spelled_as_their_reader_writes_them(run, mistake):
    overrides, arguments, on_command_line, in_python = SPELLED[mistake]
    samples = 12 if mistake == "batch" else 32
    code, _, err = run("train", f"training.global_batch_size={samples}", *overrides)
    assert code == 2
    assert on_command_line in err

    import bad_input

    with pytest.raises(UserError) as caught:
        mw.Trainer(
            model=bad_input.Net, loss=bad_input.loss, optimizer=optax.sgd(0.1), **arguments
        ).fit(bad_input.data, batch_size=samples, steps=1)
    assert in_python in str(caught.value)
