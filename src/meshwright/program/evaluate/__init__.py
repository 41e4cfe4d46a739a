"""Evaluating a traced program by rules: weights on a mesh, float64, dependencies."""
