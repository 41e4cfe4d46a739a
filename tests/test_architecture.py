"""Imports only go down: every import of src/meshwright against the house in the documentation."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.cli.commands import COMMANDS

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "meshwright"
ARCHITECTURE = ROOT / "docs" / "architecture.md"

NEIGHBOURS = {
    ("config", "hardware"),
    ("config", "mesh"),
    ("pipeline", "program"),
    ("pipeline", "sharding"),
    ("plan", "config"),
    ("plan", "mesh"),
    ("sharding", "program"),
}
"""Imports within a floor that the documentation explains."""

BESIDE = {
    "models": set[str](),
    "tasks": {"errors", "weighted"},
    "distributed": {
        "errors",
        "weighted",
        "trees",
        "lazy",
        "jax_internals",
        "mesh",
        "hardware",
        "config",
        "processes",
        "step",
        "pipeline",
        "plan",
        "recipe",
        "trainer",
    },
}
"""What the rooms without a floor may import."""

PARALLEL = {
    "draw": {"mesh", "pipeline"},
    "svg": {"mesh", "pipeline"},
}
"""Modules that share a name because their packages do the same for different things."""

PENDING = {
    "advice",
    "arguments",
    "arrays",
    "contract",
    "distributed",
    "facts",
    "feed",
    "forward",
    "given",
    "gradients",
    "jsonl",
    "lines",
    "local",
    "make",
    "parts",
    "program",
    "read",
    "reduce",
    "report",
    "slicing",
    "task",
    "trainer",
}
"""Names that several modules still share; none may be added, and those that are gone must go."""

FACADE = {"__init__", "__main__"}
"""The package's own two files, which stand above everything."""


def house() -> dict[str, int | None]:
    """Read the listing: rooms and their floors, None for those beside the house."""
    listing = re.search(r"```text\nsrc/meshwright/\n(.*?)```", ARCHITECTURE.read_text(), re.S)
    assert listing, f"{ARCHITECTURE} has no listing of the house"
    rooms = re.findall(r"^  (\w+)(?:/|\.py) +([\d–])  \S", listing[1], re.M)
    assert len(rooms) == len(listing[1].splitlines()), "a line of the listing is not readable"
    return {name: None if floor == "–" else int(floor) for name, floor in rooms}


def rooms_on_disk() -> set[str]:
    found = {path.stem for path in SOURCE.glob("*.py")}
    found |= {path.name for path in SOURCE.iterdir() if path.is_dir()}
    return found - FACADE - {"__pycache__"}


def imports(path: Path, source: Path = SOURCE) -> Iterator[str]:
    """Yield the modules of meshwright a file imports, anywhere in it, as dotted names."""
    package = ("meshwright", *path.relative_to(source).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "meshwright")


def rooms_imported(room: str) -> dict[str, set[str]]:
    """Return the other rooms a room imports, each with the files that do so."""
    files = [SOURCE / f"{room}.py"] if (SOURCE / f"{room}.py").exists() else []
    files += sorted((SOURCE / room).rglob("*.py"))
    found: dict[str, set[str]] = {}
    for file in files:
        for name in imports(file):
            target = f"{name}.".split(".")[1]
            if target != room:
                found.setdefault(target, set()).add(str(file.relative_to(ROOT)))
    return found


def allowed(room: str, floors: dict[str, int | None]) -> set[str]:
    floor = floors[room]
    if floor is None:
        return BESIDE.get(room, set())
    below = {name for name, other in floors.items() if other is None or other < floor}
    return below | {target for source, target in NEIGHBOURS if source == room}


def test_the_listing_names_every_room():
    assert set(house()) == rooms_on_disk()


def test_the_documentation_names_every_file_of_program():
    table = ARCHITECTURE.read_text().partition("## The files of `program/`")[2]
    named = set(re.findall(r"`(\w+)`", table.partition("\n## ")[0]))
    files = {path.stem for path in (SOURCE / "program").iterdir()} - {"__init__", "__pycache__"}
    assert named == files


@pytest.mark.parametrize("room", sorted(rooms_on_disk()))
def test_imports_only_go_down(room):
    floors = house()
    assert room in floors, f"{room} is not in the listing of {ARCHITECTURE.name}"
    wrong = {
        t: files for t, files in rooms_imported(room).items() if t not in allowed(room, floors)
    }
    assert not wrong, f"{room} (floor {floors[room]}) must not import {wrong}"


def test_nothing_above_or_beside_is_allowed_without_a_reason():
    floors = house()
    assert not {"trainer", "cli", "step"} & allowed("sharding", floors)
    assert "sharding" not in allowed("program", floors)
    assert allowed("models", floors) == set()


def test_the_check_sees_imports_of_every_form(tmp_path):
    (tmp_path / "step").mkdir()
    file = tmp_path / "step" / "own.py"
    file.write_text(
        "import meshwright.cli.main\nfrom meshwright import trainer\nfrom ..recipe import x\n"
        "from . import state\ndef f():\n    from meshwright.data.order import y\n"
    )
    found = {name.split(".")[1] for name in imports(file, tmp_path)}
    assert found == {"cli", "trainer", "recipe", "step", "data"}


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
    """Return the names that several packages use, other than parallel ones and commands.

    A command in ``cli`` has the name of what it is a front end for.
    """
    shared: dict[str, set[str]] = {}
    for name, parents in packages.items():
        others = parents - {"cli"} if name in COMMANDS else parents
        if len(others - PARALLEL.get(name, set())) + (name in PARALLEL) > 1:
            shared[name] = parents
    return shared


def test_no_two_modules_share_a_name():
    shared = shared_names(packages_by_name())
    new = {name: packages for name, packages in shared.items() if name not in PENDING}
    assert not new, f"rename all but one of these, so that a name says which module is meant: {new}"
    gone = PENDING - set(shared)
    assert not gone, f"no longer shared, so remove it from PENDING in {__file__}: {sorted(gone)}"


def test_parallel_modules_exist():
    packages = packages_by_name()
    missing = {name: wanted - packages.get(name, set()) for name, wanted in PARALLEL.items()}
    assert not any(missing.values()), f"remove what is gone from PARALLEL in {__file__}: {missing}"


def test_the_check_of_names_knows_what_is_parallel(tmp_path):
    files = ("cli/train.py", "train/__init__.py", "train/train.py", "mesh/draw.py",
             "pipeline/draw.py", "data/read.py", "report/deep/read.py", "__init__.py")  # fmt: skip
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert shared_names(packages_by_name(tmp_path)) == {"read": {"data", "report/deep"}}
    (tmp_path / "report" / "draw.py").touch()
    assert set(shared_names(packages_by_name(tmp_path))) == {"read", "draw"}
