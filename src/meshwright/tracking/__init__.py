"""What is told about a run while it goes on: files, the screen, and services."""

from meshwright.tracking.setup import make_trackers
from meshwright.tracking.tracker import NullTracker, Tracker

__all__ = ["NullTracker", "Tracker", "make_trackers"]
