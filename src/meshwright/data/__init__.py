"""Data: sources of samples and their deterministic global order."""
