"""Drills: faults injected into a real run on this machine, and checks that it recovers."""
