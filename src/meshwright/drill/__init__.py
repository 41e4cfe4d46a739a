"""Drills: faults that are made to happen to a training on this machine, and what comes of them."""
