"""The private parts of JAX that Meshwright relies on, because no public name offers the same.

Nothing else imports `jax._src`, so a new JAX release can only break this file;
tests/runtime/test_jax_internals.py says which function broke and what to do about it. Each function
imports what it needs when called: some of their callers must not load JAX.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

_LOWEST = 19
"""The lowest priority of a thread on Linux."""


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


@contextmanager
def ending_by(act: Callable[[], None]) -> Generator[None]:
    """Let processes that connect inside end by a function if they lose the others, if possible."""
    # JAX gives its client no callback, and passes it a status that Python cannot read, so that the
    # call ends in std::terminate, whose handler can be chosen.
    from jax._src import distributed

    module: Any = distributed
    create = getattr(getattr(module, "_jax", None), "get_distributed_runtime_client", None)
    if create is None or not _set_terminate(act):
        yield
        return

    def create_with_callback(*arguments: Any, **named: Any) -> Any:
        try:
            return create(*arguments, **named, missed_heartbeat_callback=lambda *_: act())
        except TypeError:
            return create(*arguments, **named)

    with mock.patch.object(module._jax, "get_distributed_runtime_client", create_with_callback):
        yield


_handlers: list[Any] = []
"""Functions that native code calls, which must not be collected."""


def _set_terminate(act: Callable[[], None]) -> bool:
    """Call a function where C++ would end the process; return whether that is possible."""
    kind = ctypes.CFUNCTYPE(None)
    try:
        set_terminate: Any = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
    except (OSError, AttributeError):
        return False
    set_terminate.argtypes, set_terminate.restype = [kind], ctypes.c_void_p
    _handlers.append(kind(act))
    set_terminate(_handlers[-1])
    return True


def lower_priority_of_gloo() -> None:
    """Let Gloo's thread, which sends and receives between CPUs, run only when others do not.

    While a process still computes what a faster one has already sent it, this thread polls, on a
    machine with few cores at the cost of what it waits for. Call it before devices are created.
    """
    # Gloo starts the thread in this call and offers no handle to it. On Linux a thread has the
    # priority of the one that starts it.
    from jax._src import xla_bridge

    module: Any = xla_bridge
    create = getattr(getattr(module, "_jax", None), "make_gloo_tcp_collectives", None)
    if create is None or sys.platform != "linux":
        return

    def create_quietly(*arguments: Any, **named: Any) -> Any:
        def create_in_thread() -> Any:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
            return create(*arguments, **named)

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(create_in_thread).result()

    module._jax.make_gloo_tcp_collectives = create_quietly


def surrounding_axes() -> tuple[str, ...]:
    """Return the axis names that shard_map and vmap have bound around the code being traced."""
    # jax.lax.axis_size only tells whether a given name is bound; nothing public lists the names.
    from jax._src import core

    return tuple(name for name in core.get_axis_env().axis_sizes if isinstance(name, str))


def compiler_options_of(lowered: Any) -> dict[str, Any]:
    """Return the compiler options that were given to `jax.jit`, of what its ``lower`` returned."""
    # They decide what is compiled, and neither the text of a lowered program nor its public
    # attributes tell them.
    return dict(lowered._lowering._compiler_options_kvs)


@contextmanager
def attention_on(capability: str, cudnn: tuple[int, int]) -> Generator[None]:
    """Let JAX's cuDNN attention and Triton be compiled for a GPU that is not on this machine."""
    # They ask the GPU that is here what it can do, also while they compile for another one.
    from jax._src.cudnn import fused_attention_stablehlo as attention

    def number(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split("."))

    answers: dict[str, Callable[..., Any]] = {
        "check_cudnn_version": lambda: cudnn[0] * 10000 + cudnn[1] * 100,
        "check_compute_capability": lambda least: number(capability) >= number(least),
        "is_cuda_compute_capability_equal": lambda one: number(capability) == number(one),
    }
    with ExitStack() as replaced:
        for name, answer in answers.items():
            replaced.enter_context(mock.patch.object(attention, name, answer))
        # Releases before 0.12 assume a capability of 9.0.
        with suppress(ImportError):
            from jax._src.pallas.triton import gpu_info  # pyright: ignore[reportAttributeAccessIssue]

            digits = int(capability.replace(".", ""))
            info = gpu_info.GpuInfo(
                gpu_version=None, arch_name=capability, compute_capability=digits
            )
            replaced.enter_context(mock.patch.object(gpu_info, "get_gpu_info", return_value=info))
        yield


@contextmanager
def replaced_constraints(replace: Callable[[Any, Any], Any]) -> Generator[None]:
    """Call ``replace(array, sharding)`` for every sharding constraint that this thread traces.

    A PartitionSpec without a mesh is accepted as well: its mesh then has the axes it names, of
    size 1. The sharding of a constraint on a memory layout is that layout.
    """
    # Models hold `jax.lax.with_sharding_constraint` under any name, so that it cannot be replaced
    # itself, and it refuses a PartitionSpec where no mesh surrounds the call.
    from jax._src import pjit

    module: Any = pjit
    primitive, create = module.sharding_constraint_p, module._create_sharding_for_array
    thread = threading.get_ident()

    class Constraint:
        def bind(self, x: Any, *, sharding: Any, layout: Any, **others: Any) -> Any:
            if threading.get_ident() != thread:
                return primitive.bind(x, sharding=sharding, layout=layout, **others)
            return replace(x, sharding if layout is None else layout)

    def create_anywhere(mesh: Any, x: Any, *names: Any) -> Any:
        here = threading.get_ident() == thread
        return create(_mesh_of(x) if here and _needs_mesh(mesh, x) else mesh, x, *names)

    module.sharding_constraint_p, module._create_sharding_for_array = Constraint(), create_anywhere
    try:
        yield
    finally:
        module.sharding_constraint_p, module._create_sharding_for_array = primitive, create


def _needs_mesh(mesh: Any, x: Any) -> bool:
    from jax.sharding import PartitionSpec

    return isinstance(x, PartitionSpec) and (mesh.empty or not _axes_of(x) <= set(mesh.axis_names))


def _axes_of(spec: Any) -> set[str]:
    return {
        name
        for entry in spec
        for name in (entry if isinstance(entry, tuple) else (entry,))
        if isinstance(name, str)
    }


def _mesh_of(spec: Any) -> Any:
    from jax.sharding import AbstractMesh, AxisType

    names = tuple(sorted(_axes_of(spec))) or ("data",)
    return AbstractMesh((1,) * len(names), names, axis_types=(AxisType.Auto,) * len(names))
