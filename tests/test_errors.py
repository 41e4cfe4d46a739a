"""The error family: what is wrong, why, what to write instead."""

import pytest

from meshwright.errors import (
    CheckFailed,
    EnvironmentProblem,
    ExitCode,
    MeshwrightError,
    UserError,
    did_you_mean,
    first_line,
    missing_package,
    typed_line,
)


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
        "INTERNAL": 70,
        "PREEMPTED": 75,
    }


def test_nearest_word_is_suggested_and_a_far_one_is_not():
    assert did_you_mean("micro_batchsize", ["steps", "micro_batch_size"]) == (
        "did you mean `micro_batch_size`?"
    )
    assert did_you_mean("zzz", ["steps", "micro_batch_size"]) == ""
    assert did_you_mean("", []) == ""


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
