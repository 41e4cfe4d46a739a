"""Schedules in pure Python: operations, ticks, timelines and their drawings."""
