"""The links, the measured speed and the memory of devices."""
