"""Module paths in the traced program: every equation learns which module it came from.

An unmodified model has no hooks, so while a loss is traced the methods of the model's classes are
wrapped: a call enters `jax.named_scope` with its path. Equations, and later the instructions of the
compiled program, carry these names. Linen modules, inside Flax's bridge, have a hook for that.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from flax import linen, nnx
from jax.core import Tracer

from meshwright.program.jaxpr.names import MODULE_MARK, path_text
from meshwright.program.trace.copies import Places, class_name, is_token, token
from meshwright.program.trace.precision_policy import Policy
from meshwright.user_code import in_module

ROOT = "model"
"""The scope of the outermost module, whose own path is empty."""

_PATCHING = threading.RLock()
_OPEN: list[_Registry] = []


@contextmanager
def module_scopes(model: Any, compute_dtype: Any = None) -> Generator[Places]:
    """Name the calls of this model's modules while the context is open.

    Copies of modules have provisional names, which `normalize` replaces with the help of what the
    context gives: where the modules of each class are.

    With a compute dtype, float32 values are cast to it where they enter or leave a module, and
    what leaves the outermost module for the loss is cast to float32.
    """
    registry = _Registry(model)
    policy = Policy(compute_dtype)
    with _PATCHING:
        patched = [
            (cls, name, cls.__dict__[name]) for cls in registry.classes() for name in _methods(cls)
        ]
        _OPEN.append(registry)
        try:
            for cls, name, method in patched:
                setattr(cls, name, _scoped(method, registry, policy))
            with linen.intercept_methods(functools.partial(_named, registry)):
                yield registry.places()
        finally:
            _OPEN.pop()
            for cls, name, method in patched:
                setattr(cls, name, method)


class _Registry:
    """Which path each module object has, transforms' copies included."""

    def __init__(self, model: Any) -> None:
        self._modules: dict[int, tuple[str, nnx.Module]] = {}
        self._by_type: dict[type, list[str]] = {}
        self._running: list[str] = []
        self._copies = 0
        for path, module in nnx.iter_modules(model):
            self._add(path_text(path) or ROOT, module)

    def classes(self) -> list[type]:
        found = {
            base: None
            for cls in self._by_type
            for base in cls.__mro__
            if issubclass(base, nnx.Module) and base is not nnx.Module
        }
        return list(found)

    def places(self) -> dict[str, list[str]]:
        """Return, by name of a class, where its modules are."""
        found: dict[str, list[str]] = {}
        for cls, paths in self._by_type.items():
            found.setdefault(class_name(cls), []).extend(paths)
        return found

    def path(self, module: nnx.Module) -> str:
        known = self._modules.get(id(module))
        if known is not None:
            return known[0]
        # nnx.scan and nnx.vmap call copies of a module: adopt one whose class has one place only,
        # or else until its place is known. Any other module works for the one that called it.
        places = self._places(module)
        if not places:
            return self._running[-1] if self._running else ""
        place = places[0]
        if len(places) > 1:
            place = token(type(module), self._copies)
            self._copies += 1
        base = "" if place == ROOT else place
        for path, inner in nnx.iter_modules(module):
            joined = ".".join(filter(None, (base, path_text(path))))
            self._modules[id(inner)] = (joined or ROOT, inner)
        return place

    def path_inside(self, names: Sequence[str]) -> str:
        """Return the path of what has these names inside the module that is running."""
        above = self._running[-1] if self._running else ROOT
        return ".".join([*([] if above == ROOT else [above]), path_text(names)])

    @contextmanager
    def running(self, path: str) -> Generator[None]:
        """Remember which module is running, so that copies are looked for inside it."""
        self._running.append(path)
        try:
            yield
        finally:
            self._running.pop()

    def _places(self, module: nnx.Module) -> list[str]:
        """Return where a module that is not the model's own object could belong."""
        places = self._by_type.get(type(module), [])
        if any(id(module) in registry._modules for registry in _OPEN):
            return []
        # Other models of the same classes (a teacher in the loss) hold arrays, copies hold tracers.
        leaves = jax.tree.leaves(nnx.state(module))
        if not places or (leaves and not any(isinstance(x, Tracer) for x in leaves)):
            return []
        above = self._running[-1] if self._running else ROOT
        if above == ROOT or is_token(above):
            return places
        return [place for place in places if place.startswith(above + ".")]

    def _add(self, path: str, module: nnx.Module) -> None:
        # The module is kept alive, or another object could take over its id.
        self._modules[id(module)] = (path, module)
        self._by_type.setdefault(type(module), []).append(path)


def _methods(cls: type) -> list[str]:
    return [
        name
        for name, value in cls.__dict__.items()
        if (inspect.isfunction(value) and not name.startswith("_"))
        # The call itself may be wrapped, as `nnx.jit` does.
        or (name == "__call__" and callable(value))
    ]


def _scoped(method: Callable[..., Any], registry: _Registry, policy: Policy) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        # Where contexts are nested, the innermost alone names and casts.
        path = registry.path(self) if _OPEN[-1:] == [registry] else ""
        bound = method.__get__(self, type(self))
        if not path:
            return bound(*args, **kwargs)
        with (
            jax.named_scope(MODULE_MARK + path),
            registry.running(path),
            policy.inside_module(),
        ):
            args, kwargs = policy.on_entry((args, kwargs))
            try:
                out = bound(*args, **kwargs)
            except Exception as error:
                in_module(error, path)
                raise
        return policy.on_exit(out)

    return call


def _named(
    registry: _Registry,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    context: linen.module.InterceptorContext,
) -> Any:
    """Name what a Linen module calls inside another as its leaves are named."""
    names, method = context.module.path, context.method_name
    is_call = method == "__call__" or not method.startswith(("_", "setup"))
    if not (names and is_call and _OPEN[-1:] == [registry]):
        return call(*args, **kwargs)
    with jax.named_scope(MODULE_MARK + registry.path_inside(names)):
        return call(*args, **kwargs)
