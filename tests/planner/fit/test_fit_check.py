"""Steps that cannot fit are refused before they are compiled, with a change that fits."""

from dataclasses import dataclass

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import meshwright as mw
from meshwright.cli.main import main
from meshwright.compiled.memory import MemoryUse
from meshwright.errors import ExitCode, OutOfMemory
from meshwright.hardware import detect
from meshwright.planner.devices.local_hardware import Capacity, device_capacity, known_hardware
from meshwright.planner.estimate.estimate import Estimate, MemoryEstimate, TimeEstimate
from meshwright.planner.fit.fit_check import _warn, check_memory, least_memory, warn_of_compiled
from meshwright.text.units import human_bytes

WIDTH, ROWS, DEVICES = 1024, 16, 8
KERNEL = WIDTH * WIDTH * 4
ADAM_COUNTER = 4


class Wide(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


def assembled(mesh, **settings):
    trainer = mw.Trainer(
        model=Wide,
        loss=lambda model, batch: ((model(batch["x"]) - 1.0) ** 2).mean(),
        optimizer=optax.adam(1e-3),
        mesh=mesh,
        **settings,
    )
    return trainer.assemble({"x": np.ones((ROWS, WIDTH), np.float32)})


def room(count):
    return Capacity(count, "a test")


def test_the_least_memory_is_what_the_compiled_step_is_given():
    for mesh, parts in (("data=8", 1), ("fsdp=8", 8), ("data=2,fsdp=4", 4)):
        step = assembled(mesh)
        least = least_memory(step)
        assert least.state == 3 * KERNEL // parts + ADAM_COUNTER
        assert least.gradients == KERNEL // parts
        assert least.batch == ROWS // DEVICES * WIDTH * 4
    batch = [jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32, sharding=step.step.shardings.batch)]
    given = step.step.lower(batch).compile().memory_analysis().argument_size_in_bytes
    # Besides, the state counts its steps and remembers whether it was halted.
    assert 0 < given - least.state - least.batch <= 8


def test_virtual_devices_are_planned_with_their_part_of_the_host():
    devices = jax.devices()
    capacity = device_capacity(devices)
    found = known_hardware(devices)
    assert found.count == len(devices)
    assert found.chip.hbm_gb_per_device == pytest.approx(capacity.bytes / 1e9)
    assert detect(devices).chip.hbm_gb_per_device == 16


def test_a_compiled_step_that_is_too_large_is_said():
    step = assembled("data=8")
    here = device_capacity(jax.devices()).bytes
    assert warn_of_compiled(step, MemoryUse(argument=here, output=0, alias=0, temp=0)) == []
    (warning,) = warn_of_compiled(step, MemoryUse(argument=here, output=0, alias=0, temp=10**9))
    assert f"needs {human_bytes(here + 10**9)} per device" in warning
    assert warn_of_compiled(step, None) == []


@pytest.mark.parametrize(
    ("mesh", "limit", "fix"),
    [
        (
            "data=8",
            KERNEL,
            'write mesh="fsdp=8" instead of mesh="data=8", which needs at least 2.1 MB per device',
        ),
        ("data=8", KERNEL // 3, 'write mesh="fsdp=16" on 16 devices, which needs at least 1.1 MB'),
        ("data=8", 10 * 1024, "use a smaller model, or devices with more memory"),
    ],
)
def test_the_smallest_change_that_fits(mesh, limit, fix):
    with pytest.raises(OutOfMemory) as raised:
        check_memory(assembled(mesh), capacity=room(limit))
    assert raised.value.what.startswith(
        "the plan does not fit: a step needs at least 16.8 MB per device, and each has "
    )
    assert "4.2 MB of parameters + 8.4 MB of optimizer state + 4.2 MB of grad" in str(raised.value)
    assert fix in raised.value.fix


def test_more_virtual_devices_are_never_advised():
    step = assembled("data=8")
    with pytest.raises(
        OutOfMemory, match='write mesh="fsdp=8" instead of mesh="data=8", which needs at least'
    ):
        check_memory(step, capacity=Capacity(KERNEL, "a test", shared=True))
    with pytest.raises(OutOfMemory) as raised:
        check_memory(step, capacity=Capacity(KERNEL // 3, "a test", shared=True))
    assert raised.value.fix == (
        "devices of one host share its memory, so that more of them hold no more; use a smaller "
        "model or a host with more memory, or plan for other hardware: `meshwright plan` with "
        'hardware="8xH100"'
    )


def test_zero_3_is_a_smaller_change_than_more_devices():
    step = assembled("fsdp=8", sharding=mw.ShardingConfig(zero=1))
    with pytest.raises(OutOfMemory, match=r"write sharding=mw.ShardingConfig\(zero=3\)"):
        check_memory(step, capacity=room(KERNEL))


@dataclass
class Needs:
    total: int

    def estimate(self, plan, hardware):
        memory = MemoryEstimate(self.total, 0, 0, 0, 0, 0, 0)
        return Estimate(plan, hardware, TimeEstimate(1.0), lambda: memory)


def test_a_prediction_beyond_the_memory_is_a_warning():
    step = assembled("data=8")

    def warn(needs, has):
        return _warn(step, room(has), lambda: Needs(needs))

    assert warn(2**30, 2**30) == []
    assert warn(2**31, 2**30) == [
        "a step is predicted to need 2.1 GB per device, and each has 1.1 GB (a test); "
        "`meshwright plan` finds settings that fit"
    ]
    assert _warn(step, room(2**30), lambda: 1 // 0) == [
        "how much memory a step needs could not be predicted: integer division or modulo by zero"
    ]
    # On CPUs the host's memory says little about what a device may use.
    assert check_memory(step, lambda: Needs(2**31), room(2**30)) == []


def test_a_run_that_is_clearly_impossible_writes_and_compiles_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("meshwright.trainer.training_run.compile_step", None)
    code = main(["train", "model=mlp", f"model.widths=[784,{2**24},{2**14},10]"])
    out, err = capfd.readouterr()
    assert (code, out) == (ExitCode.NOTHING_FITS, "")
    # Adam: three numbers and a gradient for each parameter.
    assert "error: the plan does not fit: a step needs at least 4.6 TB per device" in err
    assert f"shared by {DEVICES} devices" in err
    assert "more of them hold no more; use a smaller model or a host with more memory" in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@dataclass
class Device:
    platform: str = "gpu"
    device_kind: str = "NVIDIA A100-SXM4-40GB"
    limit: int | None = None

    def memory_stats(self):
        return None if self.limit is None else {"bytes_limit": self.limit}


def test_the_memory_of_devices():
    memory = {"host_total_bytes": 80, "host_available_bytes": 8, "container_limit_bytes": 64}
    assert device_capacity([Device("cpu", "cpu")] * 4, lambda: memory).bytes == 16
    assert device_capacity([Device("cpu", "cpu")], lambda: memory).shared
    assert not device_capacity([Device(limit=70)]).shared
    assert device_capacity([Device("cpu", "cpu")], lambda: {}) is None
    assert device_capacity([Device(limit=70), Device(limit=60)]).bytes == 60
    known = device_capacity([Device()])
    assert (known.bytes, known.source) == (40_000_000_000, "the memory of a A100-40GB")
    assert device_capacity([Device(device_kind="unheard of")]) is None
    assert device_capacity([]) is None
