"""Run tracking: files in the run folder, the terminal, and services."""

from meshwright.tracking.setup import make_trackers
from meshwright.tracking.tracker import Tracker

__all__ = ["Tracker", "make_trackers"]
