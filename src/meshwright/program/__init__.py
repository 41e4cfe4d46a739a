"""The traced loss, and passes over it."""
