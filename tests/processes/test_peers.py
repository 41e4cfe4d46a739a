"""Processes that no launcher watches name the one that is lost."""

import queue
import socket
from contextlib import suppress

import pytest

from meshwright.processes import peers
from meshwright.processes.peers import Lost, PeerWatch

pytestmark = pytest.mark.quick


class Group:
    """Three processes on loopback."""

    def __init__(self):
        self.told = [queue.SimpleQueue() for _ in range(3)]
        self.watches = [PeerWatch(number, self.told[number].put) for number in range(3)]
        self.port, self.word = self.watches[0].host("127.0.0.1")
        for watch in self.watches[1:]:
            watch.join("127.0.0.1", self.port, self.word)
        while len(self.watches[0]._connections) < 2:
            pass

    def kill(self, number):
        """Close what the system closes when a process ends."""
        self.watches[number].left = True
        for connection in list(self.watches[number]._connections):
            connection.shutdown(socket.SHUT_RDWR)

    def heard(self, number):
        return self.told[number].get(timeout=20)


def test_a_killed_process_is_named_in_all_others():
    group = Group()
    group.kill(2)
    assert group.heard(0) == group.heard(1) == Lost(2)


def test_the_coordinator_is_named_too():
    group = Group()
    group.kill(0)
    assert group.heard(1).process == group.heard(2).process == 0


def test_a_failure_is_told_in_the_words_of_the_process_that_failed():
    group = Group()
    group.watches[1].leave("batch 6 (data(step=6)) is None")
    assert group.heard(0) == group.heard(2) == Lost(1, "batch 6 (data(step=6)) is None")


def test_who_says_goodbye_is_not_lost_and_strangers_are_nobody():
    group = Group()
    group.watches[2].leave()
    group.kill(2)
    for said in (b'{"word": "x", "process": 1}\n', b"GET / HTTP/1.1\n\n", b"\xff" * 9000):
        with socket.create_connection(("127.0.0.1", group.port), 5) as stranger:
            stranger.sendall(said)
            with suppress(ConnectionResetError):
                assert stranger.recv(10) == b""
    group.kill(1)
    assert group.heard(0) == Lost(1)
    assert group.told[2].empty()


def test_the_error_names_the_process_the_step_and_the_remedy(monkeypatch):
    monkeypatch.setattr(peers.own_heartbeat(), "step", 12)
    error = Lost(0).error()
    assert error.what == "process 0 lost process 0 (the coordinator) at step 12"
    assert "killed or crashed" in error.why
    assert "start all processes again with the same command" in error.fix
