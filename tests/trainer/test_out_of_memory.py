"""A device that is out of memory: one message with numbers and remedies, and nothing is lost."""

import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from quick import quick_module

import meshwright as mw
from meshwright.cli.main import main
from meshwright.errors import ExitCode, OutOfMemory
from meshwright.hardware import parse_hardware
from meshwright.planner.estimate.estimator import Estimator
from meshwright.planner.fit.out_of_memory import MemoryAdvice
from meshwright.trainer import training_run

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")

OWN = """
import jax.numpy as jnp
import numpy as np
from flax import nnx

class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return x

def loss(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)

def wide_loss(model, batch):
    wide = jnp.tile(model(batch["x"]), (1, 10**6))
    return jnp.mean(jnp.tanh(jnp.einsum("bi,bj->ij", wide, wide)))

def data(step, batch_size):
    return {"x": np.ones((batch_size, 8), np.float32)}
"""

NAMES: dict = {}
exec(OWN, NAMES)  # the same code as the command line imports
PARAMETERS = 2 * (8 * 8 + 8) * 4
GPU_TEXT = (
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes.\n"
    "BufferAssignment OOM Debugging."
)


def trainer(loss="loss", **settings):
    return mw.Trainer(model=NAMES["Net"], loss=NAMES[loss], optimizer=optax.adam(1e-3), **settings)


def estimator(loss):
    return Estimator(NAMES["Net"], NAMES[loss], optax.adam(1e-3), rows())


def rows(count=32):
    return {"x": np.ones((count, 8), np.float32)}


def shown(line: str, text: str) -> str:
    """Return the line of a message that contains some text."""
    return next(each for each in text.splitlines() if line in each)


def test_a_step_that_the_cpu_refuses_is_told_with_its_memory_and_remedies():
    with pytest.raises(OutOfMemory) as raised:
        trainer("wide_loss").fit(rows(), steps=2, batch_size=32)
    error = raised.value
    assert isinstance(error.__cause__, jax.errors.JaxRuntimeError)
    assert error.what.startswith("a device is out of memory: ")
    assert error.what.endswith("TB could not be allocated while training, near step 1")
    # Adam has two numbers for each parameter and counts its steps; a device has 4 rows.
    needs = shown("the compiled step needs", error.why)
    assert f"{PARAMETERS} B of parameters" in needs
    assert f"{(2 * PARAMETERS + 4) / 1e3:.1f} kB of optimizer state" in needs
    assert "128 B of batch" in needs
    assert "largest temporary values" in error.why
    assert "256.0 TB f32[8000000,8000000]" in error.why
    # On CPUs, what a change saves is not predicted.
    assert "the planner predicts " not in error.why
    title, *remedies = error.fix.splitlines()
    assert title == "what needs less memory, with the same global batch:"
    assert "  gradient_accumulation_steps=4" in remedies
    assert not any(" less" in line for line in remedies)


def test_on_gpus_remedies_are_listed_by_what_they_save(monkeypatch):
    monkeypatch.setattr(
        "meshwright.planner.fit.out_of_memory.detect", lambda devices: parse_hardware("8xH100")
    )
    assembled = trainer("wide_loss").assemble(rows())
    advice = MemoryAdvice(assembled, make_estimator=lambda: estimator("wide_loss"))
    title, *remedies = advice.remedies()
    assert title == "what needs less memory, with the same global batch:"
    listed = [re.fullmatch(r"  (.+): ([\d.]+) (\wB|B) less, which .*", line) for line in remedies]
    assert "gradient_accumulation_steps=4" in [found[1] for found in listed]
    units = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
    savings = [float(found[2]) * units[found[3]] for found in listed]
    assert savings == sorted(savings, reverse=True)


