"""The private parts of JAX do what Meshwright relies on, and only one file imports them."""

import ast
import contextlib
import functools
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from meshwright.mesh.build import build_mesh
from meshwright.runtime import jax_internals

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parent.parent.parent
FILE = ROOT / "src" / "meshwright" / "runtime" / "jax_internals.py"
SPEEDS_UP_TESTS = ROOT / "tests/one_context.py"
CHECKED_FOLDERS = ("src", "tests", "benchmarks")


@contextlib.contextmanager
def relied_on(function, private, meaning):
    """Say what to do if the private part of JAX behind a function is gone or has changed."""
    try:
        yield
    except Exception as error:
        pytest.fail(
            f"JAX {jax.__version__} has changed `jax._src.{private}`: {error!r}\n"
            f"Meshwright needs from it: {meaning}.\n"
            f"Look for where this JAX has it now, a public name first, and change "
            f"`{function}` in {FILE.relative_to(ROOT)}; if it must still work with the oldest JAX "
            f"of pyproject.toml, try both names there. If this JAX has nothing like it, set an "
            f"upper bound for jax in pyproject.toml.",
            pytrace=False,
        )


def test_jax_says_whether_it_has_started():
    program = """
import jax
from meshwright.runtime.jax_internals import jax_has_started
before = jax_has_started()
jax.devices()
print(before, jax_has_started())
"""
    with relied_on(
        "jax_has_started",
        "xla_bridge.backends_are_initialized",
        "False before anything asks for devices, True afterwards, and asking creates none",
    ):
        ran = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
        )
        assert ran.stdout.split() == ["False", "True"], ran.stderr


def test_a_process_on_its_own_has_no_client():
    with relied_on(
        "distributed_state",
        "distributed.global_state",
        "client None, process_id 0 and num_processes 1 in a process that is not connected",
    ):
        state = jax_internals.distributed_state()
        assert state.client is None
        assert (state.process_id, state.num_processes) == (0, 1)


def test_a_connected_process_has_a_client_with_a_key_value_store():
    program = """
import socket
from meshwright import processes
from meshwright.runtime import jax_internals
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = "127.0.0.1:%d" % free.getsockname()[1]
processes.connect(address, 1, 0, timeout_seconds=60)
state = jax_internals.distributed_state()
client = state.client
client.key_value_set("a/0", "text")
assert client.key_value_try_get("a/0") == "text"
assert client.key_value_dir_get("a") == [("a/0", "text")]
client.wait_at_barrier("all", 60000)
client.key_value_delete("a")
assert client.key_value_dir_get("a") == []
print(state.process_id, state.num_processes, jax_internals.jax_has_started())
"""
    with relied_on(
        "distributed_state",
        "distributed.global_state",
        "after jax.distributed.initialize a client with key_value_set, key_value_try_get, "
        "key_value_dir_get, key_value_delete and wait_at_barrier, without devices being created",
    ):
        ran = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
        )
        assert ran.stdout.split() == ["0", "1", "False"], ran.stderr


def test_only_the_thread_of_gloo_has_a_low_priority():
    program = """
import os, socket, time
from meshwright import processes
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = "127.0.0.1:%d" % free.getsockname()[1]
processes.connect(address, 1, 0, timeout_seconds=60)
import jax
jax.devices()
time.sleep(1)  # The thread that started it ends.
threads = [int(name) for name in os.listdir("/proc/self/task")]
print(sorted(os.getpriority(os.PRIO_PROCESS, thread) for thread in threads)[-2:])
"""
    with relied_on(
        "lower_priority_of_gloo",
        "xla_bridge._jax.make_gloo_tcp_collectives",
        "called once when devices of several processes are created, it starts Gloo's thread",
    ):
        ran = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
        )
        assert ran.stdout.split() == ["[0,", "19]"], ran.stderr


def test_a_lowered_program_has_the_compiler_options_of_its_jit():
    options = {"xla_backend_optimization_level": 0}
    with relied_on(
        "compiler_options_of",
        "interpreters.pxla.MeshComputation",
        "the options given to jax.jit as pairs, and none without them",
    ):
        plain = jax.jit(jnp.sin).lower(1.0)
        quick = jax.jit(jnp.sin, compiler_options=options).lower(1.0)
        assert jax_internals.compiler_options_of(plain) == {}
        assert jax_internals.compiler_options_of(quick) == options


