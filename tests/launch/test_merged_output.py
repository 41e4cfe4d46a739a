"""What a reader sees of several processes."""

import io

from meshwright.launch.merged_output import MergedOutput


def shown(*outputs: str) -> list[str]:
    target = io.BytesIO()
    lines = MergedOutput(target)
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
    dump = """\
W1115 05:35:24.071630    4137 preemption_sync_manager.cc:147] Failed to retrieve preemption notice
Additional GRPC error information from remote target coordination_service while calling /xla:
:UNKNOWN:Error received from peer  {grpc_status:14}
E1115 05:35:24.071724    4137 coordination_service_agent.cc:289] Polled an error
F1115 05:35:24.071730    4137 client.h:80] Terminating process because the JAX distributed \
service detected fatal errors. This most likely indicates that another task died; see the others
*** Check failure stack trace: ***
    @     0xffff945b4d50  absl::lts_20260107::log_internal::LogMessage::SendToLog()
"""
    assert shown("step 3\n" + dump) == [
        "[0] step 3",
        "[0] lost its connection to the other processes",
    ]


def test_a_lost_connection_is_told_after_the_error_of_the_process_that_is_gone():
    lost = "error: process 0 lost its connection to another process\n  Gloo: reset by peer\n"
    assert shown(lost + "more\n", "error: disk full\n") == [
        "[0] more",
        "[1] error: disk full",
        "[0] error: process 0 lost its connection to another process",
        "[0]   Gloo: reset by peer",
    ]


def test_causes_are_remembered():
    lines = MergedOutput(io.BytesIO())
    lines.pump(0, io.BytesIO(b"train   20/500  loss 2.1\nerror: a\nerror: b\n"))
    lines.pump(1, io.BytesIO(b"Traceback (most recent call last):\njax.errors.SomeError: no\n"))
    assert lines.causes == {0: "a", 1: "jax.errors.SomeError: no"}


def test_a_reader_who_left_does_not_stop_the_processes():
    class Gone(io.RawIOBase):
        def write(self, data):
            raise BrokenPipeError

    source = io.BytesIO(b"a\nb\n")
    MergedOutput(Gone()).pump(0, source)
    assert source.read() == b""
