"""What processes agree on: who is main, a value from process 0, a common decision, a barrier.

Every process must make the same calls in the same order; a call that does not match what
process 0 called is an error. Call them from one thread. With one process each call returns at
once and needs no ``jax.distributed``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.errors import EnvironmentProblem, UserError
from meshwright.jax_internals import distributed_state

TIMEOUT_SECONDS = 600.0
"""How long to wait for the other processes; a first compilation may keep one busy for minutes."""


@dataclass
class _Calls:
    """Counts this process's calls; alike in every process, because the order of calls is."""

    made: int = 0
    failed: int = 0
    tidied: int = 0


_calls = _Calls()


def connect(
    coordinator_address: str,
    num_processes: int,
    process_id: int,
    *,
    local_device_ids: Sequence[int] | None = None,
    timeout_seconds: int = 300,
) -> None:
    """Connect this process to the others; must run before JAX starts its devices.

    Args:
        coordinator_address: ``host:port`` of process 0, the same in every process.
        num_processes: how many processes there are.
        process_id: the number of this one, from 0.
        local_device_ids: which of the machine's accelerators this process uses; all by default.
        timeout_seconds: how long to wait for every process to join, after which JAX ends this one.
    """
    if not 0 <= process_id < num_processes:
        raise UserError(
            f"process {process_id} of {num_processes} does not exist",
            fix=f"number the processes from 0 to {num_processes - 1}",
        )
    import jax

    # Without this the CPU backend of several processes has no collectives.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX would keep SIGTERM to itself, as a notice that the process must ask it for.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            local_device_ids=local_device_ids,
            initialization_timeout=timeout_seconds,
            # All that could be detected is given; detection may contact a cluster's services.
            cluster_detection_method="deactivate",
        )
    except RuntimeError as error:
        raise EnvironmentProblem(
            f"process {process_id} cannot connect to {coordinator_address}", why=str(error)
        ) from error
    _calls.made = _calls.failed = _calls.tidied = 0


def process_index() -> int:
    """Return the number of this process, without starting JAX's devices."""
    return distributed_state().process_id if _client() else 0


def process_count() -> int:
    """Return how many processes are connected, without starting JAX's devices."""
    return distributed_state().num_processes if _client() else 1


def is_main() -> bool:
    """Whether this is process 0, which prints and decides."""
    return process_index() == 0


def broadcast(value: Any, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Any:
    """Return process 0's value in every process; what the others pass is ignored.

    The value is anything JSON can hold. It comes back as JSON does, also with one process:
    tuples as lists, keys as strings.
    """
    sent = _to_json(value) if is_main() else "null"
    return json.loads(_meet("broadcast", sent, timeout_seconds)[0])


def gather(value: Any, *, timeout_seconds: float = TIMEOUT_SECONDS) -> list[Any]:
    """Return every process's value, in the order of the processes; JSON as in `broadcast`."""
    received = _meet("gather", _to_json(value), timeout_seconds, everyone=True)
    return [json.loads(text) for text in received]


def agree(
    decision: bool,
    how: Literal["any", "all", "main"] = "any",
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> bool:
    """Make a decision that each process took for itself a common one.

    Args:
        decision: what this process decided, such as "a signal asked me to stop".
        how: ``any`` (one yes is enough), ``all`` (one no is enough) or ``main`` (process 0
            decides, for what depends on a clock or a local file).
        timeout_seconds: how long to wait for the others.
    """
    if how == "main":
        return bool(broadcast(bool(decision), timeout_seconds=timeout_seconds))
    votes = gather(bool(decision), timeout_seconds=timeout_seconds)
    return any(votes) if how == "any" else all(votes)


def barrier(name: str, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
    """Wait until every process is here.

    Raises:
        EnvironmentProblem: naming the processes that did not arrive in time.
    """
    _meet(f"barrier {name}", "null", timeout_seconds)


def _meet(what: str, sent: str, timeout_seconds: float, *, everyone: bool = False) -> list[str]:
    """Exchange texts with the other processes and return process 0's, or everyone's.

    Each process leaves its text under the number of the call and waits for the others. Once all
    are here, all have left the calls before, whose texts process 0 then deletes.
    """
    client = _client()
    if client is None:
        return [sent]
    number, me = _calls.made, process_index()
    _calls.made += 1
    room = f"meshwright/{number}"
    client.key_value_set(f"{room}/{me}", json.dumps([what, sent]))
    try:
        # The coordinator remembers every barrier's name, so one serves for all calls; a failed
        # one cannot be used again.
        client.wait_at_barrier(f"meshwright/{_calls.failed}", int(timeout_seconds * 1000))
    except RuntimeError as error:
        _calls.failed += 1
        raise _absence(client, room, what, timeout_seconds, error) from error
    if me == 0:
        _tidy(client, number)
    left = _texts(client, room) if everyone else {0: client.key_value_try_get(f"{room}/0")}
    return [_matching(process, left[process], what) for process in sorted(left)]


def _tidy(client: Any, number: int) -> None:
    """Delete what was left at the calls before this one."""
    for old in range(_calls.tidied, number):
        client.key_value_delete(f"meshwright/{old}")
    _calls.tidied = number


def _texts(client: Any, room: str) -> dict[int, str]:
    return {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(room)}


def _matching(process: int, left: str, what: str) -> str:
    """Return the text a process left, if it was making the same call."""
    called, text = json.loads(left)
    if called != what:
        raise EnvironmentProblem(
            f"process {process_index()} is at `{what}` while process {process} is at `{called}`",
            why="every process must make the same calls in the same order",
            fix="look for a call that only some processes make, such as one under `if is_main()`",
        )
    return text


def _absence(
    client: Any, room: str, what: str, timeout_seconds: float, error: RuntimeError
) -> EnvironmentProblem:
    """Say who did not come, from the texts the others left."""
    try:
        arrived = _texts(client, room)
    except RuntimeError:
        return EnvironmentProblem(
            f"process {process_index()} lost process 0 while waiting at `{what}`", why=str(error)
        )
    absent = sorted(set(range(process_count())) - set(arrived))
    if not absent:
        return EnvironmentProblem(
            f"process {process_index()} came too late to `{what}`: the others had given up",
            why=str(error).partition("\n")[0],
        )
    names = f"process{'es' * (len(absent) > 1)} {', '.join(map(str, absent))}"
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
    """Return the connection to the coordinator, or None for a process on its own."""
    return distributed_state().client if "jax" in sys.modules else None
