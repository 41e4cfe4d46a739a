"""The command line as a person meets it: help, exit codes, streams."""

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.text import Text

import meshwright.cli
from meshwright.cli.commands import COMMANDS, Command
from meshwright.cli.main import main
from meshwright.cli.output import guarded_stdout
from meshwright.config.groups import group_options
from meshwright.errors import CheckFailed

SYNCED = (
    "mesh.pipe=2",
    "training.gradient_accumulation_steps=8",
    "training.sync_gradients_every=2",
)


@pytest.fixture
def run(capfd):
    """Run a command line in this process and return (exit code, stdout, stderr)."""

    def call(*argv: str) -> tuple[int, str, str]:
        code = main(argv)
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.fixture
def own_command(monkeypatch, tmp_path):
    """Register a command `own` whose run(request) has the given body."""

    def register(body: str) -> None:
        source = "import os, sys\nfrom meshwright import errors\ndef run(request):\n"
        (tmp_path / "own.py").write_text(source + textwrap.indent(body, "    "))
        monkeypatch.setattr(meshwright.cli, "__path__", [*meshwright.cli.__path__, str(tmp_path)])
        monkeypatch.delitem(sys.modules, "meshwright.cli.own", raising=False)
        # A command is Meshwright's own code, although this one is elsewhere.
        monkeypatch.setattr("meshwright.runtime.user_code._LIBRARIES", (str(tmp_path),))
        own = Command("own", "", "", needs_devices=False)
        monkeypatch.setitem(COMMANDS, "own", own)

    return register


def test_help_lists_every_command(run):
    for argv in ([], ["--help"], ["-h"], ["help"]):
        code, out, err = run(*argv)
        assert (code, err) == (0, "")
        assert all(f"  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("command", list(COMMANDS))
def test_help_of_a_command_lists_its_flags_and_the_groups(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert all(flag.name in out for flag in COMMANDS[command].flags)
    assert ("--multirun" in out) == COMMANDS[command].composes
    groups = [name in out for names in group_options().values() for name in names]
    assert all(groups) if COMMANDS[command].composes else "config groups" not in out


@pytest.mark.parametrize("words", ["-h", "--nprocs 2 --help", "--slurm --debug -h -- train"])
def test_launch_shows_its_help_wherever_its_flags_ask_for_it(run, words):
    assert run("launch", *words.split()) == run("launch", "--help")


def test_launch_takes_every_flag_that_its_help_lists(run):
    listed = re.findall(r"^  (--[\w-]+)", run("launch", "--help")[1], re.M)
    assert {"--nprocs", "--debug", "--help"} <= set(listed)
    for flag in listed:
        assert "has no flag" not in run("launch", flag)[2]
    for flag in ("--json", "--cfg", "--multirun", "--config-dir", "--config"):
        assert flag not in listed
        assert f"`meshwright launch` has no flag `{flag}`" in run("launch", flag)[2]


def test_launch_shows_the_traceback_of_its_own_error_if_asked(run):
    code, _, err = run("launch", "--debug", "--nprocs", "0", "--", "doctor")
    assert code == 2
    assert err.startswith("Traceback")
    assert "--nprocs 0 is not valid" in err
    assert "Traceback" not in run("launch", "--nprocs", "0", "--", "doctor")[2]


def test_version(run):
    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith("meshwright ")


def test_help_waits_for_nothing_heavy():
    script = """
        import sys
        from meshwright.cli.main import main
        assert main(["--help"]) == main(["train", "--help"]) == main(["--version"]) == 0
        heavy = {"jax", "hydra", "pydantic", "rich", "numpy", "flax", "omegaconf"}
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == 0


def test_composing_a_config_imports_no_planner():
    script = """
        import sys
        from meshwright.cli.arguments import parse_arguments
        from meshwright.cli.request import compose
        from meshwright.config.compose import validate
        validate(compose(parse_arguments(["config", "training.steps=3"])))
        planner = {name for name in sys.modules if name.startswith("meshwright.planner")}
        assert not planner, planner
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "did you mean `train`?"),
        (["config", "--jsno"], "did you mean `--json`?"),
        (["config", "training.micro_batchsize=4"], "did you mean `training.micro_batch_size`?"),
        (["config", "model.hidden_sise=4"], "did you mean `model.hidden_size`?"),
        (["config", "model.kind=gtp"], "did you mean `gpt`?"),
        (["config", "optimizer.lr=1"], "did you mean `optimizer.learning_rate`?"),
        (["config", "optimizer.lr=1"], "nesterov, kind, learning_rate, warmup_steps, schedule"),
        (["config", "training.batch_size=8"], "did you mean `training.global_batch_size`?"),
        (["config", "lr=1"], "did you mean `optimizer.learning_rate`?"),
        (["config", "training.epochs=2"], "did you mean `training.max_duration`?"),
        (["train", "--steps", "10"], "written without dashes: training.steps=10"),
        (["train", "--lr=0.1"], "written without dashes: optimizer.learning_rate=0.1"),
        (["train", "--batch-size", "8"], "training.global_batch_size=8"),
        (["config", "model=no_package:Net"], "cannot load `model.kind=no_package:Net`"),
        (["config", "resume=yes"], "write resume=auto"),
        (["config", "resume=true"], "resume=never, or the path"),
        (["config", "--config", "no.yaml"], "there is no file `no.yaml`"),
        (["config", "pipeline.schedule=zb-h1"], "did you mean `zb_h1`?"),
        (["config", "schedule=gpipe"], "`optimizer.schedule` or `pipeline.schedule`?"),
        (["inspect", *SYNCED], "write training.sync_gradients_every=8 or 1"),
        (["ledger", *SYNCED], "write training.sync_gradients_every=8 or 1"),
        (["verify", *SYNCED], "write training.sync_gradients_every=8 or 1"),
        (["inspect", "mesh.fsdp=8", "--timeline", "t.svg"], "write mesh.pipe=…"),
        (["config", "--cfg", "jobs"], "write --cfg job, --cfg hydra or --cfg all"),
        (["config", "--config-dir", "/no/such"], "there is no directory `/no/such`"),
        (["config", "model.mesh_shape=[[4]]"], '[[4,2],["fsdp","tp"]]'),
    ],
)
def test_bad_input_exits_2_with_a_suggestion_and_no_traceback(run, argv, message):
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


