"""What JAX, Gloo, NCCL, gRPC and Python print or raise when processes come and go.

They offer nothing but text, so these patterns are the one place that reads it; what Meshwright
itself knows is in reports (`runtime/attempts`). tests/processes/test_library_messages.py has a
sample of each message.
"""

import re

from meshwright.errors import LostPeer, first_line

GLOO_CONNECTED = b"[Gloo] Rank "
"""What Gloo prints on stdout, once per device, when it has connected."""
TERMINATED = b"Terminating process because the JAX distributed service detected fatal errors"
"""What JAX prints when it ends a process whose peers are gone."""
CRASH_DUMP = re.compile(
    rb"[IWEF]\d{4} [\d:.]+ +\d+ (preemption_\w+\.cc|coordination_\w+\.cc|client\.h)"
    rb"|Additional GRPC error information|:UNKNOWN:Error received|RPC: /"
    rb"|\*\*\* Check failure stack trace|\s+@ +0x"
)
"""The other lines that it prints then."""
SILENT = b"(stopped sending heartbeats):"
"""How the coordinator reports processes that are gone; their numbers are in the next lines."""
SILENT_NUMBERS = re.compile(rb"[\d, ]+\n|The tasks have crashed\.|\n")
"""Those lines: numbers, and advice."""
TRACEBACK_END = re.compile(rb"(?:\w+\.)*\w*(?:Error|Exception): .+")
"""The last line of a traceback, which says what was raised."""

_RUNTIME_ERRORS = ("JaxRuntimeError", "XlaRuntimeError")
_COLLECTIVE = re.compile(r"Gloo|NCCL")
"""Some calls raise the errors of these libraries as `ValueError`."""
_LOST = re.compile(
    r"connection (reset|closed|refused)|broken pipe|socket closed|peer|nccl.*(remote|system) error"
    r"|UNAVAILABLE|DEADLINE_EXCEEDED",
    re.IGNORECASE,
)
"""How Gloo, NCCL and the coordinator report a lost connection."""


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception says that another process is gone."""
    text = first_line(error)
    if type(error).__name__ in _RUNTIME_ERRORS or _COLLECTIVE.search(text):
        return bool(_LOST.search(text))
    return isinstance(error, LostPeer)
