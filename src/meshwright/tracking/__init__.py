"""Run tracking: files in the run folder, the terminal, and services."""

from meshwright.tracking.setup import make_trackers
from meshwright.tracking.tracker import NullTracker, Tracker

__all__ = ["NullTracker", "Tracker", "make_trackers"]
