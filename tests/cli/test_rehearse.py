"""Rehearsals: a step compiled for other devices, with every figure and how it is known."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from quick import quick_module

import meshwright as mw
from meshwright.cli.main import main
from meshwright.hardware import parse_hardware
from meshwright.planner.devices.links import axis_links, collective_seconds
from meshwright.planner.estimate.estimate import AxisTraffic, Estimate, MemoryEstimate, TimeEstimate
from meshwright.planner.rehearse.prove import proof_table, prove
from meshwright.planner.rehearse.rehearsal import Measured, make_figures, rehearse, sending_seconds

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")

SMALL = ("model=mlp", "model.widths=[784,64,10]", "optimizer=sgd", "training.micro_batch_size=2")
PARAMETERS = (784 * 64 + 64 + 64 * 10 + 10) * 4


def result(capfd, *words):
    code = main([*words, "--json"])
    out, err = capfd.readouterr()
    assert code == 0, err
    return json.loads(out)


def test_a_rehearsal_needs_no_data_and_agrees_with_the_ledger(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (*SMALL, "mesh.data=8", "data=digits")
    report = result(capfd, "rehearse", *SMALL, "hardware=8xA100-40GB", "mesh.data=8")
    ledger = result(capfd, "ledger", *words)
    memory, figures = report["memory"], {f["name"]: f for f in report["figures"]}
    assert report["compiled_for"] == "8 × cpu (virtual)"
    assert memory["argument_bytes"] == ledger["argument_bytes"]
    assert report["sent_bytes"] == {"data": ledger["axes"]["data"]["sent_bytes"]}
    # SGD has momentum, and its schedule counts steps; the batch has 2 images and labels.
    assert memory["state_bytes"] == 2 * PARAMETERS + 4
    assert memory["batch_bytes"] == 2 * (784 + 1) * 4
    assert 0 <= memory["argument_bytes"] - memory["state_bytes"] - memory["batch_bytes"] <= 8
    assert figures["state"]["error"] == 0.0
    # Memory besides state and batch is another on GPUs.
    assert figures["temporary values"]["predicted"] is None
    assert figures["all of the program"]["predicted"] is None
    assert {f["source"] for f in report["figures"]} == {"compiled", "modelled"}
    assert figures["sending over data"]["value"] > 0
    assert list(tmp_path.iterdir()) == []


def test_frozen_parameters_are_predicted_to_have_no_moments(capfd):
    frozen = "training.trainable=[layers.1.**]"
    report = result(capfd, "rehearse", *SMALL, frozen, "simulate=8", "mesh.data=8")
    figures = {f["name"]: f for f in report["figures"]}
    assert figures["state"]["value"] == PARAMETERS + (64 * 10 + 10) * 4 + 4
    assert figures["state"]["predicted"] == figures["state"]["value"]


@pytest.mark.full
def test_a_plan_is_rehearsed_by_the_name_of_its_file(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    size = ("model=mlp", "model.widths=[784,64,10]", "optimizer=sgd")
    fixed = ("mesh.data=8", "training.global_batch_size=16")
    assert main(["plan", *size, *fixed, "hardware=8xA100-40GB", "--out", "plan.yaml"]) == 0
    capfd.readouterr()
    report = result(capfd, "rehearse", "plan.yaml", *size, "hardware=8xA100-40GB")
    assert report["compiled_for"] == "8 × cpu (virtual)"
    assert set(report["sent_bytes"]) == {"data"}
    # The file knows the model and the hardware.
    assert result(capfd, "rehearse", "plan.yaml", "optimizer=sgd")["memory"] == report["memory"]
    other = ("model=mlp", "model.widths=[784,32,10]", "optimizer=sgd")
    found = result(capfd, "rehearse", "plan.yaml", *other)
    assert "was made for mlp with 50,890 parameters" in " ".join(found["remarks"])


def test_the_table_says_how_each_figure_is_known(capfd):
    assert main(["rehearse", *SMALL, "simulate=8", "mesh.fsdp=8"]) == 0
    out, _ = capfd.readouterr()
    assert "compiled for 8 × cpu (virtual) in " in out
    state = next(line for line in out.splitlines() if line.startswith("state "))
    assert " compiled " in state
    assert state.split()[1:3] == state.split()[-2:]
    assert next(line for line in out.splitlines() if line.startswith("temporary")).endswith(
        "compiled"
    )
    assert "%" not in out
    assert "Compiled for CPUs: " in out


def test_what_is_over_the_share_of_plans_does_not_fit(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = ("rehearse", *SMALL, "hardware=8xA100-40GB", "mesh.fsdp=8")
    assert main([*words]) == 0
    assert "It fits on A100-40GB: " in (out := capfd.readouterr().out)
    assert " of 36.0 GB (90% of a device).\n" in out
    # A millionth is less than the program needs, which is still much less than a device has.
    assert main([*words, "--memory-share", "0.000001"]) == 0
    out = capfd.readouterr().out
    assert "It does not fit on A100-40GB: " in out
    assert " of 40.0 kB (0% of a device), " in out
    assert main([*words, "--memory-share", "2"]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "gpu", "simulate=8"], "--on gpu needs a GPU, or a compiler for GPUs"),
        (["--on", "gpu", "hardware=8xH100"], "--on gpu needs a GPU, or a compiler for GPUs"),
        (["--on", "gpu", "hardware=8xMI300X"], "--on gpu needs a GPU, or a compiler for GPUs"),
        (["--on", "tpu", "simulate=8"], "--on tpu is not valid\n  write --on cpu or --on gpu"),
        ([], "a rehearsal needs the number of devices"),
        (["hardware=local"], "hardware=local is this machine, which needs no rehearsal"),
        (["hardware=256x8xH100"], "cannot rehearse on 2048 virtual devices"),
        (["hardware=4xH100", "mesh.fsdp=8"], "the mesh does not match the 4 devices"),
    ],
)
def test_bad_input(capfd, monkeypatch, words, message):
    monkeypatch.setattr("meshwright.cli.rehearse.simulate_devices", lambda count: None)
    assert main(["rehearse", *SMALL, *words]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert f"error: {message}" in err
    assert err.count("error: ") == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["simulate=8"], "no hardware is given to compile for"),
        (["hardware=8xH100"], "its compiler for them is not installed"),
        (["hardware=8xMI300X"], "the processors of MI300X are not known"),
    ],
)
def test_what_is_missing_to_compile_for_gpus_is_said(capfd, monkeypatch, words, why):
    monkeypatch.setattr("meshwright.planner.devices.absent_gpus.COMPILERS", ())
    assert main(["rehearse", *SMALL, *words, "--on", "gpu"]) == 2
    assert why in " ".join(capfd.readouterr().err.split())


def test_gpus_that_are_elsewhere_are_compiled_for(capfd, monkeypatch):
    asked = []

    def devices(hardware):
        asked.append(str(hardware))
        return jax.devices()

    # Virtual devices stand for the GPUs, for which no compiler is installed here.
    monkeypatch.setattr("meshwright.cli.rehearse.can_compile_for", lambda hardware: True)
    monkeypatch.setattr("meshwright.cli.rehearse.absent_gpus", devices)
    monkeypatch.setattr("meshwright.cli.rehearse.simulate_devices", lambda count: None)
    report = result(capfd, "rehearse", *SMALL, "hardware=8xA100-40GB", "mesh.data=8")
    assert asked == ["8xA100-40GB"]
    assert report["memory"]["state_bytes"] == 2 * PARAMETERS + 4
    assert report["overlapped"] == {"data": None}
    result(capfd, "rehearse", *SMALL, "hardware=8xA100-40GB", "mesh.data=8", "--on", "cpu")
    result(capfd, "rehearse", *SMALL, "hardware=8xTPU-v5e", "mesh.data=8")
    assert asked == ["8xA100-40GB"]


@pytest.fixture(scope="module")
def rehearsed():
    """A step that was compiled and run, on the virtual devices that tests have."""
    trainer = mw.Trainer(
        model=lambda rngs: mw_model(rngs),
        loss=lambda model, batch: ((model(batch["x"]) - 1.0) ** 2).mean(),
        optimizer=optax.adam(1e-3),
        mesh="fsdp=8",
    )
    return rehearse(trainer.assemble({"x": np.ones((16, 256), np.float32)}), run=True)


def mw_model(rngs):
    from flax import nnx

    return nnx.Linear(256, 256, use_bias=False, rngs=rngs)


def test_a_program_for_gpus_says_what_overlaps(rehearsed):
    """The time of a step is that of its program, next to what the planner assumed."""
    hardware = parse_hardware("8xA100-40GB")
    time = TimeEstimate(0.5, {"fsdp": AxisTraffic(1.0, 0.2, 0.1)}, bubble=0.25)
    memory = MemoryEstimate(0, 0, 0, 0, 0, 0, 0)
    estimate = Estimate(rehearsed.plan, hardware, time, lambda: memory)
    compiled = replace(rehearsed, measured=None, for_gpus=True)
    figures = {figure.name: figure for figure in make_figures(compiled, hardware, estimate)}
    alone = sending_seconds(rehearsed.ledger, hardware)["fsdp"]
    assert figures["step"].value == pytest.approx(0.75 + alone)
    assert figures["step"].predicted == pytest.approx(0.85)


def test_a_step_that_runs_is_measured(rehearsed):
    hardware = parse_hardware("8xA100-40GB")
    assert rehearsed.state == 3 * 256 * 256 * 4 // 8 + 4
    assert rehearsed.measured.compute_seconds > 0
    measured = replace(rehearsed, measured=Measured(0.5, 12345))
    figures = {figure.name: figure for figure in make_figures(measured, hardware, None)}
    assert figures["computing"].source == "measured"
    assert figures["peak of the memory in use"].value == 12345
    alone = sending_seconds(rehearsed.ledger, hardware)["fsdp"]
    assert figures["step"].source == "measured + modelled"
    # CPUs do not say what overlaps, so all of it is added.
    assert figures["step"].value == pytest.approx(0.5 + alone)
    link = axis_links(hardware, {"fsdp": 8})["fsdp"]
    by_hand = sum(
        line.count * collective_seconds(line.kind, line.payload_bytes / line.count, link, hardware)
        for line in rehearsed.ledger.lines
    )
    assert alone == pytest.approx(by_hand)


def estimate(rehearsed, *, off):
    """Return an estimate that is too large by some share everywhere but in the state."""
    memory, sent = rehearsed.memory, rehearsed.ledger.axes["fsdp"].sent_bytes
    rest = round((memory.total - rehearsed.state) * (1 + off))
    traffic = {"fsdp": AxisTraffic(sent * (1 + off), 1.0, 1.0)}
    return Estimate(
        rehearsed.plan,
        parse_hardware("8xA100-40GB"),
        TimeEstimate(1.0, traffic),
        lambda: MemoryEstimate(rehearsed.state, 0, 0, 0, 0, rest, 0),
    )


def test_a_proof_compares_predictions_with_what_is_compiled(rehearsed):
    report = {
        "memory": {"state_bytes": rehearsed.state, "total_bytes": rehearsed.memory.total},
        "sent_bytes": {"fsdp": rehearsed.ledger.axes["fsdp"].sent_bytes},
        "compiled_for": rehearsed.compiled_for,
        "compile_seconds": rehearsed.compile_seconds,
    }
    guess = estimate(rehearsed, off=0.25)

    def figures(*, for_gpus):
        (proved,) = prove([guess], [], for_gpus=for_gpus, compile_plan=lambda given: report)
        return proved.to_json()["figures"], proof_table([proved])

    found, table = figures(for_gpus=True)
    assert found["state"]["error"] == 0.0
    assert found["rest"]["error"] == pytest.approx(0.25, abs=1e-4)
    assert 0 < found["total"]["error"] < 0.25
    assert found["sent over fsdp"]["error"] == pytest.approx(0.25)
    assert "exact" in str(table.rows)
    assert "+25.0%" in str(table.rows)
    # Programs for CPUs are compared in what is the same on all devices, without percentages.
    found, table = figures(for_gpus=False)
    assert found["state"]["predicted"] == found["state"]["compiled"] == rehearsed.state
    assert found["total"] == {"predicted": None, "compiled": rehearsed.memory.total, "error": None}
    assert found["rest"]["predicted"] is None
    assert found["sent over fsdp"]["predicted"] is not None
    assert "%" not in str(table.rows)


@pytest.mark.full
def test_a_rehearsal_starts_as_many_devices_as_the_hardware_has(tmp_path):
    words = (*SMALL, "hardware=8x8xH100", "mesh.fsdp=8", "--json")
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "rehearse", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=240,
        check=True,
    )
    report = json.loads(done.stdout)
    assert report["plan"]["mesh"] == {"data": 8, "fsdp": 8}
    assert report["compiled_for"] == "64 × cpu (virtual)"
    assert set(report["sent_bytes"]) == {"data", "fsdp"}


@pytest.mark.parametrize(
    ("hardware", "said"),
    [
        ("8xH100", "pip install 'jax[cuda12]'"),
        pytest.param(*("8xMI300X", "what is predicted for MI300X.\n"), marks=pytest.mark.full),
        pytest.param(*("8xTPU-v5e", "what is predicted for TPU-v5e.\n"), marks=pytest.mark.full),
    ],
)
def test_a_proof_by_cpu_programs_says_that_it_is_one(capfd, monkeypatch, hardware, said):
    monkeypatch.setattr("meshwright.planner.devices.absent_gpus.COMPILERS", ())
    monkeypatch.setattr("meshwright.planner.rehearse.prove.prove", lambda *_, **__: [])
    monkeypatch.setenv("COLUMNS", "1000")
    words = ("plan", *SMALL, "mesh.data=8", "--prove")
    assert main([*words, f"hardware={hardware}"]) == 0
    note = capfd.readouterr().out.partition("plan  per device  predicted")[2]
    assert "Compiled for CPUs: " in note
    assert said in note
    (remark, *_) = reversed(result(capfd, *words, f"hardware={hardware}")["remarks"])
    assert remark in note
    assert not any("CPU" in line for line in result(capfd, *words, "simulate=8")["remarks"])


@pytest.mark.full
def test_plans_are_proved_by_compiling_them_in_another_process(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    small = ("model=mlp", "model.widths=[784,64,10]", "training.global_batch_size=32")
    words = ("hardware=4xA100-40GB", "mesh.data=4", "--top", "1", "--prove")
    report = result(capfd, "plan", *small, *words)
    (proof,) = report["proof"]
    assert proof["plan"]["mesh"] == {"data": 4}
    assert proof["compiled_for"] == "4 × cpu (virtual)"
    assert proof["figures"]["state"]["error"] == 0.0
    assert "Compiled for CPUs: " in report["remarks"][-1]
    # The gradients of all parameters are added up by a ring of four devices, besides some scalars.
    sent = proof["figures"]["sent over data"]["compiled"]
    assert 0 <= sent - 2 * 3 / 4 * PARAMETERS < 100
