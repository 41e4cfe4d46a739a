"""The documentation is true: its code runs, its links lead somewhere, its tables are complete."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from quick import quick_compilation
from real_processes import run_processes

import meshwright as mw
from meshwright import distributed
from meshwright.cli.commands import COMMANDS
from meshwright.cli.main import main
from meshwright.config.describe import describe_keys, settings_page
from meshwright.config.groups import group_options
from meshwright.mesh.svg_drawing import mesh_svg

__all__ = ["quick_compilation"]
ROOT = Path(__file__).parent.parent
MAKEFILE = ROOT / "Makefile"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + DOCS

SLOW = "<!-- slow -->\n"
"""Before a block that `make test-all` runs; `make test` composes the configs of its trainings, and
imports what its code does."""
FENCE = re.compile(rf'^({SLOW})?```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)
NOT_RUN = ("pip", "source")
"""Commands in console blocks that are not run: they would change the environment."""


@dataclass(frozen=True)
class Block:
    """A fenced block; one with a title is a file that the commands and code after it use."""

    language: str
    title: str
    text: str
    line: int
    slow: bool


@dataclass(frozen=True)
class Typed:
    """A command of a console block, the exit code it promises, and the output shown under it."""

    words: list[str]
    exit_code: int
    shown: list[str]


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = [
        Block(
            match[2], match[3] or "", match[4], text[: match.start(4)].count("\n"), bool(match[1])
        )
        for match in FENCE.finditer(text)
    ]
    assert 2 * len(found) == text.count("```"), f"{page.name} has a fence that is not read"
    return found


def commands(text: str) -> list[Typed]:
    """Read a console block: commands start with ``$``, a backslash continues them."""
    found: list[Typed] = []
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            promised = re.search(r"# exits (\d+)$", line)
            words = shlex.split(line[2:], comments=True)
            found.append(Typed(words, int(promised[1]) if promised else 0, []))
        elif line.strip():
            found[-1].shown.append(line.rstrip())
    return found


def imports_of(code: str) -> ast.Module:
    """Return the imports at the top of some code."""
    parsed = ast.parse(code)
    parsed.body = [each for each in parsed.body if isinstance(each, ast.Import | ast.ImportFrom)]
    return parsed


def identifier(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """Give a page an empty working directory; modules it puts there are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("COLUMNS", "250")
    # As after activating the environment.
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in (getattr(module, "__file__", None) or ""):
            del sys.modules[name]


def pages_to_run():
    """Yield every page without its slow blocks, and those that have some with them."""
    for page in PAGES:
        yield pytest.param(page, False, id=identifier(page))
        if SLOW in page.read_text():
            yield pytest.param(page, True, id=f"{identifier(page)} whole", marks=pytest.mark.full)


@pytest.mark.parametrize(("page", "whole"), list(pages_to_run()))
@pytest.mark.usefixtures("quick_compilation")
def test_the_code_of_a_page_runs(page, whole, workplace, capfd):
    namespace = {"__name__": "page"}
    for block in blocks(page):
        if block.title:
            file = workplace / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
        elif block.slow and not whole:
            for typed in commands(block.text) if block.language == "console" else ():
                # A config that a training left has none to be composed from.
                if typed.words[:2] == ["meshwright", "train"] and "--config" not in typed.words:
                    check_command(Typed(["meshwright", "config", *typed.words[2:]], 0, []), capfd)
            if block.language == "python":
                exec(compile(imports_of(block.text), str(page), "exec"), namespace)
        elif block.language == "python":
            # Empty lines before it make tracebacks name the page's own lines.
            exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)
        elif block.language == "console":
            for typed in commands(block.text):
                check_command(typed, capfd)


def check_command(typed: Typed, capfd) -> None:
    program, *arguments = typed.words
    if program == "make":
        assert set(targets(arguments)) <= make_targets(), f"no such target: {typed.words}"
    elif program == "meshwright":
        capfd.readouterr()
        code = main(arguments)
        out, err = capfd.readouterr()
        assert code == typed.exit_code, f"{typed.words}\n{out}\n{err}"
        printed = [line.rstrip() for line in (out + err).splitlines()]
        missing = [line for line in typed.shown if not is_among(line, printed)]
        assert not missing, f"{typed.words} prints no {missing}, but\n{out}\n{err}"
    else:
        assert program in NOT_RUN, f"{program} is neither run nor known to be left alone"


def is_among(shown: str, printed: list[str]) -> bool:
    """Whether a line was printed; … in it stands for anything."""
    pattern = re.compile(".*".join(map(re.escape, shown.split("…"))))
    return any(pattern.fullmatch(line) for line in printed)


def targets(arguments: list[str]) -> Iterator[str]:
    return (word for word in arguments if "=" not in word)


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", MAKEFILE.read_text(), re.M))


