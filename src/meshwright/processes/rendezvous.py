"""The rendezvous: processes meet on the coordinator's port before JAX listens there.

JAX ends a process in native code, after minutes, if one is missing or the port is taken. Here
process 0 listens first, the others introduce themselves, and all processes name those that
are missing. Once all are there, process 0 closes the port and JAX's service opens it again; no
second port is needed.

A message is a line of JSON. A process says who it is; process 0 answers that it should wait, and
then that all may go, or what is wrong.
"""

import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from meshwright.errors import EnvironmentProblem, MeshwrightError, UserError
from meshwright.processes.ports import EVERYWHERE, Address, check_own_name, listen, resolve, send
from meshwright.text.json_text import parse_object
from meshwright.text.units import numbered

MAX_MESSAGE = 4096
"""Bytes; a client that sends more is not one of our processes."""
ANSWER_SECONDS = 10.0
"""How long process 0 may take to answer a process that has connected."""
START_SECONDS = 60.0
"""How long JAX may take to open the port once all are there."""
NOTICE_SECONDS = 10.0
"""Seconds after which process 0 says whom it is waiting for."""


Noun = Literal["process", "machine"]


@dataclass(frozen=True)
class Member:
    """A process as it introduces itself: its number, and how many there are as far as it knows.

    ``run`` is what the processes of its run share; ``pid`` is its number on its machine.
    """

    process: int
    count: int
    run: str = ""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)


@dataclass(frozen=True)
class Meeting:
    """Where and how long processes, or machines before they start processes, wait for each other.

    The others reach process 0 at the address; it listens on the interface. ``least`` are enough
    once the time is over, and ``expected`` are waited for; by default all. ``notify`` is called
    with a line when waiting takes long.
    """

    address: Address
    seconds: float
    interface: str = EVERYWHERE
    notify: Callable[[str], None] = lambda _: None
    noun: Noun = "process"
    least: int | None = None
    expected: frozenset[int] | None = None

    @property
    def greeting(self) -> dict[str, str | int]:
        """What distinguishes members of this meeting from others that connect to the port."""
        return {"meshwright": 1 if self.noun == "process" else self.noun}


class MissingMembers(EnvironmentProblem):
    """The members of these numbers did not join in time."""

    def __init__(self, what: str, *, numbers: Iterable[int], why: str = "", fix: str = "") -> None:
        super().__init__(what, why=why, fix=fix)
        self.numbers = tuple(numbers)


def meet(me: Member, meeting: Meeting) -> socket.socket | None:
    """Return once all processes are there; wrong numbers, a taken port or no answer are errors.

    In process 0, the socket keeps the port from others until JAX has opened it.
    """
    if me.process:
        _join(me, meeting)
        _wait_for_service(meeting.address)
        return None
    kept, _ = _host(me, meeting, lambda joined: joined)
    return kept


def call_roll(me: Member, meeting: Meeting, choose: Callable[[list[int]], list[int]]) -> list[int]:
    """Return the numbers of those that take part, the same for all, once the meeting is over.

    Members are machines here. Number 0 chooses among those that have come.
    """
    if me.process:
        return _join(me, meeting)
    kept, chosen = _host(me, meeting, choose)
    if kept is not None:
        kept.close()
    return chosen


def _host(
    me: Member, meeting: Meeting, choose: Callable[[list[int]], list[int]]
) -> tuple[socket.socket | None, list[int]]:
    """Collect the others, and tell them who takes part."""
    check_own_name(meeting.address)
    listener, kept = listen(meeting.address, meeting.interface)
    try:
        with listener:
            host = _Host(me, meeting, listener)
            chosen = choose(host.gather())
        # The port is closed before the others continue.
        host.tell_all({"go": chosen})
    except BaseException:
        if kept is not None:
            kept.close()
        raise
    return kept, chosen


