"""What SECURITY.md promises about the code: no pickle, no eval, safe YAML, few imports by name."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "meshwright"
WORTH_A_LOOK = re.compile(
    r"pickle|dill|marshal|shelve|joblib|eval\(|exec\(|compile\(|__import__|yaml\.|np\.load|shell"
    r"|os\.(system|popen)|torch|import_module|run_module"
)
"""Only files with one of these words are parsed."""

UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
IMPORTS_BY_NAME = {
    "cli/main.py",  # the module of a command, from a table
    "config/builders.py",  # what the user's config names
    "data/config_data.py",  # tables of names of this package
    "runtime/lazy.py",
    "models/__init__.py",
    "tasks/__init__.py",
    "drill/worker.py",  # this package
    "rewards/reward_worker.py",  # the functions that a run is given as rewards
    "processes/__init__.py",  # a fixed name
    "tracking/services.py",
}


@pytest.fixture(scope="module")
def trees():
    files = {str(file.relative_to(SOURCE)): file.read_text() for file in SOURCE.rglob("*.py")}
    assert len(files) > 100
    return {
        name: list(ast.walk(ast.parse(text)))
        for name, text in files.items()
        if WORTH_A_LOOK.search(text)
    }


def nodes(trees, kind):
    return [(name, node) for name, tree in trees.items() for node in tree if type(node) is kind]


def test_nothing_unpickles_or_evaluates_text(trees):
    imported = {(name, alias.name) for name, n in nodes(trees, ast.Import) for alias in n.names}
    imported |= {(name, n.module) for name, n in nodes(trees, ast.ImportFrom)}
    roots = {(name, (module or "").partition(".")[0]) for name, module in imported}
    assert not [pair for pair in roots if pair[1] in UNSAFE_MODULES]
    called = [(name, n.func.id) for name, n in nodes(trees, ast.Call) if type(n.func) is ast.Name]
    assert called
    assert not [pair for pair in called if pair[1] in UNSAFE_CALLS]


def test_yaml_and_arrays_are_read_safely(trees):
    calls = [
        (name, ast.unparse(n.func), {k.arg: ast.unparse(k.value) for k in n.keywords})
        for name, n in nodes(trees, ast.Call)
    ]
    yaml = {call for _, call, _ in calls if call.startswith("yaml.")}
    assert yaml <= {"yaml.safe_load", "yaml.safe_dump", "yaml.load"}
    loaders = [
        ast.unparse(n.args[1])
        for _, n in nodes(trees, ast.Call)
        if ast.unparse(n.func) == "yaml.load"
    ]
    assert all("SafeLoader" in loader for loader in loaders)
    loads = [keywords for _, call, keywords in calls if call == "np.load"]
    assert loads
    assert all(keywords.get("allow_pickle") == "False" for keywords in loads)
    assert not [name for name, call, keywords in calls if keywords.get("shell") == "True"]
    assert not {call for _, call, _ in calls} & {"os.system", "os.popen", "torch.load"}


def test_modules_are_imported_by_name_in_known_places_only(trees):
    users = {
        name
        for name, n in nodes(trees, ast.Call)
        if ast.unparse(n.func).endswith(("import_module", "run_module"))
    }
    assert users - {"launch/__main__.py"} == IMPORTS_BY_NAME
