"""Every test runs on eight virtual CPU devices."""

import os

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"

from meshwright.errors import Spelling, spelled_for
from meshwright.mesh.simulate import simulate_devices

simulate_devices(8)


@pytest.fixture(scope="module")
def command_line():
    """Let messages spell settings as the command line does."""
    with spelled_for(Spelling.COMMAND_LINE):
        yield
