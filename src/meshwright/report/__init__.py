"""Self-contained HTML reports about one run, or comparing several."""

from meshwright.report.find import find_runs
from meshwright.report.page import make_page
from meshwright.report.read import read_run

__all__ = ["find_runs", "make_page", "read_run"]
