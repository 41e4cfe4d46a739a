"""Repeated blocks: finding them, proving them equal, rolling them into a scan, cutting there."""
