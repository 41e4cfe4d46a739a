"""Coordination of processes: rank, broadcast, gather, a common decision, and a barrier.

Every process must make the same calls in the same order, from one thread; a call that differs from
that of process 0 is an error. With a single process, calls return at once and do not need
``jax.distributed``.
"""

import atexit
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.errors import EnvironmentProblem, LostPeer, UserError, first_line
from meshwright.processes.peers import end_instead_of_jax, leave_at_exit, watch_peers
from meshwright.processes.ports import Address, interface_for, is_loopback
from meshwright.processes.rendezvous import Meeting, Member, MissingMembers, meet
from meshwright.runtime.heartbeat import own_heartbeat
from meshwright.runtime.jax_internals import distributed_state, ending_by, lower_priority_of_gloo
from meshwright.text.units import numbered

JOIN_TIMEOUT = "MESHWRIGHT_JOIN_TIMEOUT"
"""The environment variable with the seconds that processes wait for each other at the start."""
LOST_TIMEOUT = "MESHWRIGHT_LOST_TIMEOUT"
"""The environment variable with the seconds after which a silent process counts as lost."""
LOST_SECONDS = 10.0
"""The same by default, over several machines."""
START_SECONDS = 120
"""How long JAX may take to connect processes that are all there."""
TIMEOUT_SECONDS = 600.0
"""How long to wait for the other processes; the first compilation may take minutes."""


@dataclass
class _Calls:
    """Counts this process's calls, which are the same in every process."""

    made: int = 0
    failed: int = 0
    deleted: int = 0


_calls = _Calls()


def connect(
    coordinator_address: str,
    num_processes: int,
    process_id: int,
    *,
    local_device_ids: Sequence[int] | None = None,
    timeout_seconds: float | None = None,
    run_name: str = "",
    notify: Callable[[str], None] = lambda _: None,
) -> None:
    """Connect this process to the others; must run before JAX starts its devices.

    ``run_name`` is what the processes of this run share and those of others do not; ``notify`` is
    called in process 0 if it waits for long. How long they wait is by default
    MESHWRIGHT_JOIN_TIMEOUT, or 60 seconds on one machine and 300 otherwise.
    """
    if not 0 <= process_id < num_processes:
        raise UserError(
            f"process {process_id} of {num_processes} does not exist",
            fix=f"number the processes from 0 to {num_processes - 1}",
        )
    # From here on the launcher can ask where this process is.
    heartbeat = own_heartbeat()
    # Before the processes meet, since it may take long, and differently so on each machine.
    importlib.import_module("jax")
    address = Address.parse(coordinator_address)
    interface = own_interface(address)
    seconds = join_timeout(address) if timeout_seconds is None else timeout_seconds
    meeting = Meeting(address, seconds, interface, notify)
    try:
        kept = meet(Member(process_id, num_processes, run_name), meeting)
    except MissingMembers as error:
        heartbeat.report(absent=error.numbers)
        raise
    try:
        with nullcontext() if heartbeat.launched else ending_by(end_instead_of_jax):
            numbers = num_processes, process_id
            _initialize(address, *numbers, interface=interface, local_device_ids=local_device_ids)
    finally:
        if kept is not None:
            kept.close()
    if not heartbeat.launched:
        watch_peers(process_id, address, interface)
        # Before JAX's own goodbye, which was registered earlier.
        atexit.register(leave_at_exit)
    _calls.made = _calls.failed = _calls.deleted = 0


def own_interface(address: Address) -> str:
    """Return the interface on which process 0 listens, or its launcher."""
    given = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", "").strip()
    return Address.parse(given).host if given else interface_for(address.host)


def join_timeout(address: Address) -> float:
    """Return how long processes wait for each other at the start."""
    return _seconds(JOIN_TIMEOUT, 60.0 if is_loopback(address.host) else 300.0)


def lost_timeout(address: Address) -> float:
    """Return after how long without a sign of life a process counts as lost.

    On one machine the launcher sees processes end, and suspending the machine loses no process, so
    that JAX's own 100 seconds are soon enough there.
    """
    return _seconds(LOST_TIMEOUT, 100.0 if is_loopback(address.host) else LOST_SECONDS)


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= 86_400:
        raise UserError(
            f"the environment variable {variable} is `{text}`",
            fix=f"export {variable}=120 for two minutes, or unset it",
        )
    return seconds


def _initialize(
    address: Address,
    num_processes: int,
    process_id: int,
    *,
    interface: str,
    local_device_ids: Sequence[int] | None,
) -> None:
    """Start JAX's own service and client, once all processes are there."""
    import jax

    # The CPU backend needs this for collectives between processes.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    lower_priority_of_gloo()
    # Otherwise JAX handles SIGTERM itself, as a notice that must be polled.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            str(address),
            num_processes,
            process_id,
            local_device_ids=local_device_ids,
            initialization_timeout=START_SECONDS,
            heartbeat_timeout_seconds=max(round(lost_timeout(address)), 1),
            coordinator_bind_address=str(Address(interface, address.port)),
            # Nothing is left to detect, and detection may contact services of a cluster.
            cluster_detection_method="deactivate",
        )
    except RuntimeError as error:
        raise EnvironmentProblem(
            f"process {process_id} cannot connect to {address}", why=str(error)
        ) from error


