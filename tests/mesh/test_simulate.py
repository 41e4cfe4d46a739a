"""Virtual devices come before JAX starts, or not at all."""

import os
import subprocess
import sys

import jax
import pytest

from meshwright.errors import UserError
from meshwright.mesh.simulate import simulate_devices
from meshwright.runtime.jax_internals import jax_has_started

pytestmark = pytest.mark.quick


def run_python(code):
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=kept
    )


@pytest.mark.full
def test_a_fresh_process_gets_the_devices_it_asks_for():
    run = run_python(
        "from meshwright.runtime.jax_internals import jax_has_started\n"
        "from meshwright.mesh.simulate import simulate_devices\n"
        "simulate_devices(3)\n"
        "assert not jax_has_started()\n"
        "import jax\n"
        "print(len(jax.devices()), jax.devices()[0].platform, jax_has_started())"
    )
    assert run.stdout.split() == ["3", "cpu", "True"], run.stderr


def test_too_late_is_a_clear_error():
    assert len(jax.devices()) == 8
    with pytest.raises(UserError, match="too late to simulate 16 devices") as caught:
        simulate_devices(16)
    assert "already started with 8 cpu devices" in caught.value.why
    assert "before" in caught.value.fix


def test_asking_again_for_what_is_there_is_fine():
    assert len(jax.devices()) == 8
    simulate_devices(8)
    assert jax_has_started()
    assert len(jax.devices()) == 8


@pytest.mark.parametrize("count", [0, -1, 1025])
def test_impossible_counts_are_refused(count):
    with pytest.raises(UserError, match=f"cannot simulate {count} devices"):
        simulate_devices(count)
