"""Random command lines end with one message and a documented exit code.

`MESHWRIGHT_FUZZED` sets how many, 3,000 by default; on two idle cores 10 take a second.
"""

import os
import subprocess
import sys

import pytest
from faults import fuzzed_commands

pytestmark = [pytest.mark.full, pytest.mark.faults]

COUNT = int(os.environ.get("MESHWRIGHT_FUZZED", "3000"))


def test_no_command_line_ends_in_an_internal_error():
    done = subprocess.run(
        [sys.executable, fuzzed_commands.__file__, str(COUNT), "1"],
        capture_output=True,
        text=True,
        timeout=7200,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
    )
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout + done.stderr
