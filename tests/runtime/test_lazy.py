"""Names of packages that load on first use."""

import subprocess
import sys

import pytest

import meshwright
from meshwright import config, distributed, pipeline
from meshwright.runtime.lazy import lazy_names

pytestmark = pytest.mark.quick


def test_names_and_modules_are_found_and_others_refused():
    load, names = lazy_names("meshwright")
    assert load("Plan").__module__ == "meshwright.plan"
    assert load("pipeline") is pipeline
    assert {"Plan", "pipeline"} < set(names())
    with pytest.raises(AttributeError, match=r"module .meshwright. has no attribute 'other'"):
        load("other")


@pytest.mark.parametrize("package", [meshwright, config, distributed, pipeline])
def test_every_public_name_of_a_package_loads(package):
    assert sorted(package.__all__) == dir(package)
    for name in package.__all__:
        assert getattr(package, name) is not None


def test_importing_the_package_loads_neither_jax_nor_pydantic():
    loaded = "import sys, meshwright; print('jax' in sys.modules, 'pydantic' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", loaded], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]
