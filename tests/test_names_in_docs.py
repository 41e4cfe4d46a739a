"""Names in backticks on every page exist, and figures from records are what was measured."""

import ast
import builtins
import functools
import json
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from names_of_project import (
    ROOT,
    SOURCE,
    flags,
    make_targets,
    settings,
    sources,
)

from meshwright.cli.commands import COMMANDS
from meshwright.config.groups import CONF_DIR, group_options
from meshwright.mesh.axes import ALIASES, AXES

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
RESULTS = ROOT / "benchmarks" / "results"
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)

ALL_OURS = "docs/architecture.md"
"""The page on which every single word in backticks is a name of the project, too."""

INSTANCES = {"trainer": "Trainer", "result": "FitResult", "assembled": "Assembled"}
"""Variables of the pages' examples, and the classes they are instances of."""

WRITTEN = {"profile/profile.json", "profile/trace"}
"""Files of runs in a folder that a package has the name of."""

FOREIGN = {
    "--xla_gpu_deterministic_ops",
    "check_vma",
    "multiprocessing_context",
    "nested",
}
"""Arguments and flags of JAX, PyTorch and Python that pages name."""


EXAMPLES = {"task.smoothing"}
"""Arguments of functions that pages define."""


def spans(page: Path) -> Iterator[str]:
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("", page.read_text()), flags=re.S)
    for span in re.findall(r"`([^`]+)`", text):
        yield " ".join(span.split())


def identifier(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=identifier)
def test_names_in_backticks_exist(page):
    strict = identifier(page) == ALL_OURS
    dead = {span: why for span in spans(page) if (why := missing(span, strict=strict))}
    assert not dead, f"{page.name} names what does not exist: {dead}"


@pytest.mark.parametrize(
    "span",
    [
        "step/no_such_module",
        "step/assemble.no_such_function",
        "benchmarks/no_such.py",
        "no_such_file.py",
        "no_such.jsonl",
        "mw.NoSuch",
        "mw.Trainer.no_such",
        "mw.Trainer(no_such=…)",
        "Trainer.no_such",
        "result.no_such",
        "meshwright.no_such",
        "meshwright.planner.no_such",
        "training.no_such",
        "training.no_such=3",
        "sharding.remat=no_such",
        "model=no_such",
        "kernels=no_such",
        "no_such=3",
        "meshwright no_such",
        "meshwright plan --keys",
        "meshwright train training.no_such=1",
        "--no-such",
        "make no_such",
        "MESHWRIGHT_NO_SUCH",
    ],
)
def test_a_name_that_does_not_exist_is_noticed(span):
    assert missing(span)


def test_a_single_word_is_checked_where_all_names_are_ours():
    assert missing("no_such", strict=True)
    assert not missing("no_such")


def missing(span: str, *, strict: bool = False) -> str:
    """Return what a span names that does not exist; empty if nothing, or if it names nothing."""
    words = span.removeprefix("$ ").split()
    if words[0] in COMMANDS and len(words) > 1 and words[1].startswith("--"):
        words = ["meshwright", *words]
    if words[0] == "make" and len(words) > 1:
        return "" if words[1] in make_targets() else f"target {words[1]}"
    if words[0] == "meshwright" and len(words) > 1:
        return missing_of_command(words[1:])
    if words[0].startswith("--"):
        return missing_flag(words[0], flags())
    if span.endswith(")") and (call := parsed_call(span)):
        return missing_of_call(call)
    if all(re.fullmatch(r"[~+]*[a-z][\w.]*=\S*", word) for word in words):
        return next(filter(None, map(missing_setting, words)), "")
    checks = [missing_path, missing_file, missing_variable, missing_dotted]
    found = next(filter(None, (check(word) for word in words for check in checks)), "")
    return found or (missing_word(span) if strict else "")


def missing_of_command(words: list[str]) -> str:
    name, *rest = words
    if not re.fullmatch(r"[a-z_]+", name):
        return ""
    if name not in COMMANDS:
        return f"command {name}"
    if "--" in rest:
        after = rest.index("--") + 1
        if inner := missing_of_command(rest[after:]):
            return inner
        rest = rest[: after - 1]
    known = {flag.name for flag in COMMANDS[name].all_flags}
    for word in rest:
        if word.startswith("--"):
            if dead := missing_flag(word, known):
                return dead
        elif "=" in word and (dead := missing_setting(word)):
            return dead
    return ""


