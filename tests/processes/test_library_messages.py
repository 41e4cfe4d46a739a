"""Messages of libraries about other processes, as they were captured, are recognized."""

import pytest
from library_samples import CRASH, LOST_TASKS

from meshwright.errors import EnvironmentProblem, LostPeer
from meshwright.processes import library_messages as messages


class JaxRuntimeError(RuntimeError):
    """Named as JAX names it."""


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (
            # As jax 0.10 raises it where a result is read.
            ValueError(
                "UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:547] "
                "Connection closed by peer [127.0.0.1]:18337"
            ),
            True,
        ),
        (JaxRuntimeError("Gloo all-reduce failed: Connection reset by peer"), True),
        (JaxRuntimeError("NCCL operation ncclAllReduce failed: remote error"), True),
        (JaxRuntimeError("UNAVAILABLE: failed to connect to all addresses"), True),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), False),
        (LostPeer("process 1 lost process 0"), True),
        (EnvironmentProblem("the disk has no peer"), False),
        (ValueError("peer"), False),
    ],
)
def test_errors_about_a_lost_peer_are_told_from_others(error, lost):
    assert messages.is_lost_peer(error) == lost


def test_gloo_says_that_it_has_connected():
    line = b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is"
    assert line.startswith(messages.GLOO_CONNECTED)


def test_every_line_of_a_crash_is_the_end_or_a_dump():
    lines = CRASH.encode().splitlines()
    assert sum(messages.TERMINATED in line for line in lines) == 1
    assert all(messages.CRASH_DUMP.match(line) for line in lines if line.strip())


def test_lines_after_silent_tasks_are_numbers_or_advice():
    lines = LOST_TASKS.encode().splitlines(keepends=True)
    at = [number for number, line in enumerate(lines) if messages.SILENT in line]
    assert len(at) == 2
    for number in at:
        assert all(map(messages.SILENT_NUMBERS.match, lines[number + 1 : number + 3]))


@pytest.mark.parametrize(
    ("line", "is_end"),
    [
        (b"ValueError: the label file has no row 17\n", True),
        (b"jaxlib._jax.XlaRuntimeError: INTERNAL: no\n", True),
        (b"meshwright.errors.UserError: the mesh does not match the 4 devices\n", True),
        (b"train   20/500  loss 2.1\n", False),
        (b'  File "work.py", line 3, in <module>\n', False),
    ],
)
def test_the_end_of_a_traceback_says_what_was_raised(line, is_end):
    assert bool(messages.TRACEBACK_END.match(line)) == is_end