def test_debug_shows_the_traceback_of_a_users_mistake(run):
    code, _, err = run("config", "training.steps=-1", "--debug")
    assert code == 2
    assert "Traceback" in err
    assert "error: `training.steps=-1` is not valid" in err


def test_config_shows_every_value_and_its_origin(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = run("config", 'model.mesh_shape=[[4,2],["fsdp","tp"]]')
    assert code == 0
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "[[4, 2], ['fsdp', 'tp']]" in lines["model.mesh_shape"]
    assert "override" in lines["model.mesh_shape"]
    assert lines["training.steps"].split()[1:3] == ["600", "training/default.yaml"]
    assert lines["training.gradient_accumulation_steps"].split()[1:] == ["null", "default"]


def test_a_mesh_may_be_written_as_in_python(run):
    code, out, _ = run("config", "mesh=fsdp=4,tp=2", "--json")
    assert code == 0
    values = json.loads(out)
    assert (values["mesh.fsdp"]["value"], values["mesh.tensor"]["value"]) == (4, 2)
    assert values["mesh.tensor"]["from"] == "mesh.tp=2"


def test_keys_lists_every_key(run):
    code, out, _ = run("config", "--keys", "--json")
    assert code == 0
    listed = {entry["key"]: entry for entry in json.loads(out)}
    shown = json.loads(run("config", "--json")[1])
    arguments = {key for key in shown if key not in listed}
    assert {key.partition(".")[0] for key in arguments} <= {"model", "task", "data", "optimizer"}
    assert listed["training.eval_every"] == {
        "key": "training.eval_every",
        "meaning": "steps between two evaluations; null evaluates once, at the end.",
        "default": "null",
        "allowed": "a whole number, at least 1, less than 2147483648 or null",
    }
    assert listed["pipeline.schedule"]["allowed"] == "gpipe, 1f1b, interleaved, zb_h1"
    assert "training.steps" in run("config", "--keys")[1]


def test_a_saved_config_is_composed_again_with_changes(run, tmp_path):
    saved = tmp_path / "config.yaml"
    overrides = ("model=mlp", "optimizer=lion", "sharding.rules={layers.*.kernel: column}")
    saved.write_text(run("config", *overrides, "--cfg", "job")[1])
    again = ("--config", str(saved), "--cfg", "job")
    assert yaml.safe_load(run("config", *again)[1]) == yaml.safe_load(saved.read_text())
    code, out, _ = run("config", "--config", str(saved), "mesh.tp=2", "--json")
    assert code == 0
    values = json.loads(out)
    assert values["mesh.tensor"] == {"value": 2, "origin": "override", "from": "mesh.tp=2"}
    assert values["optimizer.kind"] == {"value": "lion", "origin": "file", "from": str(saved)}
    code, _, err = run("config", "--config", str(saved), "optimizer=adamw")
    assert code == 2
    assert "chooses a file" in err
    saved.write_text("- 1")
    assert run("config", "--config", str(saved))[0] == 2
    saved.write_text("model: {kind: mlp}\nmodle: 1")
    assert "there is no `modle`" in run("config", "--config", str(saved))[2]


def test_config_as_json_is_one_value(run):
    code, out, _ = run("config", "training.micro_batch_size=4", "--json")
    assert code == 0
    assert json.loads(out)["training.micro_batch_size"] == {
        "value": 4,
        "origin": "override",
        "from": "training.micro_batch_size=4",
    }


def test_a_users_config_directory_is_used(run, tmp_path):
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "slow.yaml").write_text("kind: sgd\nlearning_rate: 1.0e-6\n")
    code, out, _ = run("config", "optimizer=slow", "--config-dir", str(tmp_path), "--json")
    assert code == 0
    assert json.loads(out)["optimizer.learning_rate"] == {
        "value": 1e-6,
        "origin": "file",
        "from": "optimizer/slow.yaml",
    }


