"""Process 0 listens where others reach it, and on no more interfaces than needed."""

import socket

import pytest
from real_processes import free_port

from meshwright.errors import EnvironmentProblem, UserError
from meshwright.processes import join_timeout, ports
from meshwright.processes.ports import EVERYWHERE, Address, holder_of, interface_for, listen


@pytest.fixture
def names(monkeypatch):
    """Let host names have these addresses."""
    known: dict[str, list[str]] = {}
    monkeypatch.setattr(ports, "resolve", lambda host: known.get(host, [host]))
    return known


@pytest.mark.parametrize(
    ("host", "addresses", "interface"),
    [
        ("127.0.0.1", ["127.0.0.1"], "127.0.0.1"),
        ("127.0.0.5", ["127.0.0.5"], "127.0.0.5"),
        ("::1", ["::1"], "::1"),
        ("localhost", ["::1", "127.0.0.1"], "127.0.0.1"),
        # Some systems give their own name a loopback address.
        ("node0", ["127.0.1.1"], EVERYWHERE),
        ("node0", ["10.0.0.1", "fe80::1"], EVERYWHERE),
        # The address of a load balancer, or of a network that translates addresses.
        ("node0", ["192.0.2.1"], EVERYWHERE),
        ("node0", [], EVERYWHERE),
    ],
)
def test_the_interface_is_the_one_that_the_address_names(names, host, addresses, interface):
    names[host] = addresses
    assert interface_for(host) == interface


def test_an_own_address_is_the_only_interface(names, monkeypatch):
    names["node0"] = ["10.0.0.1"]
    monkeypatch.setattr(ports, "_is_own", lambda address: address == "10.0.0.1")
    assert interface_for("node0") == "10.0.0.1"


@pytest.mark.parametrize(
    ("text", "shown"),
    [("localhost:5", "127.0.0.1:5"), ("[::1]:80", "[::1]:80"), ("node0:29500", "node0:29500")],
)
def test_addresses_are_read_and_shown(text, shown):
    assert str(Address.parse(text)) == shown


@pytest.mark.parametrize("text", ["node0", ":80", "node0:http", "node0:70000", "node0:0"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(UserError, match="is not the address of process 0"):
        Address.parse(text)


def test_a_second_run_cannot_share_the_port_of_the_first():
    address = Address("127.0.0.1", free_port())
    listener, kept = listen(address, "127.0.0.1")
    with listener:
        with pytest.raises(UserError, match="is taken"):
            listen(address, "127.0.0.1")
        # Where nobody listens, nobody is named.
        assert holder_of(1) == "another program listens there; its owner and root can see which"
    assert kept is not None
    with kept, socket.create_server(("127.0.0.1", address.port), reuse_port=True):
        # JAX can open the port while it is kept from others.
        assert "process" in holder_of(address.port)


def test_an_interface_of_another_machine_is_named():
    with pytest.raises(EnvironmentProblem, match=r"cannot listen on 192\.0\.2\.1"):
        listen(Address("192.0.2.1", free_port()), "192.0.2.1")


def test_the_time_to_join_depends_on_the_machines_and_can_be_set(monkeypatch):
    monkeypatch.delenv("MESHWRIGHT_JOIN_TIMEOUT", raising=False)
    assert join_timeout(Address("127.0.0.1", 1)) == 60
    assert join_timeout(Address("node0", 1)) == 300
    monkeypatch.setenv("MESHWRIGHT_JOIN_TIMEOUT", "7.5")
    assert join_timeout(Address("node0", 1)) == 7.5
    monkeypatch.setenv("MESHWRIGHT_JOIN_TIMEOUT", "soon")
    with pytest.raises(UserError, match="MESHWRIGHT_JOIN_TIMEOUT is `soon`"):
        join_timeout(Address("node0", 1))
