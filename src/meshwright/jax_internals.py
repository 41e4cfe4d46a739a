"""The private parts of JAX that Meshwright relies on, because no public name offers the same.

Nothing else imports `jax._src`, so a new JAX release can only break this file;
tests/test_jax_internals.py says which function broke and what to do about it. Each function
imports what it needs when called: some of their callers must not load JAX.
"""

from __future__ import annotations

from typing import Any


def jax_has_started() -> bool:
    """Whether JAX has already created its devices."""
    # Devices can be simulated and processes connected only before. Every public way to ask, such
    # as jax.devices(), creates them.
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def distributed_state() -> Any:
    """Return JAX's record of the connected processes.

    Its ``client`` is the connection to the coordinator, None for a process on its own;
    ``process_id`` and ``num_processes`` are this process's number and how many there are.
    """
    # jax.process_index() and jax.process_count() create the devices, and the coordinator's
    # key-value store, through which processes agree, has no public API at all.
    from jax._src import distributed

    return distributed.global_state


def surrounding_axes() -> tuple[str, ...]:
    """Return the axis names that shard_map and vmap have bound around the code being traced."""
    # jax.lax.axis_size only tells whether a given name is bound; nothing public lists the names.
    from jax._src import core

    return tuple(name for name in core.get_axis_env().axis_sizes if isinstance(name, str))
