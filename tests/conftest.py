"""Every test runs on eight virtual CPU devices."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

from meshwright.mesh.simulate import simulate_devices

simulate_devices(8)
