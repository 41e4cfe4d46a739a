"""What a reader sees of several processes."""

import io

import pytest
from library_samples import CRASH, LOST_TASKS

from meshwright.launch.merged_output import MergedOutput
from meshwright.runtime.attempts import Report

pytestmark = pytest.mark.quick


def shown(*outputs: str, reports: dict[int, Report] | None = None) -> list[str]:
    target = io.BytesIO()
    lines = MergedOutput(target, lambda rank: (reports or {}).get(rank, Report()))
    for rank, text in enumerate(outputs):
        lines.pump(rank, io.BytesIO(text.encode()))
    lines.release()
    return target.getvalue().decode().splitlines()


def test_every_line_names_its_process():
    assert shown("one\ntwo", "three\n") == ["[0] one", "[0] two", "[1] three"]


def test_an_error_all_report_is_shown_once_with_its_explanation():
    error = "error: 3 does not divide 8\n  because 8 = 2 × 4\n  write 4\n"
    assert shown(error, error, "start\n" + error + "end\n") == [
        "[0] error: 3 does not divide 8",
        "[0]   because 8 = 2 × 4",
        "[0]   write 4",
        "[2] start",
        "[2] end",
    ]


def test_an_error_of_one_process_alone_is_not_lost():
    assert shown("error: a\n", "error: b\n  why\n")[1:] == ["[1] error: b", "[1]   why"]


def test_other_lines_may_repeat_and_greetings_are_left_out():
    text = "step 1\nstep 1\n[Gloo] Rank 0 is connected to 3 peer ranks.\n"
    assert shown(text, text) == ["[0] step 1"] * 2 + ["[1] step 1"] * 2


def test_lost_peers_are_one_line_instead_of_pages():
    assert shown("step 3\n" + CRASH, "error: no\n") == [
        "[0] step 3",
        "[1] error: no",
        "[0] lost its connection to the other processes",
    ]


def test_what_a_process_says_after_it_lost_another_comes_after_the_error_of_that_one():
    lost = "error: process 0 lost its connection to another process\n  Gloo: reset by peer\n"
    assert shown(lost, "error: disk full\n", reports={0: Report(lost_peer=True)}) == [
        "[1] error: disk full",
        "[0] error: process 0 lost its connection to another process",
        "[0]   Gloo: reset by peer",
    ]


def test_causes_are_reported_or_raised():
    reports = {0: Report(error="a"), 3: Report(error="the disk is full")}
    lines = MergedOutput(io.BytesIO(), lambda rank: reports.get(rank, Report()))
    lines.pump(0, io.BytesIO(b"train   20/500  loss 2.1\nerror: a\nerror: b\n"))
    lines.pump(1, io.BytesIO(b"Traceback (most recent call last):\njax.errors.SomeError: no\n"))
    lines.pump(2, io.BytesIO(b"error: printed by a script\n"))
    # It had failed before JAX ended it.
    lines.pump(3, io.BytesIO(CRASH.encode()))
    assert [lines.cause(n) for n in range(3)] == ["a", "jax.errors.SomeError: no", ""]
    assert not lines.is_left_behind(3)


def test_processes_that_the_coordinator_misses_are_remembered():
    lines = MergedOutput(io.BytesIO())
    lines.pump(0, io.BytesIO(LOST_TASKS.encode()))
    assert lines.silent == {1, 3}
    assert lines.is_left_behind(0)


def test_a_reader_who_left_does_not_stop_the_processes():
    class Gone(io.RawIOBase):
        def write(self, data):
            raise BrokenPipeError

    source = io.BytesIO(b"a\nb\n")
    MergedOutput(Gone()).pump(0, source)
    assert source.read() == b""
