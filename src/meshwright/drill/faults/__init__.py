"""The faults, one file for each kind: how it is made to happen, and what has to come of it."""
