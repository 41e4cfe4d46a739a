"""What commands print at any width, and into files: nothing is cut off, nothing is torn apart."""

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from meshwright.cli.commands import COMMANDS
from meshwright.cli.main import main
from meshwright.text.columns import Columns, Indented

ROWS = [("model.kind", Text("4", "green"), "of model/gpt2_nano.yaml, with words"), (),
        ("optimizer.schedule", "12", "")]  # fmt: skip
TABLE = Columns(("key", "size", "origin"), ROWS, right=("size",))


def printed(what: object, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(what, crop=False)
    return console.file.getvalue().splitlines()


@pytest.fixture
def command(capfd, monkeypatch):
    """Run a command in a pipe; with columns, as wide as a terminal of so many."""

    def run(*argv: str, columns: int | None) -> list[str]:
        if columns is None:
            monkeypatch.delenv("COLUMNS", raising=False)
        else:
            monkeypatch.setenv("COLUMNS", str(columns))
        assert main(argv) == 0
        return capfd.readouterr().out.splitlines()

    return run


def test_columns_are_aligned_where_they_fit():
    assert printed(TABLE, 80) == [
        "key                 size  origin",
        "model.kind             4  of model/gpt2_nano.yaml, with words",
        "",
        "optimizer.schedule    12",
    ]


def test_a_last_column_of_text_wraps_within_itself():
    assert printed(TABLE, 50)[1:3] == [
        "model.kind             4  of model/gpt2_nano.yaml,",
        "                          with words",
    ]


def test_a_narrow_table_lists_the_cells_below_the_first():
    assert printed(TABLE, 40) == [
        "model.kind",
        "    size 4",
        "    origin of model/gpt2_nano.yaml, with",
        "    words",
        "",
        "optimizer.schedule",
        "    size 12",
    ]


def test_a_column_of_numbers_is_never_wrapped():
    table = Columns(("module", "sent"), [("blocks.0.attention", "1.5 MiB")], right=("sent",))
    assert printed(table, 24) == ["blocks.0.attention", "    sent 1.5 MiB"]


def test_wrapped_lines_are_indented_like_the_first_or_more():
    assert printed(Indented("versions  jax 0.10.2, flax 0.12.8\nand more", 10, first=0), 24) == [
        "versions  jax 0.10.2,",
        "          flax 0.12.8",
        "          and more",
    ]


@pytest.mark.parametrize("argv", [("config",), ("config", "--keys")], ids=" ".join)
def test_no_word_is_lost_at_any_width(command, argv):
    whole = command(*argv, columns=None)
    # In a file, each row is one line, whatever its length.
    rows = [line for line in whole[1:] if line]
    assert all(re.match(r"[a-z_]+(\.\w+)*(  |$)", line) for line in rows)
    for columns in (60, 80, 120):
        lines = command(*argv, columns=columns)
        assert max(map(cell_len, lines)) <= columns
        assert not [line for line in lines if line != line.rstrip() or "\x1b" in line]
        # A word longer than its column goes on in the next line.
        text = "".join("".join(lines).split())
        for row in rows:
            assert all("".join(cell.split()) in text for cell in re.split("  +", row)), row


def test_inspect_keeps_a_parameter_and_its_reason_together(command):
    words = ("inspect", "model=mlp", "model.widths=[784,64,10]", "mesh.fsdp=8")
    narrow, whole = command(*words, columns=44), command(*words, columns=None)
    start = next(n for n, line in enumerate(whole) if line.startswith("layers.0.kernel  784×64"))
    reason = whole[start + 1].strip()
    at = narrow.index("layers.0.kernel")
    assert narrow[at + 1 : at + 5] == [
        "    shape 784×64",
        "    mesh axes by dim [fsdp, ·]",
        "    on a device 25.1 kB",
        f"    {reason}",
    ]
    assert max(map(cell_len, narrow)) <= 44


@pytest.mark.parametrize("name", COMMANDS)
def test_help_wraps_beside_the_names(command, name):
    lines = command(name, "--help", columns=60)
    flags = lines[lines.index("flags:") + 1 :]
    listed = [line for line in flags if line.startswith("  ")]
    assert max(map(len, listed)) <= 60
