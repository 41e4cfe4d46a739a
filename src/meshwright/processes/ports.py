"""Where process 0 listens: on which interface, and who holds a port that is taken."""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import EnvironmentProblem, UserError
from meshwright.text.masking import mask_words

EVERYWHERE = "::"
"""All interfaces of a machine, IPv4 and IPv6."""

_LISTENING = "0A"
_MAX_COMMAND = 100


@dataclass(frozen=True)
class Address:
    """The host, IPv6 without brackets, and the port of process 0."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``host:port`` or ``[IPv6]:port``; ``localhost`` becomes its IPv4 address."""
        host, _, port = text.rpartition(":")
        host = host.strip("[]")
        if not host or not port.isdecimal() or not 0 < int(port[:6]) <= 65535:
            raise UserError(f"`{text}` is not the address of process 0", fix="write host:port")
        if host == "localhost" and "127.0.0.1" in resolve(host):
            # Process 0 listens there, and gRPC might look elsewhere first.
            host = "127.0.0.1"
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def resolve(host: str) -> list[str]:
    """Return the addresses of a host, none if its name is not known."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def check_own_name(address: Address) -> None:
    """Raise if the machine of process 0 does not know the name by which the others look for it.

    On Kubernetes the name of a pod appears a while after the pod.
    """
    if not resolve(address.host) and "KUBERNETES_SERVICE_HOST" not in os.environ:
        raise UserError(
            f"the host name `{address.host}` of process 0 cannot be resolved",
            why=f"this machine, {socket.gethostname()}, is to listen there on port {address.port}",
            fix="write the name or the address by which others reach this machine: --coordinator "
            "HOST:PORT or MASTER_ADDR=…",
        )


def interface_for(host: str) -> str:
    """Return the address that process 0 listens on, so that others reach it under ``host``.

    This is the address of ``host`` itself if it has a single one on this machine. A loopback
    address only is one if it was written as such: some systems give their own name one, and other
    machines could not connect to it.
    """
    addresses = resolve(host)
    if is_loopback(host) or host == "localhost":
        return next((a for a in addresses if "." in a), addresses[0] if addresses else host)
    if len(addresses) == 1 and not is_loopback(addresses[0]) and _is_own(addresses[0]):
        return addresses[0]
    return EVERYWHERE


def listen(address: Address, interface: str) -> tuple[socket.socket, socket.socket | None]:
    """Listen on a port that no other program listens on; an error names who holds it.

    The second socket reserves the port while nothing listens on it, where the system allows one.
    """
    listener = _bind(interface, address)
    kept = None
    with suppress(UserError, EnvironmentProblem):
        kept = _bind(interface, address)
    try:
        listener.listen(1024)
    except OSError as error:
        raise _cannot_listen(address, interface, error) from error
    return listener, kept


def holder_of(port: int, root: Path = Path("/proc")) -> str:
    """Name the process that listens on a port of this machine, as far as /proc tells."""
    inodes = {
        words[9]
        for table in ("net/tcp", "net/tcp6")
        for words in map(str.split, _lines(root / table)[1:])
        if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port
    }
    links = {f"socket:[{inode}]" for inode in inodes}
    for process in sorted(root.glob("[0-9]*"), key=lambda path: int(path.name)):
        if links & set(_open_files(process)):
            return f"process {process.name} listens there: {_command(process)}"
    return "another program listens there; its owner and root can see which"


def _bind(interface: str, address: Address) -> socket.socket:
    everywhere = interface == EVERYWHERE
    if everywhere and not socket.has_dualstack_ipv6():
        interface = "0.0.0.0"
    bound = socket.socket(socket.AF_INET6 if ":" in interface else socket.AF_INET)
    # Connections of an earlier run that are still closing do not count. The port is not shared
    # (SO_REUSEPORT), so that a second run on it is noticed.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if everywhere and bound.family is socket.AF_INET6:
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        bound.bind((interface, address.port))
    except OSError as error:
        bound.close()
        raise _cannot_listen(address, interface, error) from error
    return bound


def _cannot_listen(address: Address, interface: str, error: OSError) -> Exception:
    if error.errno == errno.EADDRINUSE:
        return UserError(
            f"port {address.port}, on which process 0 is to listen, is taken",
            why=holder_of(address.port),
            fix="end that process, or choose another port in all processes: "
            "--coordinator HOST:PORT or MASTER_PORT=…",
        )
    return EnvironmentProblem(
        f"process 0 cannot listen on {interface} port {address.port}",
        why=error.strerror or str(error),
        fix="name the machine of process 0 as others reach it: --coordinator or MASTER_ADDR",
    )


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a line of JSON; whoever is gone is found missing elsewhere."""
    with suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def is_loopback(host: str) -> bool:
    """Whether a host is written as an address that only this machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_own(address: str) -> bool:
    """Whether this machine has an address."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _open_files(process: Path) -> list[str]:
    found: list[str] = []
    # Processes end while they are looked at, and those of other users are hidden.
    with suppress(OSError):
        for file in (process / "fd").iterdir():
            with suppress(OSError):
                found.append(os.readlink(file))
    return found


def _command(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "?"
    text = " ".join(mask_words([word for word in words if word]))
    return text if len(text) <= _MAX_COMMAND else f"{text[:_MAX_COMMAND]}…"