@pytest.mark.full
def test_what_is_already_on_is_not_suggested():
    sharding = mw.ShardingConfig(remat="full", blocks="scan")
    with pytest.raises(OutOfMemory) as raised:
        trainer("wide_loss", mesh="fsdp=8", sharding=sharding, precision="bf16").fit(
            rows(8), steps=2, batch_size=8
        )
    # One sample per device is not divided further, over more devices neither.
    assert raised.value.fix == ("use devices with more memory, a smaller batch or a smaller model")


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    """Run a command beside the model; return exit code and stderr."""
    (tmp_path / "own_memory.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = ("model.kind=own_memory:Net", "data.kind=own_memory:data", "optimizer.kind=adam")

    def call(name, *words):
        code = main([name, *own, *words])
        return code, capfd.readouterr().err

    yield call
    sys.modules.pop("own_memory", None)


@pytest.mark.full
@pytest.mark.parametrize("name", ["verify", "ledger"])
def test_other_commands_end_with_one_message(command, monkeypatch, name):
    def refuse(*args, **kwargs):
        raise jax.errors.JaxRuntimeError(GPU_TEXT)

    if name == "ledger":
        monkeypatch.setattr("meshwright.cli.ledger.make_ledger", refuse)
    code, err = command(name, "task.kind=own_memory:wide_loss", "training.micro_batch_size=4")
    assert code == ExitCode.NOTHING_FITS
    assert err.count("error: a device is out of memory: ") == err.count("error: ") == 1
    assert "Traceback" not in err
    assert ("verify also trains in float64" in err) == (name == "verify")


def failing_after(steps, text):
    """Return a compile_step whose step fails as JAX does once it has run so often."""
    original, ran = training_run.compile_step, []

    def compile_step(assembled, batch, **others):
        compiled = original(assembled, batch, **others)

        def run(state, batch):
            ran.append(1)
            if len(ran) > steps:
                raise jax.errors.JaxRuntimeError(text)
            return compiled.run(state, batch)

        return training_run.CompiledStep(
            run, compiled.text, compiled.ledger, compiled.memory, compiled.seconds
        )

    return compile_step


def test_a_run_that_ends_without_memory_keeps_its_checkpoints_and_resumes(
    command, tmp_path, monkeypatch
):
    words = ("task.kind=own_memory:loss", "training.steps=6", "hydra.run.dir=run with space")
    words += ("checkpoint.every=2", "training.micro_batch_size=64")
    with monkeypatch.context() as patched:
        patched.setattr(training_run, "compile_step", failing_after(4, GPU_TEXT))
        code, err = command("train", *words)
    assert code == ExitCode.NOTHING_FITS
    assert "error: a device is out of memory: 68.7 GB could not be allocated while training" in err
    assert "step 4 is saved; to resume: the same command with 'hydra.run.dir=" in err
    assert err.count("error: ") == 1
    assert "Traceback" not in err
    remedy = ("training.micro_batch_size=32", "training.gradient_accumulation_steps=2")
    assert f"\n    {' '.join(remedy)}\n" in err
    # Another precision would be another run.
    assert "precision=bf16" not in err
    code, err = command("train", *words, *remedy)
    assert code == 0
    result = json.loads((tmp_path / "run with space" / "result.json").read_text())
    assert result["steps"] == 6


def test_an_evaluation_that_is_too_large():
    with pytest.raises(OutOfMemory, match="while evaluating") as raised:
        trainer(eval_loss=NAMES["wide_loss"]).fit(
            rows(), steps=1, batch_size=32, eval_data=rows(16)
        )
    assert "gradient_accumulation_steps=2" in raised.value.fix
    # There is no backward pass to compute anything again for.
    assert "remat" not in raised.value.fix


def test_a_state_that_is_too_large(monkeypatch):
    def refuse(*args, **kwargs):
        return jnp.zeros(2**45, jnp.uint8).block_until_ready()

    monkeypatch.setattr("meshwright.step.assemble.Assembled.init", refuse)
    with pytest.raises(OutOfMemory, match=r"35\.2 TB could not be .* while placing the state"):
        trainer().fit(rows(), steps=1, batch_size=32)


@pytest.mark.full
def test_several_processes_give_one_message(tmp_path):
    (tmp_path / "own_memory.py").write_text(OWN)
    own = ("model.kind=own_memory:Net", "data.kind=own_memory:data", "optimizer.kind=adam")
    words = ("train", *own, "task.kind=own_memory:wide_loss", "training.steps=2")
    flags = ("--nprocs=2", "--devices-per-process=1")
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "launch", *flags, "--", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)])},
        timeout=240,
        check=False,
    )
    assert done.returncode == ExitCode.NOTHING_FITS
    assert done.stderr.count("error: a device is out of memory") == 1
    assert "what needs less memory, with the same global batch:" in done.stderr
