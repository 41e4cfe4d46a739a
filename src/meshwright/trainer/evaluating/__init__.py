"""Evaluation and prediction on every sample of some data."""
