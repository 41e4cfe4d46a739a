"""The error family: what is wrong, why, what to write instead."""

import errno

import pytest

from meshwright.errors import (
    ANY,
    CheckFailed,
    EnvironmentProblem,
    ExitCode,
    MeshwrightError,
    Setting,
    Spelling,
    UserError,
    did_you_mean,
    explain_input,
    first_line,
    missing_package,
    spelled_for,
    typed_line,
)

pytestmark = pytest.mark.quick


def test_message_holds_what_why_and_fix_in_this_order():
    error = UserError("the mesh is wrong", why="2 × 3 = 6, not 8", fix="write 2 × 4")
    assert str(error) == "the mesh is wrong\n2 × 3 = 6, not 8\nwrite 2 × 4"
    assert (error.what, error.why, error.fix) == tuple(str(error).splitlines())


def test_parts_left_out_leave_no_empty_lines():
    assert str(UserError("wrong")) == "wrong"
    assert str(UserError("wrong", fix="right")) == "wrong\nright"


def test_user_errors_are_value_errors_and_environment_problems_are_not():
    assert issubclass(UserError, ValueError)
    assert issubclass(EnvironmentProblem, RuntimeError)
    assert not issubclass(EnvironmentProblem, ValueError)


@pytest.mark.parametrize(
    ("family", "code"),
    [(UserError, 2), (CheckFailed, 1), (EnvironmentProblem, 1), (MeshwrightError, 70)],
)
def test_each_kind_of_error_has_its_exit_code(family, code):
    assert family("x").exit_code == code


def test_exit_codes_are_those_the_command_line_promises():
    assert {c.name: int(c) for c in ExitCode} == {
        "DONE": 0,
        "CHECK_FAILED": 1,
        "BAD_INPUT": 2,
        "NOTHING_FITS": 3,
        "NOT_FINITE": 4,
        "INTERNAL": 70,
        "PREEMPTED": 75,
    }


def test_nearest_word_is_suggested_and_a_far_one_is_not():
    assert did_you_mean("micro_batchsize", ["steps", "micro_batch_size"]) == (
        "did you mean `micro_batch_size`?"
    )
    assert did_you_mean("zzz", ["steps", "micro_batch_size"]) == ""
    assert did_you_mean("", []) == ""
    assert did_you_mean("step", ["steps"], "training") == "did you mean `training.steps`?"


@pytest.mark.parametrize(
    ("setting", "on_command_line", "in_python"),
    [
        (Setting("training.steps", 10), "training.steps=10", "steps=10"),
        (Setting("training.global_batch_size"), "training.global_batch_size", "batch_size"),
        (
            Setting("pipeline.num_microbatches", 4, 8),
            "pipeline.num_microbatches=4 or 8",
            "num_microbatches=4 or 8",
        ),
        (Setting("pipeline.schedule", "1f1b"), "pipeline.schedule=1f1b", 'schedule="1f1b"'),
        (Setting("pipeline.num_chunks", None), "pipeline.num_chunks=null", "num_chunks=None"),
        (Setting("mesh.pipe", 2), "mesh.pipe=2", 'mesh="pipe=2"'),
        (Setting("mesh.pipe"), "mesh.pipe", "pipe"),
        (Setting("sharding.zero", 1), "sharding.zero=1", "sharding=mw.ShardingConfig(zero=1)"),
        (Setting("sharding.rules"), "sharding.rules", "sharding=mw.ShardingConfig(rules=…)"),
        (
            Setting("checkpoint.enabled", False),
            "checkpoint.enabled=false",
            "checkpoint=mw.CheckpointConfig(enabled=False)",
        ),
        (Setting("hydra.run.dir", ANY), "hydra.run.dir=…", "run_dir=…"),
        (Setting("resume", "auto"), "resume=auto", 'resume="auto"'),
        (Setting("simulate", 8), "simulate=8", "mw.simulate_devices(8) before JAX starts"),
    ],
)
def test_a_setting_is_spelled_for_its_reader(setting, on_command_line, in_python):
    assert str(setting) == in_python
    with spelled_for(Spelling.COMMAND_LINE):
        assert str(setting) == on_command_line
    assert f"write {setting}" == f"write {in_python}"


@pytest.mark.parametrize(
    ("error", "line", "typed"),
    [
        (ValueError("one\ntwo"), "one", "ValueError: one"),
        (RuntimeError("\n  spaced  \nrest"), "spaced", "RuntimeError: spaced"),
        (KeyError(), "KeyError", "KeyError"),
        (OSError(" \n"), "OSError", "OSError"),
    ],
)
def test_an_exception_in_one_line(error, line, typed):
    assert first_line(error) == line
    assert typed_line(error) == typed


def test_a_missing_package_names_the_extra_that_brings_it():
    error = missing_package("data=parquet", "pyarrow", "parquet")
    assert str(error).splitlines() == [
        "data=parquet needs the package pyarrow",
        "it is not installed",
        "pip install 'meshwright[parquet]'",
    ]


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300), UserError, "x…"),
        (PermissionError(errno.EACCES, "Permission denied", b"/data/b"), UserError, "/data/b"),
        (OSError(errno.ENOSPC, "No space left on device"), EnvironmentProblem, "a file"),
        (RecursionError("maximum recursion depth exceeded"), UserError, "nested too deeply"),
    ],
    ids=str,
)
def test_what_the_input_or_the_disk_causes_is_no_internal_error(error, kind, said):
    found = explain_input(error)
    assert type(found) is kind
    assert said in found.what
    assert len(found.what) < 140
    assert found.why


def test_other_errors_are_internal():
    assert explain_input(ValueError("x")) is None
    assert explain_input(OSError("x")) is None
