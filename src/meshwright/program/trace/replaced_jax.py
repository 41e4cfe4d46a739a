"""Functions of JAX that are replaced while a model is built or its loss is traced."""

import inspect
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import jax
from jax.core import Tracer

from meshwright.runtime.user_code import is_users_file

_READS = (
    "device_count",
    "local_device_count",
    "devices",
    "local_devices",
    "process_count",
    "process_index",
)


@contextmanager
def device_reads(*users: Any) -> Generator[list[str]]:
    """Collect warnings where the user's code asks JAX for its devices or processes.

    Args:
        users: functions and classes of the user; in their modules the functions may be imported
            by name.
    """
    found: dict[str, None] = {}
    warnings: list[str] = []
    modules = {getattr(user, "__module__", None) for user in users}
    namespaces = [jax, *(sys.modules[name] for name in modules if name in sys.modules)]
    with ExitStack() as stack:
        for name in _READS:
            original = getattr(jax, name)
            noticed = _noticed(name, original, found)
            for space in namespaces:
                for key in [k for k, v in vars(space).items() if v is original]:
                    stack.enter_context(mock.patch.object(space, key, noticed))
        yield warnings
    warnings += found


def _noticed(name: str, original: Callable[..., Any], found: dict[str, None]) -> Any:
    thread = threading.get_ident()

    def read(*args: Any, **kwargs: Any) -> Any:
        frame = inspect.currentframe()
        caller = None if frame is None else frame.f_back
        file = "" if caller is None else caller.f_code.co_filename
        if caller is not None and threading.get_ident() == thread and is_users_file(file):
            where = f"{file}:{caller.f_lineno}"
            found[
                f"{where} calls jax.{name}() while the model is built or the loss is traced; what "
                "is computed from it changes with the number of devices or processes; use a "
                "constant instead (the loss sees the global batch)"
            ] = None
        return original(*args, **kwargs)

    return read


@contextmanager
def brief_about_sharding() -> Generator[None]:
    """Do not look for the origin of a traced array that is asked for its sharding.

    Traced arrays have none. Before 0.12, JAX looks up all operations that the array comes from to
    say so, and Flax drops the message: that was half of the time it took to trace a deep model
    with dropout.
    """

    def sharding(tracer: Any) -> None:
        raise AttributeError(f"a traced array ({tracer.aval}) has no `sharding`")

    with mock.patch.object(Tracer, "sharding", property(sharding)):
        yield
