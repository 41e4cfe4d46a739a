"""The command line is split into a command, our flags, and overrides for Hydra."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cli.arguments import Arguments, find_command, parse_arguments
from meshwright.cli.commands import COMMANDS, COMMON_FLAGS
from meshwright.errors import UserError


def split(line: str) -> Arguments:
    return parse_arguments(line.split())


def test_flags_may_stand_anywhere_after_the_command():
    arguments = split("train mesh.fsdp=4 --json training.steps=3 --debug")
    assert arguments.command is COMMANDS["train"]
    assert arguments.overrides == ("mesh.fsdp=4", "training.steps=3")
    assert arguments.flags == {"--json": "", "--debug": ""}
    assert arguments.has("--json")
    assert not arguments.has("--cfg")


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        ("config --cfg job", {"--cfg": "job"}),
        ("config --cfg=job", {"--cfg": "job"}),
        ("config -c job", {"--cfg": "job"}),
        ("config -m", {"--multirun": ""}),
        ("config -h", {"--help": ""}),
        ("config --config-dir=a=b", {"--config-dir": "a=b"}),
        ("config -cd a", {"--config-dir": "a"}),
        ("inspect --svg mesh.svg", {"--svg": "mesh.svg"}),
    ],
)
def test_values_follow_a_space_or_an_equals_sign(line, flags):
    arguments = split(line)
    assert arguments.flags == flags
    assert arguments.overrides == ()


def test_overrides_keep_signs_tildes_and_quotes():
    words = ["+experiment=quick_test", "~training.steps", "++a.b=[1,'x y']", "run.project=-x"]
    assert parse_arguments(["config", *words]).overrides == tuple(words)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trian", "did you mean `train`"),
        ("xyz", f"commands: {', '.join(COMMANDS)}"),
        ("mesh.fsdp=4", "meshwright train mesh.fsdp=4"),
        ("config --jsno", "did you mean `--json`"),
        ("config --svg x", "has no flag `--svg`"),
        ("config --mesh.fsdp=4", "settings are written without dashes"),
        ("config --cfg", "--cfg needs a value"),
        ("config --cfg=", "--cfg needs a value"),
        ("config --config-dir=", "--config-dir needs a value"),
        ("config --json=yes", "--json takes no value"),
    ],
)
def test_mistakes_are_named(line, message):
    with pytest.raises(UserError) as caught:
        split(line)
    assert message in str(caught.value)


def test_a_config_directory_must_exist(tmp_path):
    assert split("config").config_dir is None
    assert split(f"config --config-dir {tmp_path}").config_dir == Path(tmp_path)
    with pytest.raises(UserError, match="there is no directory"):
        assert split("config --config-dir /no/such").config_dir


def test_no_flag_of_a_command_hides_a_common_one():
    common = {flag.name for flag in COMMON_FLAGS}
    for command in COMMANDS.values():
        assert not common & {flag.name for flag in command.flags}


words = st.text(max_size=8) | st.sampled_from(
    ["--json", "--cfg", "--cfg=job", "-m", "--help", "a=1", "--config-dir", "--", "-", "--x=1"]
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(name=st.sampled_from([*COMMANDS, "", "trian"]), rest=st.lists(words, max_size=4))
def test_any_words_are_split_or_refused_politely(name, rest):
    try:
        arguments = parse_arguments([name, *rest])
    except UserError:
        return
    assert arguments.command is find_command(name)
    assert len(arguments.overrides) + len(arguments.flags) <= len(rest)
    assert not any(word.startswith("-") for word in arguments.overrides)
