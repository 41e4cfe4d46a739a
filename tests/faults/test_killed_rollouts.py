"""A training from rewards that is killed in any phase ends as if it had not been."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from faults.rewarded_training import PHASES

import meshwright as mw

pytestmark = pytest.mark.faults

TESTS = Path(__file__).parent.parent


def train(folder, phase=""):
    command = [sys.executable, "-m", "faults.rewarded_training", str(folder), phase]
    paths = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=False).returncode


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rollouts") / "run"
    assert train(folder) == 0
    return folder


@pytest.mark.parametrize("phase", PHASES)
def test_sigkill_in_a_phase_of_a_rollout_changes_nothing(phase, undisturbed, tmp_path):
    folder = tmp_path / "run"
    assert train(folder, phase) == -signal.SIGKILL
    assert train(folder, phase) == 0
    expected, found = mw.read_params(undisturbed), mw.read_params(folder)
    for name, value in expected.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(found[name]))
    made = lines_of(undisturbed)
    assert len(made) == 5
    assert lines_of(folder) == made


def lines_of(run):
    """Return the lines of each file of completions, without what tells runs apart."""
    return {
        path.name: [line.split('"run"')[0] for line in path.read_text().splitlines()]
        for path in (run / "completions").glob("*.jsonl")
    }
