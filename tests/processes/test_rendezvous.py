"""Processes meet before JAX connects them; who is missing or wrong is named in all of them."""

import json
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from real_processes import free_port

from meshwright.errors import EnvironmentProblem, MeshwrightError, UserError
from meshwright.processes.ports import Address
from meshwright.processes.rendezvous import Meeting, Member, call_roll, meet


def attend(port: int, member: Member, seconds: float = 1.0, notices=None) -> str:
    """Return "" once all have met, or the message; process 0 then opens the port, as JAX would."""
    notify = (lambda _: None) if notices is None else notices.append
    meeting = Meeting(Address("127.0.0.1", port), seconds, "127.0.0.1", notify)
    try:
        kept = meet(member, meeting)
    except MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    if kept is not None:
        with kept:
            service = socket.create_server(("127.0.0.1", port), reuse_port=True)
        # Open until the others have seen it.
        threading.Timer(2.0, service.close).start()
    return ""


def attend_all(*members: Member, seconds: float = 1.0, delay: float = 0.0) -> list[str]:
    port = free_port()
    with ThreadPoolExecutor(len(members)) as threads:
        waiting = []
        for member in members:
            waiting.append(threads.submit(attend, port, member, seconds))
            time.sleep(delay)
        return [each.result(30) for each in waiting]


def test_all_go_once_all_are_there():
    assert attend_all(*(Member(n, 4, pid=n) for n in range(4)), seconds=20) == [""] * 4


def test_the_order_in_which_they_come_does_not_matter():
    members = [Member(n, 3, pid=n) for n in (2, 1, 0)]
    assert attend_all(*members, seconds=20, delay=0.3) == [""] * 3


def test_who_is_missing_is_named_in_every_process_that_is_there():
    began = time.monotonic()
    said = attend_all(Member(0, 4), Member(1, 4, pid=1), seconds=1)
    assert time.monotonic() - began < 5
    for text in said:
        assert text.startswith(
            "MissingMembers: 2 of 4 processes joined, missing processes 2, 3 after 1 s\n"
        )
        assert "--join-timeout" in text


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (Member(1, 8), "UserError: process 1 is one of 8 processes, and process 0 is one of 3"),
        (Member(7, 3), "UserError: process 7 of 3 does not exist"),
    ],
)
def test_a_process_that_does_not_fit_ends_all(member, message):
    said = attend_all(Member(0, 3), member)
    assert all(text.startswith(message) for text in said)


def test_two_processes_with_one_number_are_told_apart_by_their_machines():
    members = [Member(0, 3), Member(1, 3, host="a", pid=5), Member(1, 3, host="b", pid=6)]
    said = attend_all(*members, delay=0.2)
    expected = "UserError: two processes have the number 1 of 3\none is process 5 on a, the other 6"
    assert all(text.startswith(expected) for text in said)


def test_a_process_of_another_run_is_turned_away():
    port = free_port()
    with ThreadPoolExecutor(3) as threads:
        run = [threads.submit(attend, port, Member(n, 2, "mine", pid=n), 20) for n in (0,)]
        stray = attend(port, Member(1, 2, "other", pid=9), 1)
        run += [threads.submit(attend, port, Member(1, 2, "mine", pid=1), 20)]
        assert [each.result(30) for each in run] == ["", ""]
    assert "belongs to another run, mine" in stray


def test_whoever_else_connects_does_not_disturb():
    port = free_port()
    with ThreadPoolExecutor(2) as threads:
        host = threads.submit(attend, port, Member(0, 2), 20)
        time.sleep(0.2)
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
        strangers[1].sendall(json.dumps({"meshwright": 1, "process": []}).encode() + b"\n")
        assert attend(port, Member(1, 2, pid=1), 20) == host.result(30) == ""
        for stranger in strangers:
            stranger.close()


def test_a_process_that_leaves_is_missing_again():
    port = free_port()
    with ThreadPoolExecutor(1) as threads:
        host = threads.submit(attend, port, Member(0, 3), 1.0)
        time.sleep(0.2)
        with socket.create_connection(("127.0.0.1", port)) as gone:
            told = {"meshwright": 1, **vars(Member(1, 3, pid=1))}
            gone.sendall(json.dumps(told).encode() + b"\n")
            assert b"wait" in gone.recv(100)
            time.sleep(0.1)
            gone.close()
        assert "1 of 3 processes joined, missing processes 1, 2" in host.result(30)


def test_the_reason_is_told_where_process_0_cannot_be_reached():
    nobody = attend(free_port(), Member(1, 2), 0.5)
    assert nobody.startswith("EnvironmentProblem: process 1 of 2 cannot join process 0 at 127.0.0")
    assert "nothing listens on 127.0.0.1" in nobody
    with pytest.raises(EnvironmentProblem, match=r"`no\.invalid` cannot be resolved"):
        meet(Member(1, 2), Meeting(Address("no.invalid", 29500), 0.5))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        threading.Thread(target=lambda: silent.accept()[0].sendall(b"hi\n"), daemon=True).start()
        assert "is not process 0 of a Meshwright run" in attend(port, Member(1, 2), 0.2)


def test_a_port_that_is_taken_names_its_holder():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port}.*is taken") as caught:
            meet(Member(0, 2), Meeting(Address("127.0.0.1", port), 1.0, "127.0.0.1"))
    assert f"process {Member(0, 2).pid} listens there: " in caught.value.why
    assert sys.executable in caught.value.why


def test_process_0_notices_at_once_that_its_name_is_wrong(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"host name `no\.invalid` of process 0 cannot be resolved"):
        meet(Member(0, 2), Meeting(Address("no.invalid", 29500), 300.0))
    assert time.monotonic() - began < 20


def call(port: int, number: int, **more) -> list[int] | str:
    """Take part in the roll call of four machines; number 0 chooses all that have come."""
    meeting = Meeting(Address("127.0.0.1", port), 1.0, "127.0.0.1", noun="machine", least=2, **more)
    try:
        return call_roll(Member(number, 4, pid=number), meeting, lambda joined: joined)
    except MeshwrightError as error:
        return str(error)


def roll_call(numbers: tuple[int, ...], **more) -> list[list[int] | str]:
    port = free_port()
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(call, port, number, **more) for number in numbers]
        return [each.result(30) for each in waiting]


def test_a_roll_call_ends_without_those_that_do_not_come():
    assert roll_call((0, 3)) == [[0, 3]] * 2


def test_a_roll_call_waits_for_those_that_are_expected_only():
    began = time.monotonic()
    assert roll_call((1, 0), expected=frozenset({0, 1})) == [[0, 1]] * 2
    assert time.monotonic() - began < 0.9


def test_a_roll_call_of_too_few_says_who_is_missing():
    (text,) = roll_call((0,))
    assert isinstance(text, str)
    assert text.startswith(
        "1 of 4 machines joined, missing machines 1, 2, 3 after 1 s, and at least 2 are needed"
    )


def test_a_machine_that_comes_late_does_not_disturb_processes_that_meet():
    port = free_port()
    with ThreadPoolExecutor(3) as threads:
        late = threads.submit(call, port, 1)
        members = [threads.submit(attend, port, Member(n, 2, pid=n), 5.0) for n in (0, 1)]
        assert [each.result(30) for each in members] == ["", ""]
        assert "machine 1 of 4 cannot join machine 0" in str(late.result(30))
