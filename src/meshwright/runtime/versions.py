"""What affects the results of a run: versions of packages, and digests of code."""

import functools
import hashlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from meshwright.runtime.user_code import is_named_by_config, is_users_file

_PACKAGES = ("meshwright", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def own_version() -> str:
    """Return the version of Meshwright; from sources that are not installed it is not known."""
    return package_versions().get("meshwright", "(not installed)")


@functools.cache
def package_versions() -> dict[str, str]:
    """Return the versions of Python and of these packages, by name."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def installed_packages() -> list[str]:
    """Return the names and versions of all packages that can be imported."""
    return sorted({path.name for each in sys.path for path in Path(each).glob("*.dist-info")})


def users_code(*objects: Any) -> dict[str, str]:
    """Return digests of the user's modules, by name: of these objects and those a config names.

    What they import from the user's other files counts, too.
    """
    named = [m for m in list(sys.modules.values()) if is_named_by_config(_file(m))]
    waiting = [*filter(None, map(_module_of, objects)), *named]
    found: dict[str, ModuleType] = {}
    while waiting:
        module = waiting.pop()
        if module.__name__ not in found and _is_users(module):
            found[module.__name__] = module
            waiting += _imported_by(module)
    return {name: _digest([Path(_file(found[name]))]) for name in sorted(found)}


@functools.cache
def own_code() -> str:
    """Return a digest of Meshwright's own files, which tells apart equal version numbers."""
    return _digest(sorted(Path(__file__).parent.parent.rglob("*.py")))


def _module_of(value: Any) -> ModuleType | None:
    """Return the module that defines a function, a class, or the class of an object."""
    while isinstance(value, functools.partial):
        value = value.func
    defined = inspect.isroutine(value) or inspect.isclass(value)
    return sys.modules.get(getattr(value if defined else type(value), "__module__", None) or "")


def _imported_by(module: ModuleType) -> Iterator[ModuleType]:
    for value in list(vars(module).values()):
        if isinstance(value, ModuleType):
            yield value
        elif (inspect.isclass(value) or inspect.isfunction(value)) and (
            source := _module_of(value)
        ):
            yield source


def _is_users(module: ModuleType) -> bool:
    file = _file(module)
    return bool(file) and is_users_file(file) and Path(file).is_file()


def _file(module: Any) -> str:
    return str(getattr(module, "__file__", None) or "")


def _digest(files: list[Path]) -> str:
    content = hashlib.sha256()
    for file in files:
        # Lengths keep the content of one file from counting as that of the next.
        text = file.read_bytes()
        content.update(f"{file.name} {len(text)}\n".encode() + text)
    return content.hexdigest()[:12]