class _Host:
    """Number 0: collects the others."""

    def __init__(self, me: Member, meeting: Meeting, listener: socket.socket) -> None:
        self._me, self._meeting = me, meeting
        self._members: dict[socket.socket, Member] = {}
        self._texts: dict[socket.socket, bytes] = {}
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._until = time.monotonic() + meeting.seconds

    def gather(self) -> list[int]:
        """Wait until all are there that are expected; return who is."""
        notice = time.monotonic() + NOTICE_SECONDS
        expected = self._meeting.expected or set(range(self._me.count))
        while not expected <= set(self._joined()):
            left = self._until - time.monotonic()
            if left <= 0:
                if len(self._joined()) >= (self._meeting.least or self._me.count):
                    break
                self._fail(_missing(self._me.count, self._joined(), self._meeting))
            for key, _ in self._selector.select(min(left, 0.5)):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._read(key.fileobj)
            if time.monotonic() > notice:
                notice = float("inf")
                self._meeting.notify(self._waiting())
        return self._joined()

    def _waiting(self) -> str:
        joined, count, noun = self._joined(), self._me.count, self._meeting.noun
        absent = numbered(noun, [number for number in range(count) if number not in joined])
        return f"waiting for {absent}: {len(joined)} of {count} {_plural(noun)} have joined"

    def tell_all(self, message: dict[str, Any]) -> None:
        """Send a message to all and close the connections."""
        for connection in self._members:
            send(connection, message)
        for connection in [*self._members, *self._texts]:
            connection.close()
        self._selector.close()

    def _joined(self) -> list[int]:
        return sorted([0, *(member.process for member in self._members.values())])

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # Whoever connected is gone already.
            return
        connection.setblocking(False)
        self._texts[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        try:
            received = connection.recv(MAX_MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._drop(connection)
            return
        if connection in self._members:
            return
        text = self._texts[connection] + received
        self._texts[connection] = text
        if b"\n" in text or len(text) > MAX_MESSAGE:
            self._introduce(connection, text)

    def _introduce(self, connection: socket.socket, text: bytes) -> None:
        member = _read_member(text, self._meeting)
        if member is None:
            self._drop(connection)
            return
        if "" not in (member.run, self._me.run) and member.run != self._me.run:
            send(connection, {"other_run": self._me.run})
            self._drop(connection)
            return
        self._check(member)
        del self._texts[connection]
        self._members[connection] = member
        send(connection, {"wait": self._until - time.monotonic()})

    def _check(self, member: Member) -> None:
        """Refuse a process with which the run cannot start, in all processes."""
        if member.count != self._me.count:
            self._fail(_other_count(self._me, member, self._meeting.noun))
        for connection, other in list(self._members.items()):
            if (other.process, other.host, other.pid) == (member.process, member.host, member.pid):
                # It has connected again.
                self._drop(connection)
            elif other.process == member.process:
                self._fail(_same_number(other, member, self._meeting.noun))
        if not 0 < member.process < self._me.count:
            self._fail(_same_number(self._me, member, self._meeting.noun))

    def _fail(self, error: MeshwrightError) -> None:
        kind = "user" if isinstance(error, UserError) else "environment"
        message: dict[str, Any] = {"error": [kind, error.what, error.why, error.fix]}
        if isinstance(error, MissingMembers):
            message["absent"] = error.numbers
        for connection in self._texts:
            send(connection, message)
        self.tell_all(message)
        raise error

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._members.pop(connection, None)
        self._texts.pop(connection, None)
        connection.close()


def _join(me: Member, meeting: Meeting) -> list[int]:
    """Introduce this member to number 0, again and again until it answers who takes part."""
    until = time.monotonic() + meeting.seconds
    reason = ""
    while True:
        left = until - time.monotonic()
        if left <= 0:
            raise _unreachable(me, meeting, reason)
        answer = _try_to_join(me, meeting, left)
        if not isinstance(answer, str):
            return answer
        reason = answer
        time.sleep(min(0.2, max(left, 0)))


def _try_to_join(me: Member, meeting: Meeting, left: float) -> list[int] | str:
    """Wait at number 0 until all may go; return who takes part, or why it did not work."""
    address = meeting.address
    try:
        with socket.create_connection((address.host, address.port), min(left, 5.0)) as connection:
            send(connection, {**meeting.greeting, **asdict(me)})
            return _wait_for_answer(connection, meeting)
    except TimeoutError:
        return f"no answer from {address}: a firewall, or a machine that is off"
    except ConnectionRefusedError:
        return f"nothing listens on {address}"
    except (OSError, UnicodeError) as error:
        if not resolve(address.host):
            return f"the host name `{address.host}` cannot be resolved"
        return getattr(error, "strerror", None) or str(error)


def _wait_for_answer(connection: socket.socket, meeting: Meeting) -> list[int] | str:
    address, zero = meeting.address, f"{meeting.noun} 0"
    strange = f"what listens on {address} is not {zero} of a Meshwright run"
    connection.settimeout(ANSWER_SECONDS)
    with connection.makefile("rb") as lines:
        while True:
            try:
                line = lines.readline(MAX_MESSAGE)
            except TimeoutError:
                return strange
            if not line:
                return f"{zero} on {address} ended, or refused this {meeting.noun}"
            message = parse_object(line)
            if "wait" in message:
                # Process 0 decides; it only does not if its machine is gone.
                connection.settimeout(float(message["wait"]) + ANSWER_SECONDS)
            elif "other_run" in message:
                return f"{zero} on {address} belongs to another run, {message['other_run']}"
            elif "error" in message:
                raise _remote_error(message)
            elif isinstance(message.get("go"), list):
                return [int(number) for number in message["go"]]
            else:
                return strange


def _wait_for_service(address: Address) -> None:
    """Wait until JAX's service listens: a client that comes too early waits for a second."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        try:
            socket.create_connection((address.host, address.port), 5.0).close()
        except OSError:
            time.sleep(0.01)
        else:
            return
    raise EnvironmentProblem(
        f"process 0 did not start JAX's service on {address} within {START_SECONDS:g} s",
        fix="look at the output of process 0",
    )


def _read_member(text: bytes, meeting: Meeting) -> Member | None:
    message = parse_object(text.partition(b"\n")[0])
    if message.get("meshwright") != meeting.greeting["meshwright"]:
        return None
    try:
        return Member(
            process=int(message["process"]),
            count=int(message["count"]),
            run=str(message["run"]),
            host=str(message["host"]),
            pid=int(message["pid"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _remote_error(message: dict[str, Any]) -> MeshwrightError:
    kind, what, why, fix = map(str, message["error"])
    if "absent" in message:
        return MissingMembers(what, numbers=map(int, message["absent"]), why=why, fix=fix)
    return (UserError if kind == "user" else EnvironmentProblem)(what, why=why, fix=fix)


def _plural(noun: Noun) -> str:
    return "processes" if noun == "process" else f"{noun}s"


def _missing(count: int, joined: list[int], meeting: Meeting) -> MissingMembers:
    numbers = tuple(number for number in range(count) if number not in joined)
    absent = numbered(meeting.noun, numbers)
    least = "" if meeting.least is None else f", and at least {meeting.least} are needed"
    return MissingMembers(
        f"{len(joined)} of {count} {_plural(meeting.noun)} joined, missing {absent} after "
        f"{meeting.seconds:g} s{least}",
        numbers=numbers,
        why=f"{meeting.noun} 0 waited on {meeting.address}",
        fix=f"look at the output of {absent}: not started, stopped, or unable to reach "
        "that address; if it only needs longer, write --join-timeout SECONDS or "
        "MESHWRIGHT_JOIN_TIMEOUT=SECONDS",
    )


def _unreachable(me: Member, meeting: Meeting, reason: str) -> EnvironmentProblem:
    noun = meeting.noun
    return EnvironmentProblem(
        f"{noun} {me.process} of {me.count} cannot join {noun} 0 at {meeting.address} within "
        f"{meeting.seconds:g} s",
        why=reason,
        fix=f"check the address of {noun} 0 (--coordinator, MASTER_ADDR and MASTER_PORT), that "
        f"{noun} 0 runs, and that this machine may connect to it",
    )


def _other_count(host: Member, member: Member, noun: Noun) -> UserError:
    return UserError(
        f"{noun} {member.process} is one of {member.count} {_plural(noun)}, and {noun} 0 is one of "
        f"{host.count}",
        why=f"{noun} {member.process} runs on {member.host}, {noun} 0 on {host.host}",
        fix=f"give every {noun} the same number of {_plural(noun)}: --nodes and --nprocs, or "
        "WORLD_SIZE",
    )


def _same_number(first: Member, second: Member, noun: Noun) -> UserError:
    return UserError(
        f"two {_plural(noun)} have the number {second.process} of {first.count}"
        if first.process == second.process
        else f"{noun} {second.process} of {first.count} does not exist",
        why=f"one is process {first.pid} on {first.host}, the other {second.pid} on {second.host}"
        if first.process == second.process
        else f"it is process {second.pid} on {second.host}",
        fix=f"number the {_plural(noun)} from 0 to {first.count - 1}: --node-rank, RANK, "
        "JAX_PROCESS_ID",
    )