def process_index() -> int:
    """Return the index of this process, without starting JAX's devices."""
    return distributed_state().process_id if _client() else 0


def process_count() -> int:
    """Return the number of connected processes, without starting JAX's devices."""
    return distributed_state().num_processes if _client() else 1


def is_main() -> bool:
    """Whether this is process 0, which prints and makes decisions."""
    return process_index() == 0


def broadcast(value: Any) -> Any:
    """Return process 0's value in every process; what the others pass is ignored.

    The value is anything JSON can hold, and is returned as JSON, even with one process: tuples
    become lists and keys become strings.
    """
    sent = _to_json(value) if is_main() else "null"
    return json.loads(_exchange("broadcast", sent, TIMEOUT_SECONDS)[0])


def attempt_on_main(act: Callable[[], object]) -> str:
    """Act in process 0; return what its file system says is wrong, in every process, or nothing."""
    problem = ""
    if is_main():
        try:
            act()
        except OSError as error:
            problem = str(error)
    return broadcast(problem)


def gather(value: Any) -> list[Any]:
    """Return the values of all processes in order, as JSON like in `broadcast`."""
    received = _exchange("gather", _to_json(value), TIMEOUT_SECONDS, everyone=True)
    return [json.loads(text) for text in received]


def agree(decision: bool, how: Literal["any", "all", "main"] = "any") -> bool:
    """Combine the decisions of all processes into a common one: ``any``, ``all`` or ``main``.

    Process 0 (``main``) decides what depends on a clock or a local file.
    """
    if how == "main":
        return bool(broadcast(bool(decision)))
    votes = gather(bool(decision))
    return any(votes) if how == "any" else all(votes)


def barrier(name: str, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
    """Wait until every process has made this call; an error names those that do not come."""
    _exchange(f"barrier {name}", "null", timeout_seconds)


def _exchange(what: str, sent: str, timeout_seconds: float, *, everyone: bool = False) -> list[str]:
    """Exchange texts with the other processes and return process 0's, or everyone's.

    Each process stores its text under the number of the call and waits for the others. Once all
    have arrived, the texts of earlier calls are no longer needed, and process 0 deletes them.
    """
    client = _client()
    if client is None:
        return [sent]
    number, me = _calls.made, process_index()
    _calls.made += 1
    prefix = f"meshwright/{number}"
    client.key_value_set(f"{prefix}/{me}", json.dumps([what, sent]))
    try:
        # The coordinator remembers every barrier's name, so all calls share one; a failed barrier
        # cannot be used again.
        client.wait_at_barrier(f"meshwright/{_calls.failed}", int(timeout_seconds * 1000))
    except RuntimeError as error:
        _calls.failed += 1
        raise _explain_timeout(client, prefix, what, timeout_seconds, error) from error
    if me == 0:
        for old in range(_calls.deleted, number):
            client.key_value_delete(f"meshwright/{old}")
        _calls.deleted = number
    texts = _texts(client, prefix) if everyone else {0: client.key_value_try_get(f"{prefix}/0")}
    return [_check_call(process, texts[process], what) for process in sorted(texts)]


def _texts(client: Any, prefix: str) -> dict[int, str]:
    return {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(prefix)}


def _check_call(process: int, stored: str, what: str) -> str:
    """Return the text of a process, which must have made the same call."""
    called, text = json.loads(stored)
    if called != what:
        raise EnvironmentProblem(
            f"process {process_index()} is at `{what}` while process {process} is at `{called}`",
            why="every process must make the same calls in the same order",
            fix="look for a call that only some processes make, such as one under `if is_main()`",
        )
    return text


def _explain_timeout(
    client: Any, prefix: str, what: str, timeout_seconds: float, error: RuntimeError
) -> EnvironmentProblem:
    """Return an error that names the processes without a text."""
    try:
        arrived = _texts(client, prefix)
    except RuntimeError:
        return LostPeer(
            f"process {process_index()} lost process 0 while waiting at `{what}`", why=str(error)
        )
    absent = sorted(set(range(process_count())) - set(arrived))
    if not absent:
        return EnvironmentProblem(
            f"process {process_index()} arrived too late at `{what}`: the others had timed out",
            why=first_line(error),
        )
    names = numbered("process", absent)
    return EnvironmentProblem(
        f"{names} did not arrive at `{what}` within {timeout_seconds:g} s",
        why=f"{len(arrived)} of {process_count()} processes arrived: "
        f"{', '.join(map(str, sorted(arrived)))}",
        fix=f"look at the output of {names} for a crash, a hang, or work longer than the timeout",
    )


def _to_json(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"a value of type {type(value).__name__} cannot be sent to other processes",
            why=str(error),
            fix="send numbers, texts, lists and dicts; arrays belong in a sharded jax.Array",
        ) from error


def _client() -> Any | None:
    """Return the connection to the coordinator; None if this process is not connected."""
    return distributed_state().client if "jax" in sys.modules else None
