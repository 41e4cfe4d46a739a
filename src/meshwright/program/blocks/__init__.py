"""Repeated blocks: found, proven equal, rolled into a scan, cut into segments."""
