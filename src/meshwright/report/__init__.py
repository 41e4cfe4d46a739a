"""Self-contained HTML reports about one run, or comparing several."""

from meshwright.report.read import find_runs, make_page, read_run

__all__ = ["find_runs", "make_page", "read_run"]
