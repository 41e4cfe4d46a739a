"""Every name the project has: files, modules, classes and their members, settings, commands.

Nothing is imported that computes: Python names are read from the sources.
"""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from meshwright.cli.commands import COMMANDS
from meshwright.config.describe import describe_keys
from meshwright.config.groups import CONF_DIR
from meshwright.mesh.axes import ALIASES

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "meshwright"

CONSTRUCTORS = ("__init__", "__post_init__")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Class:
    """A class.

    Attributes:
        members: its methods, fields, and other attributes.
        bases: the names of its bases.
        parameters: the parameters of its ``__init__``; ``**`` among them for any name.
    """

    members: set[str] = field(default_factory=set)
    bases: list[str] = field(default_factory=list)
    parameters: set[str] = field(default_factory=set)


@dataclass
class Sources:
    """The names in the sources.

    Attributes:
        modules: by dotted name, what a module defines or imports.
        classes: by name; several classes of one name are one, with the arguments of the first.
        parameters: the parameters of all functions, and the members of all classes.
        packaged: the same by package.
        text: all sources, one after another.
    """

    modules: dict[str, set[str]] = field(default_factory=dict)
    classes: dict[str, Class] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)
    packaged: dict[str, set[str]] = field(default_factory=dict)
    text: str = ""

    def members(self, name: str) -> set[str]:
        """Return the members of a class and of those of its bases that are in the sources."""
        return {member for each in self._with_bases(name) for member in each.members}

    def accepted(self, name: str) -> set[str]:
        """Return the arguments that a class takes: parameters of ``__init__``, or fields."""
        return {
            taken for each in self._with_bases(name) for taken in each.parameters | each.members
        }

    def _with_bases(self, name: str) -> list[Class]:
        names = [name]
        for each in names:
            names += [b for b in self.classes[each].bases if b in self.classes and b not in names]
        return [self.classes[each] for each in names]


@functools.cache
def sources() -> Sources:
    """Read all sources."""
    found, texts = Sources(), list[str]()
    # The class-based API comes last: its classes have names that others have, too.
    for file in sorted(SOURCE.rglob("*.py"), key=lambda file: "distributed" in file.parts):
        text = file.read_text()
        texts.append(text)
        tree = ast.parse(text)
        parts = file.relative_to(SOURCE.parent).with_suffix("").parts
        names = found.modules.setdefault(".".join(p for p in parts if p != "__init__"), set())
        names |= _top_level(tree)
        package = found.packaged.setdefault(parts[1], set())
        for node in _statements(tree):
            if isinstance(node, Function):
                package |= _parameters(node)
            elif isinstance(node, ast.ClassDef):
                read = found.classes.setdefault(node.name, Class())
                _read_class(node, read)
                package |= read.members
    found.text = "".join(texts)
    for package in found.packaged.values():
        found.parameters |= package
    return found


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all statements below it; expressions, which are most nodes, hold none."""
    yield tree
    for field_name in ("body", "handlers", "orelse", "finalbody", "cases"):
        inner = getattr(tree, field_name, ())
        for node in inner if isinstance(inner, list) else ():
            yield from _statements(node)


def _top_level(tree: ast.Module) -> set[str]:
    """Return what a module defines; a lazy facade imports its names for type checkers alone."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | Function):
            names.add(node.name)
        elif isinstance(node, ast.If):
            names |= _top_level(ast.Module(node.body, []))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _read_class(node: ast.ClassDef, found: Class) -> None:
    first = not found.members
    found.bases += [base.id for base in node.bases if isinstance(base, ast.Name)]
    for inner in node.body:
        if isinstance(inner, Function):
            found.members.add(inner.name)
            if inner.name == "__init__" and first:
                found.parameters |= _parameters(inner)
        elif isinstance(inner, ast.AnnAssign | ast.Assign):
            targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
            found.members |= {target.id for target in targets if isinstance(target, ast.Name)}
    constructors = [inner for inner in node.body if getattr(inner, "name", "") in CONSTRUCTORS]
    for inner in (each for constructor in constructors for each in ast.walk(constructor)):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            found.members.add(inner.attr)


def _parameters(node: Function) -> set[str]:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {argument.arg for argument in every} | ({"**"} if arguments.kwarg else set())


@functools.cache
def settings() -> dict[str, set[str] | None]:
    """Return every key of the config, with its values where they are a fixed choice."""
    keys: dict[str, set[str] | None] = {}
    for key in describe_keys():
        words = re.split(", | or ", key.allowed)
        fixed = len(words) > 1 and "text" not in words and all(map(str.isidentifier, words))
        keys[key.key] = set(words) if fixed else None
    for group, package in (("model", "models"), ("data", "data"), ("task", "tasks")):
        keys |= {f"{group}.{name}": None for name in sources().packaged[package]}
    for file in CONF_DIR.glob("*/*.yaml"):
        values = yaml.safe_load(file.read_text()) or {}
        if file.parent.name != "experiment":
            keys |= {f"{file.parent.name}.{name}": None for name in values} | keys
    keys |= {f"mesh.{alias}": None for alias in ALIASES} | {"hydra.run.dir": None}
    return keys


@functools.cache
def flags() -> set[str]:
    """Return the flags of all commands, and those of the project's scripts."""
    own = {flag.name for command in COMMANDS.values() for flag in command.all_flags}
    return own | {flag for text in _scripts() for flag in re.findall(r'"(--[\w-]+)"', text)}


def _scripts() -> Iterator[str]:
    for folder in ("benchmarks", "examples", "tools"):
        for file in (ROOT / folder).glob("*.py"):
            yield file.read_text()


@functools.cache
def make_targets() -> set[str]:
    """Return the targets of the Makefile."""
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
