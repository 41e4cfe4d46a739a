"""Finding what a section's ``kind`` names, and checking its arguments."""

import dataclasses
import importlib
import importlib.util
import inspect
import os
import sys
import typing
from collections.abc import Callable, Collection, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from meshwright.config.base import nested_schema, shorten, unknown_key
from meshwright.config.schema import Config
from meshwright.errors import MeshwrightError, UserError, did_you_mean, typed_line
from meshwright.runtime.user_code import (
    count_as_users,
    describe_frames,
    notes,
    users_frames,
    whole_traceback,
)

Builder = Callable[..., Any]


def find_builder(
    section: str, kind: str, known: Collection[str], load: Callable[[str], Builder]
) -> Builder:
    """Return the builder ``kind`` names: one of ``known``, loaded by ``load``, or the user's own.

    The user's own is written ``package.module:attribute`` and imported from the working directory
    or from installed packages.
    """
    if kind in known:
        return load(kind)
    if ":" in kind:
        return import_named(f"{section}.kind={kind}", kind)
    hint = did_you_mean(kind, known)
    raise UserError(
        f"`{section}.kind={kind}` is not known" + (f": {hint}" if hint else ""),
        why=f"known kinds: {', '.join(sorted(known))}",
        fix=f"for your own, write {section}.kind=package.module:Name",
    )


def build(section: str, kind: str, builder: Builder, arguments: Mapping[str, Any]) -> Any:
    """Call a builder; an exception inside it becomes a `UserError` about the config."""
    try:
        return builder(**arguments)
    except MeshwrightError:
        raise
    except Exception as error:
        raise explain_failure(f"{section}.kind={kind} cannot be built", error) from error


def explain_failure(what: str, error: Exception, fix: str = "") -> UserError:
    """Return the error for an exception in code that a config names, with the user's frames."""
    frames = users_frames(error)
    where = f"{os.path.basename(frames[-1].filename)}, line {frames[-1].lineno}: " if frames else ""
    why = [f"{where}{shorten(typed_line(error), 300)}", *notes(error), *describe_frames(error)]
    return UserError(what, why="\n".join(why), fix=fix or whole_traceback())


def check_arguments(
    section: str, builder: Builder, given: Mapping[str, Any], supplied: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Check ``given`` against the builder's signature and return it with types converted.

    ``supplied`` names parameters that the caller passes itself, such as rngs, and the config may
    not.
    """
    parameters = {n: p for n, p in parameters_of(builder).items() if n not in supplied}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {
        n: p for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    }
    for key in given:
        if key not in named and not takes_any:
            raise _unknown_argument(section, key, list(named))
    missing = [n for n, p in named.items() if p.default is p.empty and n not in given]
    if missing:
        raise UserError(
            f"`{section}.{missing[0]}` is missing",
            why=f"{section}.kind needs {', '.join(missing)}",
            fix=f"write {section}.{missing[0]}=…",
        )
    hints = _type_hints(builder)
    return {key: _convert(section, key, value, hints.get(key)) for key, value in given.items()}


def parameters_of(builder: Builder) -> dict[str, inspect.Parameter]:
    """Return the parameters a builder takes; a class's are those of its ``__init__``."""
    # The signature of a module class is that of its metaclass: `*args, **kwargs`.
    function = builder.__init__ if inspect.isclass(builder) else builder
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError) as error:
        # Some functions written in C have no signature.
        raise UserError(
            f"cannot read the signature of {shorten(builder)}", why=str(error)
        ) from None
    if inspect.isclass(builder):
        first = next(iter(parameters.values()), None)
        if first is not None and first.kind is not first.VAR_POSITIONAL:
            # The instance itself, whatever it is called.
            del parameters[first.name]
    return parameters


def defaults_of(builder: Builder) -> dict[str, Any]:
    """Return the parameters of a builder that have a default, and these."""
    return {p.name: p.default for p in parameters_of(builder).values() if p.default is not p.empty}


def _unknown_argument(section: str, key: str, known: list[str]) -> UserError:
    # The section has keys of its own beside the arguments.
    info = Config.model_fields.get(section)
    schema = None if info is None else nested_schema(info.annotation)
    own = [] if schema is None else list(schema.model_fields)
    names = dict.fromkeys([*known, *own])
    error = unknown_key(f"{section}.{key}", [f"{section}.{name}" for name in names])
    left_out = f"where a file sets it, ~{section}.{key} leaves it out"
    return UserError(
        error.what,
        why=error.why or f"{section}.kind takes no arguments",
        fix="\n".join(filter(None, [error.fix, left_out])),
    )


def _convert(section: str, key: str, value: Any, hint: Any) -> Any:
    if hint is None:
        return value
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(
            value
        )
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"]
        raise UserError(
            f"`{section}.{key}={shorten(value)}` is not valid", why=message[0].lower() + message[1:]
        ) from None
    except Exception:
        # Pydantic has no schema for this annotation (an initializer, a dtype).
        return value


def _type_hints(builder: Builder) -> dict[str, Any]:
    function = builder.__init__ if inspect.isclass(builder) else builder
    # Fields a dataclass inherits are annotated with names of another module.
    annotated = builder if dataclasses.is_dataclass(builder) else function
    try:
        return typing.get_type_hints(annotated)
    except Exception:
        # Annotations may use names that are only imported for type checkers.
        return {}


def import_named(setting: str, name: str) -> Builder:
    """Import the user's ``package.module:Name``, of the working directory or installed."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module_name, _, attribute = name.partition(":")
    builder: Any = None
    try:
        builder = importlib.import_module(module_name)
        count_as_users(builder)
        for part in attribute.split("."):
            builder = getattr(builder, part)
    except Exception as error:
        # The user's module may raise anything while it is imported.
        hint = _nearest_name(module_name, attribute, builder)
        raise _cannot_load(setting, typed_line(error), hint) from error
    if not callable(builder):
        raise UserError(f"`{setting}` is not a class or function", why=f"it is {shorten(builder)}")
    return builder


def check_module_exists(setting: str, name: str) -> None:
    """Raise if there is no package for ``package.module:Name``, without importing any code."""
    module = name.partition(":")[0]
    package = module.partition(".")[0]
    if package in sys.modules or PathFinder.find_spec(package, [os.getcwd()]) is not None:
        return
    if package and importlib.util.find_spec(package) is not None:
        return
    why = f"ModuleNotFoundError: No module named {package!r}"
    raise _cannot_load(setting, why, _nearest_name(module, "", None))


def _cannot_load(setting: str, why: str, hint: str) -> UserError:
    return UserError(
        f"cannot load `{setting}`" + (f": {hint}" if hint else ""),
        why=why,
        fix="write package.module:Name, importable from this directory",
    )


def _nearest_name(module: str, attribute: str, found: Any) -> str:
    """Suggest a name of the user's module, or a module of the working directory, if one is near."""
    if found is None:
        return did_you_mean(module, [path.stem for path in Path.cwd().glob("*.py")])
    wrong = next((part for part in attribute.split(".") if not hasattr(found, part)), attribute)
    known = [each for each, value in vars(found).items() if callable(value) and each[0] != "_"]
    return did_you_mean(wrong, known)
