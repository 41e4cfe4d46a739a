"""Imports only go down: every import of src/meshwright against the house in the documentation."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

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
        "jax_internals",
        "mesh",
        "hardware",
        "config",
        "processes",
        "step",
        "plan",
        "recipe",
        "trainer",
    },
}
"""What the rooms without a floor may import."""

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