def missing_flag(word: str, known: set[str]) -> str:
    name = word.partition("=")[0]
    return "" if name in known | FOREIGN or name == "--" else f"flag {name}"


def missing_setting(word: str) -> str:
    """Check a setting of the config, or an argument of a function, with its value."""
    key, _, value = word.lstrip("~+").partition("=")
    fixed = re.fullmatch(r"[a-z][a-z0-9_]*", value) is not None
    if key in group_options():
        if not fixed or value in ("true", "false") or (key in AXES and value.isdigit()):
            return ""
        options = group_options()[key]
        return "" if value in options else f"{key}={value}"
    if key in EXAMPLES:
        return ""
    if key in settings():
        choices = settings()[key]
        dead = choices is not None and fixed and len(value) > 1 and value not in choices
        return f"{key}={value}" if dead else ""
    if "." in key:
        return f"key {key}" if key.partition(".")[0] in sections() else ""
    known = sources().parameters | FOREIGN | set(AXES) | set(ALIASES)
    return "" if key in known else f"argument {key}"


@functools.cache
def sections() -> set[str]:
    return {key.partition(".")[0] for key in settings() if "." in key}


def missing_path(word: str) -> str:
    """Check a path of the project, with the name of something in it after a dot."""
    if not re.fullmatch(r"[\w.-]+/[\w./-]*", word) or word in WRITTEN:
        return ""
    first = word.partition("/")[0]
    ours = [root for root in (ROOT, SOURCE, CONF_DIR) if (root / first).is_dir()]
    if not ours or first.startswith(".") or word == "meshwright/":
        return ""
    if any((root / f"{word}{end}").exists() for root in ours for end in ("", ".py")):
        return ""
    path, _, name = word.rpartition(".")
    module = f"meshwright.{path.replace('/', '.')}"
    return "" if name in sources().modules.get(module, ()) else f"path {word}"


def missing_file(word: str) -> str:
    """Check the name of a file: one of the project, or one that runs read or write."""
    if re.fullmatch(r"\w+\.(py|md|toml)", word):
        found = (ROOT / word).exists() or any(SOURCE.rglob(word))
        return "" if found else f"file {word}"
    if re.fullmatch(r"\w+\.(json|jsonl|yaml|npz|lock|log)", word):
        return "" if word in sources().text else f"file {word}"
    return ""


def missing_variable(word: str) -> str:
    """Check a variable of the environment."""
    name = word.partition("=")[0]
    ours = name.startswith("MESHWRIGHT_")
    return f"variable {name}" if ours and name not in sources().text else ""


def missing_dotted(word: str) -> str:
    """Check a Python name or a key of the config."""
    name = word.partition("(")[0]
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name) or is_file(name):
        return ""
    first, *rest = name.split(".")
    if first in ("mw", "meshwright"):
        return "" if resolves(rest) else f"name {name}"
    if first in sections():
        modules = [each for each in sources().modules if each.endswith(f".{first}")]
        found = name in settings() or any(rest[0] in sources().modules[m] for m in modules)
        return "" if found or is_module(name) else f"key {name}"
    first = INSTANCES.get(first, first)
    if first in sources().classes:
        return "" if rest[0] in sources().members(first) else f"name {name}"
    modules = [each for each in sources().modules if each.endswith(f".{first}")]
    found = not modules or any(rest[0] in sources().modules[each] for each in modules)
    return "" if found or is_module(name) else f"name {name}"


def is_file(name: str) -> bool:
    return re.search(r"\.(py|md|toml|json|jsonl|yaml|npz|npy|lock|log|damaged)$", name) is not None


def is_module(name: str) -> bool:
    return any(module.endswith(f".{name}") for module in sources().modules)


def resolves(parts: list[str]) -> bool:
    """Whether a dotted name below `meshwright` is a module, something in one, or a member."""
    for end in range(len(parts), -1, -1):
        module = ".".join(["meshwright", *parts[:end]])
        if module in sources().modules:
            break
    left = parts[end:]
    if not left:
        return True
    if left[0] not in sources().modules[module]:
        return False
    if len(left) == 1 or left[0] not in sources().classes:
        return len(left) == 1
    return left[1] in sources().members(left[0])


def parsed_call(span: str) -> ast.Call | None:
    try:
        call = ast.parse(span.replace("…", "..."), mode="eval").body
    except SyntaxError:
        return None
    return call if isinstance(call, ast.Call) else None


