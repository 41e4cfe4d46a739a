"""Rollouts: batches that the model makes itself, from prompts and rewards."""
