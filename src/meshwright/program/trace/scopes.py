"""Module paths in the traced program: every equation says which module it comes from.

An unmodified model has no hooks, so while a loss is traced the methods of the model's classes are
wrapped: a call enters `jax.named_scope` with its path. Equations, and later the instructions of the
compiled program, carry these names. Linen modules, inside Flax's bridge, have a hook for this.

Transforms (`nnx.remat`, `nnx.jit`) and `nnx.merge` call copies of modules. Nothing links a copy to
its original if the model has several modules of that class, so its scopes are provisional at first:
``~?Block-3.up``. The leaves that its equations read show which module it is a copy of.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from flax import linen, nnx
from jax.core import Tracer

from meshwright.program.jaxpr.equations import Jaxpr, Literal, Var, name_stack
from meshwright.program.jaxpr.names import MODULE_MARK, modules_of, path_text
from meshwright.program.trace.precision_policy import Policy
from meshwright.runtime.user_code import in_module

PathsByClass = Mapping[str, Sequence[str]]
"""By name of a class, the paths of its modules in the order of the model."""

_PROVISIONAL = re.compile(r"^(\?(.+)-\d+)(?:\.(.*))?$")
_UNRESOLVED = re.compile(rf"/?{re.escape(MODULE_MARK)}\?[^/():;]*")


def class_name(cls: type) -> str:
    """Return a class's name without characters that scope names cannot hold."""
    return path_text([cls.__name__])


def find_originals(
    jaxpr: Jaxpr, leaves: Mapping[Var, str], paths_by_class: PathsByClass
) -> dict[str, str]:
    """Return, by provisional path, the path of the module that a copy was made of.

    The programs that this one calls are not searched. Leaves are paths by input of the program.
    """
    candidates: dict[str, set[str]] = {}
    leaves = dict(leaves)
    for eqn in jaxpr.eqns:
        read = [leaves[a] for a in eqn.invars if not isinstance(a, Literal) and a in leaves]
        if read and eqn.primitive.name == "convert_element_type":
            leaves[eqn.outvars[0]] = read[0]
        modules = modules_of(name_stack(eqn)) if read else ()
        for match in filter(None, map(_PROVISIONAL.match, modules)):
            copy, cls, inner = match.groups()
            for path in paths_by_class.get(cls, ()):
                inside = ".".join(filter(None, (path, inner))) + "."
                if any(leaf.startswith(inside) for leaf in read):
                    candidates.setdefault(copy, set()).add(path)
    # A leaf that several modules share has its path in the first of them, so the copy is of the
    # last candidate.
    order = {path: n for paths in paths_by_class.values() for n, path in enumerate(paths)}
    return {copy: max(paths, key=order.__getitem__) for copy, paths in candidates.items()}


def rename_copies(scopes: str, originals: Mapping[str, str]) -> str:
    """Return a name stack in which copies have their modules' paths; unknown ones are removed."""
    for copy, path in originals.items():
        scopes = re.sub(
            rf"{re.escape(MODULE_MARK + copy)}(?=[./():;]|$)", MODULE_MARK + path, scopes
        )
    return _UNRESOLVED.sub("", scopes).strip("/")


ROOT = "model"
"""The scope of the outermost module, whose path is empty."""

_PATCHING = threading.RLock()
_ACTIVE: list[_Registry] = []


@contextmanager
def module_scopes(model: Any, compute_dtype: Any = None) -> Generator[PathsByClass]:
    """Name the calls of this model's modules while the context is active.

    Copies of modules have provisional names, which `normalize` replaces; for that, the context
    yields the paths of the modules of each class.

    With a compute dtype, float32 values are cast to it where they enter or leave a module, and
    what the outermost module returns to the loss is cast to float32.
    """
    registry = _Registry(model)
    policy = Policy(compute_dtype)
    with _PATCHING:
        patched = [
            (cls, name, cls.__dict__[name]) for cls in registry.classes() for name in _methods(cls)
        ]
        _ACTIVE.append(registry)
        try:
            for cls, name, method in patched:
                setattr(cls, name, _scoped(method, registry, policy))
            with linen.intercept_methods(functools.partial(_name_linen_call, registry)):
                yield registry.paths_by_class()
        finally:
            _ACTIVE.pop()
            for cls, name, method in patched:
                setattr(cls, name, method)


