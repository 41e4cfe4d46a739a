"""How a launch is written: flags first, then what each process runs."""

import sys

import pytest

from meshwright.errors import UserError
from meshwright.launch.options import parse_launch

pytestmark = pytest.mark.quick


def test_flags_stand_before_the_program_and_its_own_stay_with_it():
    flags = ["--nprocs", "2", "--devices-per-process=4", "--"]
    launch = parse_launch([*flags, "train", "mesh.fsdp=8", "--json"])
    assert (launch.nprocs, launch.devices_per_process, launch.grace) == (2, 4, None)
    assert launch.command == [
        sys.executable,
        "-P",
        "-m",
        "meshwright",
        "train",
        "mesh.fsdp=8",
        "--json",
    ]


def test_a_script_and_a_module_need_no_dashes(tmp_path):
    script = tmp_path / "run_training.py"
    script.touch()
    launch = parse_launch(["--nprocs=4", str(script), "model=gpt", "--nprocs", "7"])
    assert launch.nprocs == 4
    assert launch.command == [sys.executable, str(script), "model=gpt", "--nprocs", "7"]
    assert parse_launch(["--nprocs=1", "-m", "json.tool"]).command[1:] == ["-m", "json.tool"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "nothing to launch"),
        ("--nprocs 2", "nothing to launch"),
        ("--nprocs 2 --", "nothing to launch"),
        ("-- doctor", "number of processes is missing"),
        ("--nprocs 0 -- doctor", "--nprocs 0 is not valid"),
        ("--nprocs two -- doctor", "--nprocs two is not valid"),
        ("--nprocs 2 --devices-per-process -1 -- doctor", "--devices-per-process -1 is not valid"),
        ("--nproc 2 -- doctor", "did you mean `--nprocs`?"),
        ("--json --nprocs 2 -- doctor", "go after it"),
        ("--nprocs 2 --grace soon -- doctor", "--grace soon is not valid"),
        ("--nprocs 2 --join-timeout 0 -- doctor", "--join-timeout 0 is not valid"),
        ("--nprocs 2 --nodes 0 -- doctor", "--nodes 0 is not valid"),
        ("--nprocs 2 --node-rank 1 -- doctor", "--node-rank 1 needs the number of machines"),
        ("--nprocs 2 --nodes 2 --node-rank 2 -- doctor", "does not exist among --nodes 2"),
        ("--nprocs 2 --coordinator n1:x -- doctor", "must be a host and a port"),
        ("--nprocs 2 --coordinator 127.0.0.1 -- doctor", "and has no port"),
        ("--nprocs 2 --nodes 2 --node-rank 0 --coordinator n1 -- doctor", "and has no port"),
        ("--nprocs 2 missing.py", "there is no file `missing.py`"),
        ("--nprocs 2 -- launch --nprocs 2 -- doctor", "cannot launch a launch"),
        ("--nprocs 2 -- train --multirun training.steps=1,2", "a sweep cannot be launched"),
    ],
)
def test_mistakes_are_named(words, message):
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        parse_launch(words.split())
