"""The handshake: processes that train together compare what they are about to do.

Each process compiles its own copy of the step, and the copies only work together if they are the
same. Settings that differ need not fail: two learning rates train a model that follows neither.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.errors import ProcessesDiffer
from meshwright.processes import barrier, gather, process_count
from meshwright.text.json_text import finite, flatten
from meshwright.text.masking import mask_value
from meshwright.text.units import numbered

MAX_SHOWN = 8
"""Differences that an error lists."""

Facts = Mapping[str, Any]
"""What a process is about to do: nested dicts of what JSON can hold."""

_MISSING = "missing"


def compare_processes(facts: Facts) -> None:
    """Raise the same `ProcessesDiffer` in every process if their facts, nested dicts, differ.

    Every process must call it. Digests are compared first, so that equal facts cost one exchange
    of a few bytes.
    """
    if process_count() == 1:
        return
    own = {key: _text(value) for key, value in flatten(facts)}
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
    if len(set(gather(digest))) == 1:
        return
    # Secrets are neither sent nor shown; only their names are.
    everyone = gather({key: mask_value(key, text) for key, text in own.items()})
    # No process leaves before all have read the facts of the others, which process 0 stores.
    barrier("handshake")
    raise _explain(everyone)


def describe_own_devices() -> dict[str, Any]:
    """Return how many devices this process has, and of which kinds; starts JAX's devices."""
    import jax

    kinds = Counter(device.device_kind for device in jax.local_devices())
    return {
        "per process": sum(kinds.values()),
        "kinds": ", ".join(f"{count} × {kind}" for kind, count in sorted(kinds.items())),
    }


def differences(everyone: Sequence[Mapping[str, str]]) -> list[str]:
    """Describe the keys whose values differ: each value, and the processes that have it."""
    keys = dict.fromkeys(key for facts in everyone for key in facts)
    return [
        f"{key} is {_by_value([facts.get(key, _MISSING) for facts in everyone])}"
        for key in keys
        if len({facts.get(key) for facts in everyone}) > 1
    ]


def _explain(everyone: Sequence[Mapping[str, str]]) -> ProcessesDiffer:
    lines = differences(everyone) or ["a password or another secret differs"]
    more = [f"and {len(lines) - MAX_SHOWN} more"] if len(lines) > MAX_SHOWN else []
    return ProcessesDiffer(
        f"the {len(everyone)} processes differ",
        why="\n".join([*lines[:MAX_SHOWN], *more]),
        fix="start every process with the same settings and the same versions; what only concerns "
        "one process, such as printing, belongs in a callback",
    )


def _by_value(values: Sequence[str]) -> str:
    """Describe who has which value: ``1 in processes 0, 2 and 2 in process 1``."""
    processes: dict[str, list[int]] = {}
    for process, value in enumerate(values):
        processes.setdefault(value, []).append(process)
    return " and ".join(
        f"{value} in {numbered('process', having, most=len(having))}"
        for value, having in processes.items()
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(finite(value), ensure_ascii=False)