class _Registry:
    """The path of each module object, including copies made by transforms."""

    def __init__(self, model: Any) -> None:
        self._modules: dict[int, tuple[str, nnx.Module]] = {}
        self._by_type: dict[type, list[str]] = {}
        self._running: list[str] = []
        self._copies = 0
        for path, module in nnx.iter_modules(model):
            self._add(path_text(path) or ROOT, module)

    def classes(self) -> list[type]:
        """Return the classes of the model's modules, and the classes they inherit from."""
        classes = {
            base: None
            for cls in self._by_type
            for base in cls.__mro__
            if issubclass(base, nnx.Module) and base is not nnx.Module
        }
        return list(classes)

    def paths_by_class(self) -> dict[str, list[str]]:
        """Return, by name of a class, the paths of its modules."""
        by_name: dict[str, list[str]] = {}
        for cls, paths in self._by_type.items():
            by_name.setdefault(class_name(cls), []).extend(paths)
        return by_name

    def path(self, module: nnx.Module) -> str:
        """Return the path of a module; for a copy it may be provisional."""
        known = self._modules.get(id(module))
        if known is not None:
            return known[0]
        # nnx.scan and nnx.vmap call copies of a module. A copy gets the path of its original if
        # only one is possible, else a provisional path. Any other module counts as part of the
        # module that calls it.
        candidates = self._candidates(module)
        if not candidates:
            return self._running[-1] if self._running else ""
        path = candidates[0]
        if len(candidates) > 1:
            path = f"?{class_name(type(module))}-{self._copies}"
            self._copies += 1
        base = "" if path == ROOT else path
        for inner_path, inner in nnx.iter_modules(module):
            joined = ".".join(filter(None, (base, path_text(inner_path))))
            self._modules[id(inner)] = (joined or ROOT, inner)
        return path

    @property
    def above(self) -> str:
        """The path of the module that is running."""
        return self._running[-1] if self._running else ROOT

    @contextmanager
    def running(self, path: str) -> Generator[None]:
        """Mark a module as running, so that originals of copies are searched inside it."""
        self._running.append(path)
        try:
            yield
        finally:
            self._running.pop()

    def _candidates(self, module: nnx.Module) -> list[str]:
        """Return the paths of the modules that a module could be a copy of."""
        paths = self._by_type.get(type(module), [])
        if any(id(module) in registry._modules for registry in _ACTIVE):
            return []
        # Other models of the same classes (a teacher in the loss) hold arrays, copies hold tracers.
        leaves = jax.tree.leaves(nnx.state(module))
        if not paths or (leaves and not any(isinstance(x, Tracer) for x in leaves)):
            return []
        above = self.above
        # In a copy, or in a module inside one, the path is not known yet.
        if above == ROOT or above.startswith("?"):
            return paths
        return [path for path in paths if path.startswith(above + ".")]

    def _add(self, path: str, module: nnx.Module) -> None:
        # The module is stored as well, so that no other object gets its id.
        self._modules[id(module)] = (path, module)
        self._by_type.setdefault(type(module), []).append(path)


def _methods(cls: type) -> list[str]:
    """Return the names of the methods to wrap: public ones and ``__call__``."""
    return [
        name
        for name, value in cls.__dict__.items()
        if (inspect.isfunction(value) and not name.startswith("_"))
        # `__call__` may be an object instead of a function, as under `nnx.jit`.
        or (name == "__call__" and callable(value))
    ]


def _scoped(method: Callable[..., Any], registry: _Registry, policy: Policy) -> Callable[..., Any]:
    """Wrap a method so that its calls open a scope and follow the precision policy."""

    @functools.wraps(method)
    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        # If contexts are nested, only the innermost names and casts.
        path = registry.path(self) if _ACTIVE[-1:] == [registry] else ""
        bound = method.__get__(self, type(self))
        if not path:
            return bound(*args, **kwargs)
        with jax.named_scope(MODULE_MARK + path), registry.running(path), policy.inside_module():
            args, kwargs = policy.on_entry((args, kwargs))
            try:
                out = bound(*args, **kwargs)
            except Exception as error:
                in_module(error, path)
                raise
        return policy.on_exit(out)

    return call


def _name_linen_call(
    registry: _Registry,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    context: linen.module.InterceptorContext,
) -> Any:
    """Name the call of a Linen module inside another by the path of its leaves."""
    names, method = context.module.path, context.method_name
    is_call = method == "__call__" or not method.startswith(("_", "setup"))
    if not (names and is_call and _ACTIVE[-1:] == [registry]):
        return call(*args, **kwargs)
    above = "" if registry.above == ROOT else f"{registry.above}."
    with jax.named_scope(MODULE_MARK + above + path_text(names)):
        return call(*args, **kwargs)
