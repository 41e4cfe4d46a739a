"""Predictions compared with compiled programs."""
