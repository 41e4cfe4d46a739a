"""Continuing a run: from a checkpoint, in memory, on another mesh."""