def test_a_wrong_exit_code_or_output_is_noticed(capfd):
    good = commands("$ meshwright config mesh.fsdp=x  # exits 2\nerror: `mesh.fsdp=x` is …\n")[0]
    check_command(good, capfd)
    for wrong in (Typed(good.words, 0, []), Typed(good.words, 2, ["something else"])):
        with pytest.raises(AssertionError):
            check_command(wrong, capfd)


def test_extras_that_are_named_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        extra
        for page in PAGES
        for extras in re.findall(r"pip install [^\n]*\.\[([\w,]+)\]", page.read_text())
        for extra in extras.split(",")
    }
    assert named
    assert named <= set(project["optional-dependencies"])


@pytest.mark.parametrize("page", PAGES, ids=identifier)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.is_file(), f"{link} does not exist"
        assert not anchor or anchor in anchors(target), f"{link} has no such heading"


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


def table_rows(text: str) -> list[list[str]]:
    """Return the code spans of each row of the tables in a text."""
    return [re.findall(r"`([^`]+)`", row) for row in re.findall(r"^\| `.*$", text, re.M)]


def test_the_table_of_commands_is_complete():
    rows = table_rows((ROOT / "docs" / "commands.md").read_text())
    assert {row[0] for row in rows} == set(COMMANDS)


def test_the_table_of_config_groups_is_complete():
    section = (ROOT / "docs" / "config.md").read_text().partition("## Groups")[2]
    rows = table_rows(section.partition("\n## ")[0])
    listed = {group: set(words) for group, *words in rows}
    for group, files in group_options().items():
        assert set(files) <= listed.pop(group), group
    assert not listed


def test_the_page_of_settings_is_what_the_schema_says():
    page = (ROOT / "docs" / "settings.md").read_text()
    hint = "run: python -m meshwright.config.describe > docs/settings.md"
    assert page == settings_page(), hint


def test_every_setting_is_documented():
    missing = [key.key for key in describe_keys() if not key.meaning]
    assert not missing, f"config/schema.py does not say what these mean: {missing}"


RETURNED = {
    "meshwright.ledgers.Ledger",
    "meshwright.proof.Certificate",
    "meshwright.trainer.FitResult",
    "meshwright.trainer.PlannedTraining",
}
"""What public functions return; users read these, and do not make them."""


def test_the_api_reference_has_every_public_name_and_what_it_returns():
    page = (ROOT / "docs" / "api.md").read_text()
    listed = re.findall(r"^::: ([\w.]+)$", page, re.M)
    assert len(listed) == len(set(listed))
    public = {f"meshwright.{name}" for name in mw.__all__ if name != "pipeline"}
    for package in (mw.pipeline, distributed):
        public |= {f"{package.__name__}.{name}" for name in package.__all__}
    assert set(listed) == public | RETURNED


def test_the_picture_of_the_mesh_is_what_inspect_draws():
    drawing = mesh_svg(mw.build_mesh({"fsdp": 4, "tensor": 2}))
    assert (ROOT / "docs" / "mesh.svg").read_text() == drawing
    # As on the page: rows of 128 positions, 8 samples a step.
    rows = mesh_svg(mw.build_mesh({"data": 2, "context": 4}), (8, 128))
    assert (ROOT / "docs" / "context.svg").read_text() == rows


@pytest.mark.full
def test_the_program_for_several_processes_trains_in_two():
    page = ROOT / "docs" / "meshes.md"
    program = next(block.text for block in blocks(page) if block.title == "train.py")
    before = """
import json, os, sys
host, _, port = sys.argv[1].partition(":")
os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": sys.argv[2]}
import jax
jax.config.update("jax_num_cpu_devices", 2)
"""
    after = "\nprint(json.dumps([info['global_devices'], list(result.losses.values())]))"
    (devices, losses), second = run_processes(before + program + after, count=2)
    assert second == [devices, losses]
    assert devices == 4
    x = np.random.default_rng(0).normal(size=(64, 32)).astype("float32")
    first_loss = ((nnx.Linear(32, 32, rngs=nnx.Rngs(0))(x) - x[:, ::-1]) ** 2).mean()
    np.testing.assert_allclose(losses[0], first_loss, rtol=1e-6)
    assert losses[-1] < losses[0]


@pytest.mark.full
def test_the_site_builds_and_fetches_nothing_from_elsewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    pages = list(tmp_path.rglob("index.html"))
    assert len(pages) == len(DOCS)
    fetched = re.compile(r'<(?:link|script|img|iframe|source)\b[^>]*(?:src|href)="?(?:https?:)?//')
    for page in pages:
        assert not fetched.search(page.read_text()), page
    reference = (tmp_path / "api" / "index.html").read_text()
    assert 'id="meshwright.Trainer.fit"' in reference, "the docstrings are not in the reference"
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())
    assert any("mw.Trainer" in entry["text"] for entry in index["docs"])
