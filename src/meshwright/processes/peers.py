"""Who is lost in a group of processes that no launcher of ours watches.

JAX would end all of them in native code, with a dump that names none. Every process keeps a
connection to process 0, which the system closes when one of the two ends; process 0 tells the rest.
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from meshwright.errors import ExitCode, LostPeer
from meshwright.processes.ports import EVERYWHERE, Address, send
from meshwright.runtime.heartbeat import own_heartbeat
from meshwright.runtime.jax_internals import distributed_state
from meshwright.text.json_text import parse_json

KEY = "meshwright-peers"
CONNECT_SECONDS = 20.0
MAX_LINE = 4096
TELL_SECONDS = 1.0
"""How long the main thread has to notice and tell the loss itself."""
LEAVE_SECONDS = 5.0
"""How long a process may take to end by itself once it knows that another is lost."""
DUMP_SECONDS = 2.0
"""How long JAX's own end is held up for the name of the lost process."""
REMEDY = (
    "start all processes again with the same command: the run goes on from its last checkpoint; "
    "under `meshwright launch --restarts N` that happens by itself"
)


class Lost(NamedTuple):
    """The number of a lost process, and what it said last; empty if it said nothing."""

    process: int
    why: str = ""

    def error(self) -> LostPeer:
        """Return the error of this process: who is lost, at which step, why, and what to do."""
        step, me = own_heartbeat().step, distributed_state().process_id
        who = "another process" if self.process < 0 else f"process {self.process}"
        who += " (the coordinator)" if self.process == 0 else ""
        return LostPeer(
            f"process {me} lost {who}" + (f" at step {step}" if step else ""),
            why=self.why or "it was killed or crashed, or its machine is gone",
            fix=REMEDY,
        )


class PeerWatch:
    """Notices that another process of the group is gone, in a thread for each connection.

    ``on_lost`` is called once, in a thread, with the process that is lost.
    """

    def __init__(self, me: int, on_lost: Callable[[Lost], None]) -> None:
        self._me, self._on_lost = me, on_lost
        self._connections: dict[socket.socket, int] = {}
        self._gone: set[int] = set()
        self.left = False
        self.lost: Lost | None = None

    def host(self, interface: str) -> tuple[int, str]:
        """Listen in process 0; return the port, and the word that the others have to say."""
        both = interface == EVERYWHERE and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if ":" in interface else socket.AF_INET
        listener = socket.create_server(
            (interface.strip("[]"), 0), family=family, dualstack_ipv6=both
        )
        word = secrets.token_hex(16)

        def accept() -> None:
            while True:
                connection, _ = listener.accept()
                _start(lambda connection=connection: self._follow(connection, None, word))

        _start(accept)
        return listener.getsockname()[1], word

    def join(self, host: str, port: int, word: str) -> None:
        """Connect to process 0."""
        connection = socket.create_connection((host.strip("[]"), port), CONNECT_SECONDS)
        connection.settimeout(None)
        self._connections[connection] = 0
        send(connection, {"word": word, "process": self._me})
        _start(lambda: self._follow(connection, 0))

    def leave(self, why: str = "") -> None:
        """Say goodbye, or why this process fails; safe to call again."""
        if not self.left:
            self.left = True
            for connection in list(self._connections):
                send(connection, {"leaves": self._me, "why": why})

    def _follow(self, connection: socket.socket, process: int | None, word: str = "") -> None:
        """Read what a process says until it is gone; one that does not know the word is nobody."""
        with suppress(OSError, KeyError, ValueError), connection, connection.makefile("rb") as said:
            while isinstance(message := parse_json(said.readline(MAX_LINE)), dict):
                if process is not None:
                    self._heard(message)
                elif message.get("word") == word:
                    process = self._connections[connection] = int(message["process"])
                else:
                    break
        if process is not None and process not in self._gone and not self.left:
            self._lose(Lost(process))

    def _heard(self, message: dict[str, Any]) -> None:
        why = str(message.get("why", ""))
        if "lost" in message:
            self._lose(Lost(int(message["lost"]), why))
        if "leaves" in message:
            self._gone.add(int(message["leaves"]))
            if why and not self.left:
                self._lose(Lost(int(message["leaves"]), why))

    def _lose(self, lost: Lost) -> None:
        if self.lost is not None:
            return
        self.lost = lost
        for connection, process in list(self._connections.items()):
            if process != lost.process:
                send(connection, {"lost": lost.process, "why": lost.why})
        self._on_lost(lost)


def _start(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="peers", daemon=True).start()


class _Own:
    watch: PeerWatch | None = None
    told = threading.Lock()


def watch_peers(me: int, address: Address, interface: str = EVERYWHERE) -> None:
    """Begin to watch the others, once JAX has connected them; without a connection, nothing."""
    client: Any = distributed_state().client
    watch = PeerWatch(me, tell_and_leave)
    try:
        if me == 0:
            client.key_value_set(KEY, json.dumps(watch.host(interface)))
        else:
            port, word = json.loads(client.blocking_key_value_get(KEY, int(CONNECT_SECONDS * 1000)))
            watch.join(address.host, port, word)
    except (OSError, RuntimeError, ValueError):
        # Only this port may be closed between the machines; JAX's is not.
        return
    _Own.watch = watch


def leave_peers(why: str = "") -> None:
    """Tell the others that this process ends, and why if it fails."""
    if _Own.watch is not None:
        _Own.watch.leave(why)


def leave_at_exit() -> None:
    """Say goodbye; after an exception, end without JAX, which would wait for the others."""
    # The exception that ends the interpreter, if one does.
    error = getattr(sys, "last_value", None)
    why = "" if error is None else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    leave_peers(why)
    if why:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ExitCode.CHECK_FAILED)


def explain_loss() -> LostPeer | None:
    """Return the error about a lost process; an error of a collective may come before the news."""
    until = time.monotonic() + DUMP_SECONDS
    while _Own.watch is not None and _Own.watch.lost is None and time.monotonic() < until:
        time.sleep(0.01)
    if _Own.watch is None or _Own.watch.lost is None:
        return None
    _Own.told.acquire(blocking=False)
    return _Own.watch.lost.error()


def end_instead_of_jax() -> None:
    """Say who is lost and end, where JAX would end the process with a dump."""
    if _Own.watch is None or not _Own.watch.left:
        time.sleep(DUMP_SECONDS)
        _tell((_Own.watch and _Own.watch.lost) or Lost(-1, "the connection to it is gone"))
    os._exit(ExitCode.CHECK_FAILED)


def tell_and_leave(lost: Lost) -> None:
    """Say which process is lost, at which step and what to do; then end this process."""
    # The main thread may find out by itself, and say so.
    time.sleep(TELL_SECONDS)
    _tell(lost)
    time.sleep(LEAVE_SECONDS)
    os._exit(ExitCode.CHECK_FAILED)


def _tell(lost: Lost) -> None:
    if _Own.told.acquire(blocking=False):
        error = lost.error()
        with suppress(OSError):
            text = f"error: {error.what}\n  {error.why}\n  {error.fix}\n"
            os.write(2, text.encode(errors="replace"))
