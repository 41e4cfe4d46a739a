"""Dim classes: which dims of a traced program belong together, and what sharding them costs."""
