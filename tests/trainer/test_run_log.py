"""What a run's files say of the process that wrote them."""

import pytest

from meshwright.trainer.run_log import typed_command

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("argv", "typed"),
    [
        (["/env/bin/meshwright", "train", "run.seed=1"], ["meshwright", "train", "run.seed=1"]),
        (["/env/meshwright/__main__.py", "train"], ["python", "-m", "meshwright", "train"]),
        (["train.py", "--fast"], ["python", "train.py", "--fast"]),
        (["/env/ipykernel_launcher.py", "-f", "kernel.json"], []),
        (["-c"], []),
    ],
)
def test_a_command_is_written_as_one_would_type_it(argv, typed):
    assert typed_command(argv) == typed
