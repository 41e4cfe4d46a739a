"""Which programs are compiled without optimizing their machine code."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from meshwright.compiled.compile_program import WORTH_POLISHING, quick_options


def test_only_what_computes_little_is_compiled_quickly():
    assert quick_options()["xla_backend_optimization_level"] == 0
    assert quick_options(WORTH_POLISHING / 2) == quick_options()
    assert quick_options(WORTH_POLISHING) == {}


def test_the_same_program_is_partitioned_the_same_way():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    whole = jax.NamedSharding(mesh, jax.P())
    x = jax.device_put(np.ones((8, 4), np.float32), rows)
    lowered = jax.jit(lambda x: x.T @ x, out_shardings=whole).lower(x)
    quick, polished = (
        lowered.compile(compiler_options=options).as_text() for options in (quick_options(), {})
    )
    assert quick.count(" all-reduce(") == polished.count(" all-reduce(") == 1


LARGE = """
from meshwright.mesh.simulate import simulate_devices
simulate_devices(2)
import optax
from proof.proofs import Plain, certify
from meshwright.compiled import compile_program

compile_program.WORTH_POLISHING = 1
warmup = optax.linear_schedule(0.0, 0.1, 10)
schedule = optax.join_schedules([warmup, optax.cosine_decay_schedule(0.1, 600)], [10])
print(certify({"fsdp": 2}, model=Plain, steps=4, optimizer=optax.adam(schedule)).equal)
"""


@pytest.mark.full
def test_a_large_model_is_certified_with_a_schedule_that_rounds():
    """The warmup computes in float32, where polished code rounds in another way.

    Tests compile without polishing anything, so this runs in a process that compiles as for users.
    """
    done = subprocess.run(
        [sys.executable, "-c", LARGE],
        env=os.environ | {"XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.splitlines()[-1:] == ["True"], done.stdout + done.stderr