@pytest.mark.parametrize(
    ("part", "sections"), [("job", {"mesh"}), ("hydra", {"hydra"}), ("all", {"hydra", "mesh"})]
)
def test_cfg_prints_the_composed_config(run, part, sections):
    code, out, _ = run("train", "--cfg", part, "mesh.fsdp=4")
    printed = yaml.safe_load(out)
    assert code == 0
    assert {"hydra", "mesh"} & set(printed) == sections
    assert part == "hydra" or printed["mesh"]["fsdp"] == 4


def test_cfg_as_json_is_json(run):
    code, out, _ = run("config", "--cfg", "job", "--json")
    assert code == 0
    assert json.loads(out)["training"]["steps"] == 600


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("return 0", 0, ""),
        ("return errors.ExitCode.NOTHING_FITS", 3, ""),
        ("raise errors.UserError('wrong', fix='right')", 2, "error: wrong\n  right\n"),
        ("raise errors.CheckFailed('differs')", 1, "error: differs\n"),
        ("raise KeyboardInterrupt", 130, "interrupted"),
        ("raise BrokenPipeError", 141, ""),
        ("raise ZeroDivisionError('oh')", 70, "internal error: ZeroDivisionError: oh\n"),
    ],
)
def test_exit_codes(run, own_command, body, code, said):
    own_command(body)
    found, out, err = run("own")
    assert (found, out) == (code, "")
    assert said in err
    assert "Traceback" not in err


def test_an_internal_error_offers_its_traceback(run, own_command):
    own_command("raise ZeroDivisionError('oh')")
    assert "add --debug" in run("own")[2]
    assert "Traceback" in run("own", "--debug")[2]


def test_whatever_else_is_printed_goes_to_stderr(run, own_command):
    own_command(
        "print('python'); os.write(1, b'native\\n'); os.system('echo child')\n"
        "request.output.result({'ok': True})\n"
        "return 0"
    )
    code, out, err = run("own", "--json")
    assert (code, json.loads(out)) == (0, {"ok": True})
    assert {"python", "native", "child"} <= set(err.split())
    os.write(1, b"stdout is back\n")
    assert run("--version")[1].startswith("stdout is back\n")


def test_nothing_reaches_stdout_while_the_interpreter_ends(tmp_path):
    (tmp_path / "noisy.py").write_text(
        "import atexit, os\n"
        "def run(request):\n"
        "    atexit.register(lambda: os.write(1, b'goodbye\\n'))\n"
        "    print('hello')\n"
        "    request.output.result({'loss': float('nan'), 'path': 'a\\udcff'})\n"
        "    return 3\n"
    )
    script = (
        f"import sys, meshwright.cli; meshwright.cli.__path__.append({str(tmp_path)!r});"
        "from meshwright.cli import commands, main;"
        "commands.COMMANDS['noisy'] = commands.Command('noisy', '', '', needs_devices=False);"
        "sys.argv = ['meshwright', 'noisy', '--json']; main.entry()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 3
    assert json.loads(done.stdout) == {"loss": None, "path": "a\udcff"}
    assert {"hello", "goodbye"} <= set(done.stderr.split())


@pytest.mark.parametrize("flags", [[], ["--json"], ["--cfg=job"]])
def test_a_reader_that_leaves_early_is_no_error(flags, capfd):
    reader, writer = os.pipe()
    os.close(reader)
    stdout = os.dup(1)
    os.dup2(writer, 1)
    try:
        code = main(["config", *flags])
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(writer)
    assert code == 128 + 13
    assert capfd.readouterr().err == ""


def test_descriptors_are_given_back():
    def lowest_free() -> int:
        descriptor = os.dup(1)
        os.close(descriptor)
        return descriptor

    before = lowest_free()
    for _ in range(3):
        with guarded_stdout(as_json=True) as output:
            output.text("")
    with pytest.raises(CheckFailed), guarded_stdout(as_json=False):
        raise CheckFailed("x")
    assert lowest_free() == before


flags = "--json --cfg --cfg=all job --debug --help"
overrides = (
    "training.steps=-1 model=gpt ~model mesh.fsdp=3 model.kind=nope model.kind=os:path +a=1 "
    "[/bold] model.dropout=x \udcff=1 model.x=[bold] simulate=8 task=classification data.kind=a:b"
)
words = st.sampled_from([*flags.split(), *overrides.split()]) | st.text(max_size=6)


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(argv=st.lists(words, max_size=3))
def test_no_command_line_prints_a_traceback(capfd, argv):
    code = main(["config", *argv])
    out, err = capfd.readouterr()
    assert code in (0, 2)
    assert "internal error" not in err
    assert ("Traceback" in err) == (code == 2 and "--debug" in argv)
    assert bool(out) == (code == 0)
    if code == 0 and "--json" in argv and "--help" not in argv:
        json.loads(out)


def test_a_table_that_is_piped_is_not_wrapped(monkeypatch, capfd):
    monkeypatch.delenv("COLUMNS", raising=False)
    with guarded_stdout(as_json=False) as output:
        output.result({}, Text("word " * 30))
    assert len(capfd.readouterr().out.splitlines()) == 1
