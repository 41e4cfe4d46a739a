"""Rewards: functions that score completions, bundled ones, and the processes that run them."""
