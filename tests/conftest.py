"""Every test runs on eight virtual CPU devices."""

import os

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"

from meshwright import activity
from meshwright.errors import Spelling, spelled_for
from meshwright.mesh.simulate import simulate_devices

simulate_devices(8)
# Which stages take long enough to be mentioned depends on the machine.
activity.MENTIONED_SECONDS = activity.STILL_SECONDS = 3600.0


@pytest.fixture(scope="module")
def command_line():
    """Let messages spell settings as the command line does."""
    with spelled_for(Spelling.COMMAND_LINE):
        yield
