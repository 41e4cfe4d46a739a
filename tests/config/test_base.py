"""The base of config objects: frozen, closed, and errors for people."""

from typing import Literal

import pytest
from pydantic import ValidationError

from meshwright.config.base import Frozen, field_paths, shorten, unknown_key
from meshwright.config.compose import compose_config
from meshwright.config.schema import PipelineConfig
from meshwright.errors import UserError

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("command_line")]


class Inner(Frozen):
    size: int = 1
    rate: float | None = None
    on: bool = False
    mode: Literal["a", "b"] = "a"


class Outer(Frozen):
    inner: Inner = Inner()
    maybe: Inner | None = None
    name: str


def test_field_paths_go_into_sections():
    assert field_paths(Outer) == [
        "inner",
        "inner.size",
        "inner.rate",
        "inner.on",
        "inner.mode",
        "maybe",
        "maybe.size",
        "maybe.rate",
        "maybe.on",
        "maybe.mode",
        "name",
    ]


def test_objects_are_frozen():
    outer = Outer(name="x")
    with pytest.raises(ValidationError):
        outer.name = "y"
    with pytest.raises(ValidationError):
        outer.inner.size = 2


def test_unknown_keys_name_the_nearest_in_the_same_section():
    with pytest.raises(UserError) as caught:
        Outer.parse({"name": "x", "inner": {"siez": 1}})
    assert caught.value.what == "there is no `inner.siez`"
    assert caught.value.why == "`inner` has: size, rate, on, mode"
    assert caught.value.fix == "did you mean `inner.size`?"


def test_a_call_explains_mistakes_like_parse():
    with pytest.raises(UserError) as caught:
        Inner(siez=1)
    assert caught.value.what == "there is no `siez`"
    assert caught.value.why == "there are: size, rate, on, mode"
    assert caught.value.fix == "did you mean `size`?"
    with pytest.raises(UserError, match=r"there is no `inner\.siez`"):
        Outer(name="x", inner={"siez": 1})
    assert "pydantic" not in str(caught.value)


def test_a_key_of_another_section_is_found_there():
    error = unknown_key("training.fsdp", ["training.steps", "mesh.data", "mesh.fsdp"])
    assert error.fix == "did you mean `mesh.fsdp`?"


def test_a_prefix_is_part_of_the_key():
    with pytest.raises(UserError, match=r"there is no `plan\.inner\.siez`") as caught:
        Outer.parse({"name": "x", "inner": {"siez": 1}}, prefix="plan")
    assert caught.value.fix == "did you mean `plan.inner.size`?"


def test_a_missing_key_says_what_to_write():
    with pytest.raises(UserError) as caught:
        Outer.parse({})
    assert (caught.value.what, caught.value.fix) == ("`name` is missing", "write name=…")


def test_several_mistakes_are_told_at_once():
    with pytest.raises(UserError) as caught:
        Outer.parse({"inner": {"size": "x"}, "nmae": 1})
    text = str(caught.value)
    assert "`inner.size=x` is not valid" in text
    assert "`name` is missing" in text
    assert "there is no `nmae`" in text


@pytest.mark.parametrize("key", ["size", "rate"])
def test_true_and_false_are_not_numbers(key):
    with pytest.raises(UserError, match="should be a number, not true or false"):
        Inner.parse({key: True})
    assert Inner.parse({"on": True}).on is True


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_are_finite(value):
    with pytest.raises(UserError, match="finite"):
        Inner.parse({"rate": value})


def test_wrong_words_list_the_right_ones():
    with pytest.raises(UserError, match="'a' or 'b'"):
        Inner.parse({"mode": "c"})


def test_long_values_do_not_drown_the_message():
    assert shorten("short") == "short"
    assert len(shorten("9" * 1000)) == 60
    with pytest.raises(UserError) as caught:
        Inner.parse({"size": "x" * 1000})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("typed", ["1f1", "1F1B", "1f-1b"])
def test_a_word_that_is_nearly_one_of_the_choices_names_it(typed):
    with pytest.raises(UserError, match="did you mean `1f1b`"):
        PipelineConfig.parse({"schedule": typed})


def test_a_key_without_its_section_names_every_section_that_has_it():
    with pytest.raises(UserError) as caught:
        compose_config(["schedule=gpipe"])
    assert caught.value.fix == "did you mean `optimizer.schedule` or `pipeline.schedule`?"
    groups = caught.value.why.partition(": ")[2].split(", ")
    assert len(groups) == len(set(groups))
