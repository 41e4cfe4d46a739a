"""The table of faults names tests that exist, and all of them."""

import re
from pathlib import Path

HERE = Path(__file__).parent
NAMED = re.compile(r"`((?:\w+/)*test_\w+)`: ((?:`test_[\w\[\]]+`\*?(?:, )?)+)")


def test_every_row_names_tests_that_exist_and_no_test_is_left_out():
    named: dict[Path, set[str]] = {}
    for file, tests in NAMED.findall((HERE / "README.md").read_text()):
        own = HERE / f"{file}.py"
        path = own if own.exists() else HERE.parent / f"{file}.py"
        named.setdefault(path, set()).update(re.findall(r"`(test_\w+)", tests))
    for path, tests in named.items():
        found = set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))
        assert tests <= found, path
        assert path.parent != HERE or tests == found, path
    assert {p.name for p in HERE.glob("test_*.py")} == {
        *(path.name for path in named if path.parent == HERE),
        Path(__file__).name,
    }
