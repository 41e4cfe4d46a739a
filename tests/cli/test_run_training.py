"""run_training.py and the commands that people type with it: meshes, batches and processes."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from quick import quick_module
from real_processes import free_port

from meshwright.cli.main import main

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")

SCRIPT = Path(__file__).parents[2] / "run_training.py"
LIMIT_SECONDS = 540
SHAPES = ((1, 1), (4, 1), (1, 4), (2, 2), (8, 1), (8, 2))
SMALL = (
    *("model=gemma3_tiny", "model.num_blocks=2", "model.hidden_size=64", "model.mlp_size=128"),
    *("model.vocab_size=64", "model.context_length=16", "model.num_kv_heads=4"),
    *("data=synthetic", "training.steps=3", "training.eval_batches=1", "checkpoint=none"),
    *("tracking.log_every=1", "training.sample_tokens=0", "optimizer.warmup_steps=0"),
)
"""A model and a run that take seconds."""


def shape(fsdp, tp):
    return f'model.mesh_shape=[[{fsdp},{tp}],["fsdp","tp"]]'


@pytest.fixture
def train(tmp_path, monkeypatch, capfd):
    """Run what run_training.py runs in this process, which has 8 devices; return its result."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        capfd.readouterr()
        code = main(["train", *SMALL, "simulate=8", "--json", *words])
        out, err = capfd.readouterr()
        assert code == 0, err
        return json.loads(out), err

    return call


def start(*words, cwd, launcher=(), **environ):
    return subprocess.Popen(
        [sys.executable, *launcher, str(SCRIPT), *SMALL, *words, "--json"],
        cwd=cwd,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*started):
    """Return what process 0 printed; it is the first one."""
    try:
        printed = [process.communicate(timeout=LIMIT_SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(started), printed
    assert [out for out, _ in printed[1:]] == [""] * (len(started) - 1)
    return json.loads(printed[0][0])


@pytest.mark.full
def test_fsdp_with_a_batch_for_each_device(train):
    result, _ = train(shape(8, 1), "training.micro_batch_size=4")
    assert result["mesh"] == {"fsdp": 8}
    assert np.isfinite(result["final_loss"])
    saved = yaml.safe_load((Path(result["run_dir"]) / "plan.yaml").read_text())
    assert saved["batch"]["global_batch_size"] == 4 * 8


@pytest.mark.full
def test_fewer_reductions_half_precision_and_a_profile(train):
    accumulation = ("gradient_accumulation_steps=4", "sync_gradients_every=2")
    settings = (*accumulation, "mixed_precision=bf16", "profile_communication=true")
    # Two steps warm up, and five are profiled.
    settings = (*settings, "steps=7")
    result, _ = train("mesh.data=8", *(f"training.{setting}" for setting in settings))
    run = Path(result["run_dir"])
    plan = yaml.safe_load((run / "plan.yaml").read_text())
    assert plan["precision"] == "bf16"
    assert plan["batch"]["gradient_accumulation_steps"] == 4
    assert plan["batch"]["sync_gradients_every"] == 2
    profile = json.loads((run / "profile.json").read_text())
    assert len(profile["devices"]) == 8


def test_the_script_is_the_command(tmp_path):
    words = ("model=mlp", "model.widths=[784,8,10]", "task=classification", "simulate=4")
    own = [word for word in SMALL if not word.startswith("model")]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *own, *words, shape(2, 2)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    (log,) = tmp_path.glob("outputs/*/*/*/train.log")
    dated = r"outputs/meshwright/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d/train.log"
    assert re.fullmatch(dated, str(log.relative_to(tmp_path)))
    assert f"run folder: {log.parent}" in done.stdout


@pytest.mark.parametrize(
    ("model", "sizes", "micro"),
    [("gemma3_1b", (4, 1), 4), ("gemma3_1b", (8, 1), 2), ("gemma3_4b", (8, 2), 8)],
)
def test_large_models_are_composed(capfd, model, sizes, micro):
    words = [f"model={model}", shape(*sizes), f"training.micro_batch_size={micro}"]
    assert main(["train", *words, "--cfg", "job"]) == 0
    composed = yaml.safe_load(capfd.readouterr().out)
    assert composed["model"]["mesh_shape"] == [list(sizes), ["fsdp", "tp"]]
    assert composed["training"]["micro_batch_size"] == micro
    assert composed["model"]["kind"] == "gemma3"


def test_a_whole_training_is_one_word(capfd):
    assert main(["train", "+experiment=full_training", "model=gpt2", "--cfg", "job"]) == 0
    composed = yaml.safe_load(capfd.readouterr().out)
    assert composed["optimizer"]["schedule"] == "cosine"
    steps, warmup = composed["training"]["steps"], composed["optimizer"]["warmup_steps"]
    assert 0 < warmup < steps / 10
    assert (
        steps % composed["checkpoint"]["every"] == steps % composed["training"]["eval_every"] == 0
    )
    assert composed["training"]["mixed_precision"] == "bf16"


@pytest.mark.full
def test_a_whole_training_trains(train):
    steps = ("training.steps=4", "optimizer.warmup_steps=2", "training.eval_every=2")
    result, _ = train("+experiment=full_training", *steps, "checkpoint.every=2")
    assert result["eval_loss"] > 0
    assert result["steps"] == 4


def test_distributed_training_never_starts_alone(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *SMALL, "simulate=8", "--distributed"]) == 2
    err = capfd.readouterr().err
    assert "--distributed: this process would train alone" in err
    assert "export MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK" in err
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """Train on one device, in batches of 16."""
    return finish(start(shape(1, 1), "simulate=1", BATCH, cwd=tmp_path_factory.mktemp("one")))


BATCH = "training.global_batch_size=16"


def assert_alike(result, expected):
    found = [result[key] for key in ("first_loss", "final_loss", "eval_loss")]
    wanted = [expected[key] for key in ("first_loss", "final_loss", "eval_loss")]
    np.testing.assert_allclose(found, wanted, rtol=2e-5)


@pytest.mark.full
@pytest.mark.parametrize("sizes", SHAPES[1:], ids=str)
def test_mesh_shapes_train_like_one_device(one_device, tmp_path, sizes):
    count = sizes[0] * sizes[1]
    result = finish(start(shape(*sizes), f"simulate={count}", BATCH, cwd=tmp_path))
    assert result["devices"] == count
    assert_alike(result, one_device)


@pytest.mark.full
def test_launched_processes_train_like_one_device(one_device, tmp_path):
    launcher = ("-m", "meshwright.launch", "--nprocs=4")
    words = (shape(4, 2), "simulate=8", BATCH)
    assert_alike(finish(start(*words, cwd=tmp_path, launcher=launcher)), one_device)


@pytest.mark.full
def test_launches_on_two_machines_train_like_one_device(one_device, tmp_path):
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "4"}
    launcher = ("-m", "meshwright.launch", "--nprocs=2")
    words = (shape(8, 1), "simulate=8", BATCH)
    launches = [
        start(*words, cwd=tmp_path, launcher=launcher, **common, RANK=rank) for rank in ("0", "2")
    ]
    assert_alike(finish(*launches), one_device)