def missing_of_call(call: ast.Call) -> str:
    """Check the function or class that is called, and the names of its arguments."""
    name = ast.unparse(call.func)
    if dead := missing_dotted(name):
        return dead
    last = name.rpartition(".")[2]
    if last not in sources().classes or name.startswith(("nnx.", "nn.", "jax.", "optax.")):
        return ""
    taken = sources().accepted(last)
    given = {keyword.arg for keyword in call.keywords if keyword.arg}
    dead = set() if "**" in taken else given - taken
    return f"arguments {sorted(dead)} of {last}" if dead else ""


def missing_word(span: str) -> str:
    """Check a single word: a module, a class, a function, a key, a command, an axis."""
    name = span.rstrip("/")
    if not re.fullmatch(r"[A-Za-z_]\w+", name):
        return ""
    modules = sources().modules
    known = {*COMMANDS, *AXES, *ALIASES, *sources().classes, *sources().parameters}
    known |= {part for module in modules for part in module.split(".")} | sections()
    found = name in known or any(name in names for names in modules.values())
    return "" if found or hasattr(builtins, name) else name


COMMENT = r"<!-- (\w+): (max|median|first) ([\w .-]+?)(?: = (.+?))? -->"
"""A figure's source: the record, which of its values, and their path.

It stands right after the figure, ``7%<!-- gpu_sustained: max rows.memory_error -->``. Before a
fenced block it repeats the figure as it is in the block, after ``=``.
"""

QUOTED = re.compile(rf"(?:(less than )?([\d.,]+) ?(%|×|GiB|MB)?)?{COMMENT}")

SUMMARIES: dict[str, Callable[[list[float]], float]] = {
    "max": lambda values: max(map(abs, values)),
    "median": lambda values: statistics.median(map(abs, values)),
    "first": lambda values: values[0],
}

SCALES = {"error %": 100, "overlapped %": 100, "mib GiB": 1 / 1024, "bytes MB": 1e-6}
"""By the last word of a field's name and the unit of the page, what to multiply by."""


def recorded(record: str, path: str) -> list[float]:
    """Return the numbers at a dotted path of a record; lists are entered."""
    values: list[Any] = [json.loads((RESULTS / f"{record}.json").read_text())]
    for key in path.split("."):
        values = [value[key] for value in values if value.get(key) is not None]
        values = [each for v in values for each in (v if isinstance(v, list) else [v])]
    return values


def wrong_figure(match: re.Match[str]) -> str:
    """Return what is wrong with a figure; empty if it is what was recorded, rounded."""
    less, number, unit, record, summary, path, repeated = match.groups()
    if repeated:
        number, _, unit = re.fullmatch(r"([\d.,]+)( ?)(\S*)", repeated).groups()
        block = match.string[match.end() :].partition("```\n")[0]
        if not re.match(r"\s*(<!--.*-->\s*)*```", block) or repeated not in block:
            return f"{match[0]}: not in the block after it"
    scale = SCALES.get(f"{re.split(r'[._]', path)[-1]} {unit}", 1)
    value = SUMMARIES[summary](recorded(record, path)) * scale
    figure, digits = float(number.replace(",", "")), len(number.partition(".")[2])
    right = value < figure if less else round(value, digits) == figure
    return "" if right else f"{match[0]}: recorded is {value:.4g}"


@pytest.mark.parametrize("page", [p for p in PAGES if p.stem != "benchmarks"], ids=identifier)
def test_figures_from_records_are_what_was_measured(page):
    text = page.read_text()
    wrong = list(filter(None, map(wrong_figure, QUOTED.finditer(text))))
    assert not wrong
    for paragraph in FENCE.sub("", text).split("\n\n"):
        if "benchmarks.md#" in paragraph:
            figures = re.findall(r"\d ?(?:%|×|(?:GiB|GB|ms|s)\b)(?!<!--)", paragraph)
            assert not figures, f"say which record these figures are from: {paragraph}"


@pytest.mark.parametrize(
    "text",
    [
        "at most 99%<!-- gpu_sustained: max rows.memory_error -->",
        "less than 0.1 GiB<!-- data_scale: max two processes.peak_mib -->",
        "<!-- gpu_overlap: first rows.sent_bytes = 805.0 MB -->\n```text\n806.0 MB\n```\n",
    ],
)
def test_a_figure_that_was_not_measured_is_noticed(text):
    assert wrong_figure(QUOTED.search(text))
