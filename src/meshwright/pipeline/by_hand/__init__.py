"""Pipelines of stages that the user writes, driven from the host."""