@pytest.mark.full
def test_processes_with_exported_ranks_train_like_one_device(one_device, tmp_path):
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    words = (shape(2, 2), "simulate=4", BATCH, "--distributed")
    started = [
        start(*words, cwd=tmp_path, **common, RANK=rank, LOCAL_RANK="0") for rank in ("0", "1")
    ]
    assert_alike(finish(*started), one_device)


@pytest.mark.full
def test_processes_of_torchrun_train_like_one_device(one_device, tmp_path):
    """The variables of torchrun, which listens on MASTER_PORT itself."""
    with socket.socket() as agent:
        agent.bind(("127.0.0.1", 0))
        agent.listen()
        port = agent.getsockname()[1]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "4"}
        common |= {"LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        ranks = [{"RANK": str(n), "LOCAL_RANK": str(n), "GROUP_RANK": "0"} for n in range(4)]
        words = (shape(8, 2), "simulate=16", BATCH)
        result = finish(*(start(*words, cwd=tmp_path, **common, **own) for own in ranks))
    assert result["devices"] == 16
    assert_alike(result, one_device)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "sizes", "micro"), [("gemma3_1b", (4, 1), 4), ("gemma3_4b", (8, 2), 8)]
)
def test_large_models_are_laid_out(tmp_path, model, sizes, micro):
    count = sizes[0] * sizes[1]
    words = [f"model={model}", shape(*sizes), f"training.micro_batch_size={micro}"]
    words += [f"simulate={count}", "data=synthetic", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "inspect", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    totals = json.loads(done.stdout)["totals"]
    share = totals["bytes"] / count
    assert share <= totals["bytes_per_device"] <= 1.05 * share
    # Adam keeps two numbers for each parameter.
    assert 2 * share <= totals["optimizer_bytes_per_device"] <= 2.1 * share
