"""What a section's kind names, and whether its arguments fit."""

import pytest

from meshwright.config.builders import build, check_arguments, find_builder, parameters_of
from meshwright.errors import UserError

pytestmark = pytest.mark.usefixtures("command_line")


class Model:
    def __init__(self, size: int, *, rate: float = 0.1, rngs: object):
        self.size, self.rate, self.rngs = size, rate, rngs


def function(size: int, **others: object) -> int:
    return size + len(others)


def find(kind: str):
    return find_builder("model", kind, ["gpt", "mlp"], {"gpt": Model, "mlp": function}.__getitem__)


def test_known_kinds_are_loaded_by_name():
    assert find("gpt") is Model


def test_unknown_kinds_name_the_nearest_and_how_to_bring_ones_own():
    with pytest.raises(UserError) as caught:
        find("gptt")
    assert "did you mean `gpt`?" in caught.value.what
    assert caught.value.why == "known kinds: gpt, mlp"
    assert "model.kind=package.module:Name" in caught.value.fix


def test_ones_own_is_imported_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "own_models.py").write_text("class Group:\n    class Net:\n        pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    assert find("own_models:Group.Net").__qualname__ == "Group.Net"


@pytest.mark.parametrize(
    ("source", "kind", "reason"),
    [
        ("x = 1", "broken_0:Missing", "AttributeError"),
        ("x = 1", "broken_1:x", "it is 1"),
        ("def", "broken_2:x", "SyntaxError"),
        ("raise RuntimeError('boom')", "broken_3:x", "RuntimeError: boom"),
        ("", "no_such_module_at_all:x", "ModuleNotFoundError"),
        ("", ".relative:x", "TypeError"),
        ("", ":x", "ValueError"),
        ("", "math:", "AttributeError"),
    ],
)
def test_ones_own_that_cannot_be_used_is_a_user_error(tmp_path, monkeypatch, source, kind, reason):
    if source:
        (tmp_path / f"{kind.partition(':')[0]}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError) as caught:
        find(kind)
    assert kind in caught.value.what
    assert reason in caught.value.why


def test_arguments_are_converted_to_the_types_of_the_signature():
    arguments = check_arguments("model", Model, {"size": "8", "rate": 1}, supplied=("rngs",))
    assert arguments == {"size": 8, "rate": 1.0}
    assert isinstance(arguments["rate"], float)


@pytest.mark.parametrize(
    ("given_arguments", "message"),
    [
        ({"size": "eight"}, "`model.size=eight` is not valid"),
        ({"size": 8, "raet": 1}, "did you mean `model.rate`"),
        ({"rate": 1}, "`model.size` is missing"),
        ({"size": 8, "rngs": 1}, "there is no `model.rngs`"),
    ],
)
def test_arguments_that_do_not_fit_are_named(given_arguments, message):
    with pytest.raises(UserError, match=message):
        check_arguments("model", Model, given_arguments, supplied=("rngs",))


def test_a_builder_that_takes_anything_is_given_anything():
    assert check_arguments("task", function, {"size": 1, "more": "x"}) == {"size": 1, "more": "x"}


def test_a_builder_without_a_signature_is_a_user_error():
    with pytest.raises(UserError, match="cannot read the signature of"):
        parameters_of(iter)


def test_an_argument_that_a_file_may_have_set_says_how_to_leave_it_out():
    with pytest.raises(UserError) as caught:
        check_arguments("model", Model, {"blocks": 8}, supplied=("rngs",))
    own = "kind, mesh_shape, weights, init_from, init_patterns"
    assert caught.value.why == f"`model` has: size, rate, {own}"
    assert caught.value.fix == "where a file sets it, ~model.blocks leaves it out"


def test_a_builder_that_fails_is_named_with_the_users_line_and_the_error():
    def fails(size: int) -> None:
        raise RuntimeError(f"no {size}\nand more")

    with pytest.raises(UserError) as caught:
        build("data", "own:fails", fails, {"size": 3})
    assert caught.value.what == "data.kind=own:fails cannot be built"
    line, *frames = caught.value.why.splitlines()
    assert line.startswith("test_builders.py, line ")
    assert line.endswith(": RuntimeError: no 3")
    assert frames[0].startswith(f'File "{__file__}", line ')
    assert frames[1].strip().startswith("raise RuntimeError(")
    assert "--debug" in caught.value.fix


def test_a_builders_own_user_errors_pass_unchanged():
    def refuses() -> None:
        raise UserError("not like this")

    with pytest.raises(UserError, match=r"^not like this$"):
        build("data", "own:refuses", refuses, {})


def test_a_class_may_call_its_instance_something_else():
    class Net:
        def __init__(this, width: int = 3, *, rngs):
            this.width = width

    assert list(parameters_of(Net)) == ["width", "rngs"]
    assert check_arguments("model", Net, {"width": "4"}, supplied=("rngs",)) == {"width": 4}
