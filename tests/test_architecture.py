"""Imports only go down: every import of src/meshwright against the layers in the documentation."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.cli.commands import COMMANDS

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "meshwright"
ARCHITECTURE = ROOT / "docs" / "architecture.md"

NEIGHBOURS = {
    ("compiled", "program"),
    ("pipeline", "sharding"),
    ("plan", "config"),
    ("planner", "ledgers"),
}
"""Imports within a layer that the documentation explains."""

BESIDE = {
    "models": set[str](),
    "tasks": {"config", "errors", "program", "weighted"},
    "distributed": {
        "errors",
        "weighted",
        "trees",
        "runtime",
        "text",
        "mesh",
        "hardware",
        "config",
        "data",
        "processes",
        "step",
        "pipeline",
        "plan",
        "recipe",
        "launch",
        "trainer",
    },
}
"""What the packages beside the layers may import."""

CIRCLES_LEFT = [
    {f"meshwright.{package}.{module}" for module in modules.split()}
    for package, modules in (
        ("program.evaluate", "control_flow evaluator"),
        ("trainer.incidents", "replay replay_text"),
        ("drill", "evidence fault launched scene"),
    )
]
"""Modules that still import each other, all for types only; no others may."""

FACADE = {"__init__", "__main__"}
"""The package's own two files, which stand above everything."""


Layers = dict[str, int | None]
"""By package, its layer; None for those beside the layers."""


def listing() -> tuple[Layers, dict[str, Layers]]:
    """Read the listing: packages and their layers, and those of subpackages by package."""
    text = re.search(r"```text\nsrc/meshwright/\n(.*?)```", ARCHITECTURE.read_text(), re.S)
    assert text, f"{ARCHITECTURE} has no listing of packages"
    lines = re.findall(r"^(  |    )(\w+)(?:/|\.py) +([\d–]+)  \S", text[1], re.M)
    assert len(lines) == len(text[1].splitlines()), "a line of the listing is not readable"
    layers, within, package = dict[str, int | None](), dict[str, Layers](), ""
    for indent, name, layer in lines:
        number = None if layer == "–" else int(layer)
        if len(indent) == 2:
            package = name
            layers[name] = number
        else:
            within.setdefault(package, {})[name] = number
    return layers, within


def packages_on_disk(folder: Path = SOURCE, *, modules: bool = True) -> set[str]:
    names = {path.stem for path in folder.glob("*.py")} if modules else set()
    names |= {path.name for path in folder.iterdir() if path.is_dir()}
    return names - FACADE - {"__pycache__"}


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield every statement inside a node; going through expressions would take far longer."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        children = getattr(node, name, ())
        for child in children if isinstance(children, list) else ():
            if isinstance(child, ast.stmt):
                yield child
            yield from statements(child)


@functools.cache
def imports(path: Path, source: Path = SOURCE) -> tuple[str, ...]:
    """Return the modules of meshwright a file imports, anywhere in it, as dotted names."""
    package = ("meshwright", *path.relative_to(source).parent.parts)
    found: list[str] = []
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *filter(None, [node.module])])
            found += [f"{base}.{alias.name}" for alias in node.names]
    return tuple(name for name in found if name.split(".")[0] == "meshwright")


def imported(package: str) -> dict[str, set[str]]:
    """Return what a package, such as ``step`` or ``program/trace``, imports beside itself.

    These are packages next to it, each with the files that import it.
    """
    *above, name = package.split("/")
    files = [SOURCE / f"{package}.py"] if (SOURCE / f"{package}.py").exists() else []
    files += sorted((SOURCE / package).rglob("*.py"))
    targets: dict[str, set[str]] = {}
    for file in files:
        for module in imports(file):
            parts = [*module.split(".")[1:], ""]
            target = parts[len(above)] if parts[: len(above)] == above else name
            if target != name:
                targets.setdefault(target, set()).add(str(file.relative_to(ROOT)))
    return targets


def allowed(package: str, layers: Layers) -> set[str]:
    layer = layers[package]
    if layer is None:
        return BESIDE.get(package, set())
    below = {name for name, other in layers.items() if other is None or other < layer}
    below.discard("distributed")  # it stands above what it is thin over
    return below | {target for source, target in NEIGHBOURS if source == package}


def test_the_listing_names_every_package():
    layers, within = listing()
    assert set(layers) == packages_on_disk()
    for package, inner in within.items():
        assert set(inner) == packages_on_disk(SOURCE / package, modules=False)


def test_the_page_names_modules_that_exist():
    text = ARCHITECTURE.read_text()
    for name in re.findall(r"`((?:\w+/)+\w+)`", text):
        if (SOURCE / name.split("/")[0]).is_dir():
            path = SOURCE / name
            assert path.is_dir() or path.with_suffix(".py").exists(), name


