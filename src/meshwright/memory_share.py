"""How much of a device's memory plans may take, and JAX is told to use."""

MEMORY_SHARE = 0.9
"""The rest is for what JAX and the driver keep, and for the error of estimates."""
