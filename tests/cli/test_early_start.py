"""Devices start while a command is imported, and their errors are told by whoever needs them."""

import threading

import jax
import pytest

from meshwright.cli import request


def start_and_wait(monkeypatch, backend):
    asked: list[str] = []

    def answer():
        asked.append(threading.current_thread().name)
        return backend()

    monkeypatch.setattr(jax, "default_backend", answer)
    request.start_devices()
    for thread in threading.enumerate():
        if thread.name == "device-start":
            thread.join(timeout=30)
    return asked


def fail():
    raise RuntimeError("no device")


@pytest.mark.parametrize("backend", [lambda: "cpu", lambda: "gpu", fail])
def test_devices_start_in_a_thread_that_tells_no_errors(monkeypatch, capfd, backend):
    assert start_and_wait(monkeypatch, backend) == ["device-start"]
    assert capfd.readouterr() == ("", "")


def test_one_of_several_processes_starts_its_devices_with_the_others(monkeypatch):
    monkeypatch.setattr(request, "process_count", lambda: 2)
    assert start_and_wait(monkeypatch, lambda: "gpu") == []