@pytest.mark.parametrize("package", sorted(packages_on_disk()))
def test_imports_only_go_down(package):
    layers, _ = listing()
    assert package in layers, f"{package} is not in the listing of {ARCHITECTURE.name}"
    wrong = {
        t: files for t, files in imported(package).items() if t not in allowed(package, layers)
    }
    assert not wrong, f"{package} (layer {layers[package]}) must not import {wrong}"


@pytest.mark.parametrize("package", ["pipeline", "program", "trainer"])
def test_imports_within_a_package_only_go_down(package):
    layers = listing()[1][package]
    for name, layer in layers.items():
        targets = imported(f"{package}/{name}")
        wrong = {t: files for t, files in targets.items() if layers.get(t, 0) >= layer}
        assert not wrong, f"{package}/{name} (layer {layer}) must not import {wrong}"


def test_nothing_above_or_beside_is_allowed_without_a_reason():
    layers, _ = listing()
    assert not {"trainer", "cli", "step"} & allowed("sharding", layers)
    assert "sharding" not in allowed("program", layers)
    assert allowed("models", layers) == set()


def test_the_check_sees_imports_of_every_form(tmp_path):
    (tmp_path / "step").mkdir()
    file = tmp_path / "step" / "own.py"
    file.write_text(
        "import meshwright.cli.main\nfrom meshwright import trainer\nfrom ..recipe import x\n"
        "from . import state\ndef f():\n    from meshwright.data.order import y\n"
    )
    found = {name.split(".")[1] for name in imports(file, tmp_path)}
    assert found == {"cli", "trainer", "recipe", "step", "data"}


def import_graph(source: Path = SOURCE) -> dict[str, set[str]]:
    """Return the modules that each module imports, anywhere in it, types included."""
    files = {module_name(file, source): file for file in source.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for module, file in files.items():
        graph[module] = set()
        for name in imports(file, source):
            while name not in files:
                name = name.rpartition(".")[0]
            graph[module] |= {name} - {module}
    return graph


def module_name(file: Path, source: Path) -> str:
    parts = ("meshwright", *file.relative_to(source).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the sets of modules that reach each other."""
    # What imports nothing that is left is in no circle.
    left = dict(graph)
    while free := [module for module, targets in left.items() if not targets & left.keys()]:
        for module in free:
            del left[module]
    reached: dict[str, set[str]] = {}
    for start in left:
        reached[start], waiting = set(), list(left[start] & left.keys())
        while waiting:
            if (module := waiting.pop()) not in reached[start]:
                reached[start].add(module)
                waiting += left[module] & left.keys()
    return {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in left
        if module in reached[module]
    }


def test_no_modules_import_each_other_in_a_circle():
    found = circles(import_graph())
    new = [sorted(circle) for circle in found if not any(circle <= old for old in CIRCLES_LEFT)]
    assert not new


def test_the_check_of_circles_sees_imports_in_functions_and_for_types(tmp_path):
    (tmp_path / "one.py").write_text("def f():\n    from meshwright.two import x\n")
    (tmp_path / "two.py").write_text("if TYPE_CHECKING:\n    from meshwright.one import f\n")
    (tmp_path / "three.py").write_text("from meshwright import one\n")
    (tmp_path / "__init__.py").touch()
    assert circles(import_graph(tmp_path)) == {frozenset({"meshwright.one", "meshwright.two"})}


def packages_by_name(source: Path = SOURCE) -> dict[str, set[str]]:
    """Return the names of modules and packages, each with the packages that have one of it.

    A package's main module, ``x/x.py``, counts as the package itself.
    """
    packages: dict[str, set[str]] = {}
    for file in source.rglob("*.py"):
        module = file.parent if file.stem in FACADE else file.with_suffix("")
        if module.name == module.parent.name:
            module = module.parent
        if module != source:
            packages.setdefault(module.name, set()).add(
                module.parent.relative_to(source).as_posix()
            )
    return packages


def shared_names(packages: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the names that several packages use, other than commands.

    A command in ``cli`` has the name of the package it is a front end for.
    """
    return {
        name: parents
        for name, parents in packages.items()
        if len(parents - {"cli"} if name in COMMANDS else parents) > 1
    }


def test_no_two_modules_share_a_name():
    shared = shared_names(packages_by_name())
    assert not shared, f"rename all but one, so that a name says which module is meant: {shared}"


def test_the_check_of_names_knows_commands(tmp_path):
    files = ("cli/train.py", "train/__init__.py", "train/train.py", "mesh/draw.py",
             "data/read.py", "report/deep/read.py", "__init__.py")  # fmt: skip
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert shared_names(packages_by_name(tmp_path)) == {"read": {"data", "report/deep"}}