def test_the_axes_of_shard_map_and_vmap_are_listed():
    seen = {}

    def note(name, x):
        seen[name] = jax_internals.surrounding_axes()
        return x

    mesh = build_mesh({"data": 4, "fsdp": 2})
    with relied_on(
        "surrounding_axes",
        "core.get_axis_env",
        "an object whose axis_sizes has the names that shard_map and vmap have bound, "
        "and no others",
    ):
        jax.jit(lambda x: note("jit", x))(jnp.ones(8))
        jax.vmap(lambda x: note("vmap", x), axis_name="rows")(jnp.ones(8))
        jax.vmap(lambda x: note("unnamed", x))(jnp.ones(8))
        sharded = jax.shard_map(
            lambda x: note("shard_map", x), mesh=mesh, in_specs=P("data"), out_specs=P("data")
        )
        jax.jit(sharded)(jnp.ones(8))
        assert seen["jit"] == seen["unnamed"] == ()
        assert seen["vmap"] == ("rows",)
        assert {"data", "fsdp"} <= set(seen["shard_map"])
        assert set(seen["shard_map"]) <= set(mesh.axis_names)
        assert jax_internals.surrounding_axes() == ()


def test_sharding_constraints_can_be_replaced_while_a_function_is_traced():
    seen = []

    def constrained(x):
        x = jax.lax.with_sharding_constraint(x, P("rows", ("a", "b")))
        return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, P("data")))

    def note(x, sharding):
        seen.append(sharding.spec)
        return x

    mesh = build_mesh({"data": 8})
    with relied_on(
        "replaced_constraints",
        "pjit.sharding_constraint_p and pjit._create_sharding_for_array",
        "with_sharding_constraint looks both up when it is called",
    ):
        with jax_internals.replaced_constraints(note):
            program = jax.make_jaxpr(constrained)(jnp.ones((8, 4)))
        assert seen == [P("rows", ("a", "b")), P("data")]
        assert "sharding_constraint" not in str(program)
        with pytest.raises(RuntimeError, match="mesh"):
            jax.make_jaxpr(lambda x: constrained(x))(jnp.ones((8, 4)))
        spec = jax.sharding.NamedSharding(mesh, P("data"))
        program = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, spec))(jnp.ones(8))
        assert "sharding_constraint" in str(program)


def test_the_failure_says_what_to_do():
    with (
        pytest.raises(pytest.fail.Exception, match=r"change `f` in src/meshwright/runtime/jax_int"),
        relied_on("f", "core.gone", "something"),
    ):
        raise ImportError("gone")


def private_imports(text):
    """Return the lines of a file that name `jax._src`, by import or as an attribute."""
    lines = []
    if "_src" not in text:  # most files; parsing all of them takes seconds
        return lines
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        if any(re.match(r"jax\._src\b", name) for name in names):
            lines.append(node.lineno)
    return lines


def test_no_other_file_imports_private_parts_of_jax():
    offenders = {
        str(path.relative_to(ROOT)): lines
        for folder in CHECKED_FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path not in (FILE, SPEEDS_UP_TESTS) and (lines := private_imports(path.read_text()))
    }
    assert not offenders, f"move what needs jax._src to {FILE.relative_to(ROOT)}: {offenders}"


def test_every_form_of_a_private_import_is_seen():
    assert private_imports(FILE.read_text())
    for line in ("import jax._src.core", "from jax import _src", "from jax._src.core import x",
                 "x = jax._src.core.y"):  # fmt: skip
        assert private_imports(line), line
    assert not private_imports("from jax.core import Tracer\nimport jax")


def test_attention_is_told_which_gpu_it_is_compiled_for():
    with relied_on(
        "attention_on",
        "cudnn.fused_attention_stablehlo",
        "the functions with which cuDNN's attention asks for the GPU and the release of cuDNN",
    ):
        heads = jax.ShapeDtypeStruct((1, 16, 1, 256), jnp.bfloat16)

        def attend():
            attention = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
            return jax.eval_shape(attention, heads, heads, heads).shape

        with jax_internals.attention_on("9.0", (9, 10)):
            assert attend() == heads.shape
        with (
            jax_internals.attention_on("8.0", (9, 10)),
            pytest.raises(NotImplementedError, match="head dim must be <= 128"),
        ):
            attend()
        with pytest.raises((RuntimeError, NotImplementedError)):
            attend()
