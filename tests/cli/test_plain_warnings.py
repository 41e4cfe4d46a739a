"""Warnings of the package are printed like other messages, and those of users' code as usual."""

import subprocess
import sys

PROGRAM = """
import logging, warnings
from meshwright.cli import output
output.print_warnings_plainly()
warnings.warn_explicit("one", UserWarning, output.__file__, 3)
logging.getLogger("meshwright.data").warning("two")
warnings.warn_explicit("three", UserWarning, "users.py", 4)
"""


def test_only_warnings_of_the_package_are_shortened():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert run.stderr.splitlines() == [
        "warning: one",
        "warning: two",
        "users.py:4: UserWarning: three",
    ]
