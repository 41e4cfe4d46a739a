"""Every test runs on eight virtual CPU devices, in programs that are compiled quickly."""

import atexit
import gc
import os
import shutil
import tempfile
from importlib.metadata import version

import pytest
from _pytest.unraisableexception import gc_collect_iterations_key
from composed_once import compose_files_once
from one_context import lower_in_one_context

os.environ["JAX_PLATFORMS"] = "cpu"
# Tests run a program once or twice, so polishing its machine code does not pay; what is computed
# and sent stays the same. Processes that tests start inherit the flags. XLA ends a process with a
# flag that it does not know, so the last one is left to the releases that have it. With XLA_FLAGS
# set, even to nothing, tests run the code that users get, as `make test-all` does.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    + (" --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""),
)
# The user's caches stay as they are, and no test finds what another run, or the user, has left
# there or among the user's settings.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="meshwright-tests-")
os.environ["XDG_CONFIG_HOME"] = os.environ["XDG_CACHE_HOME"]
os.environ.pop("MESHWRIGHT_HARDWARE", None)

from meshwright.errors import Spelling, spelled_for
from meshwright.mesh.simulate import simulate_devices
from meshwright.runtime import activity

# Tracing makes many objects, and a worker keeps many: searching them for cycles takes a tenth of
# the time.
gc.set_threshold(100_000, 20, 20)
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
simulate_devices(8)
compose_files_once()
lower_in_one_context()
# Which stages take long enough to be mentioned depends on the machine.
activity.MENTIONED_SECONDS = activity.STILL_SECONDS = 3600.0


def pytest_ignore_collect(collection_path, config):
    """Leave out what `make quick` does not run: importing all tests takes seconds."""
    if config.option.markexpr.startswith("quick") and collection_path.suffix == ".py":
        return "pytest.mark.quick" not in collection_path.read_text(encoding="utf-8") or None
    return None


def pytest_configure(config):
    """Search for forgotten exceptions once at the end, not five times."""
    config.stash[gc_collect_iterations_key] = 1


def pytest_collection_finish():
    """Search nothing for cycles that was imported: it stays anyway."""
    gc.freeze()


@pytest.fixture(scope="module")
def command_line():
    """Let messages spell settings as the command line does."""
    with spelled_for(Spelling.COMMAND_LINE):
        yield


_CACHE = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture(autouse=True)
def _same_disk_cache():
    """Restore what a test sets of the compilation cache of the process."""
    yield from _restored_disk_cache()


@pytest.fixture(autouse=True, scope="module")
def _same_disk_cache_after_a_file():
    """Restore what the fixtures of a file set."""
    yield from _restored_disk_cache()


def _restored_disk_cache():
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = {name: jax.config.values[name] for name in _CACHE}
    yield
    if before != {name: jax.config.values[name] for name in _CACHE}:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.fixture
def own_disk_cache(monkeypatch, tmp_path):
    """Keep the user's cache out of a test of the compilation cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
