"""Reward functions: both forms, weights, processes, and every way to fail."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from rewards.reward_samples import length, of_groups, troubled, troubled_groups

from meshwright import UserError
from meshwright.rewards.bundled import (
    exact_format,
    exact_match,
    number_anywhere,
    number_match,
    partial_format,
)
from meshwright.rewards.reward_set import Group, read_rewards

TROUBLES = ["fine", "hang", "crash", "raise", "nan", "fine"]


def groups(*completions, **columns):
    return [Group("p", list(each), columns) for each in completions]


def test_the_name_of_a_parameter_tells_the_forms_apart():
    made = read_rewards([length, of_groups, lambda completion, **c: c["n"]], [1, 10, 100])
    scored = made.score(groups(["a", "bbb"], ["cc"], answer="bbb", n=2))
    assert scored.values.tolist() == [[1, 0, 2], [3, 1, 2], [2, 0, 2]]
    assert made.total(scored.values).tolist() == [201, 213, 202]
    assert not scored.problems
    assert "<lambda>" in made.note
    assert "without a time limit" in made.note
    assert not read_rewards(length).note
    made.processes.close()


def test_what_goes_wrong_costs_its_own_sample():
    made = read_rewards({"odd": troubled}, seconds=0.5, processes=2)
    scored = made.score(groups(TROUBLES))
    assert [math.isnan(value) for value in scored.values[:, 0]] == [
        False, True, True, True, True, False,
    ]  # fmt: skip
    assert scored.problems["odd"][0] == 4
    assert "the reward odd failed for 4 of 6 completions" in scored.warnings()[0]
    assert np.isfinite(made.score(groups(["fine", "fine"])).values).all()
    made.processes.close()


def test_a_reward_of_groups_is_called_once_and_loses_the_group():
    calls = []

    def ranked(completions):
        calls.append(list(completions))
        return troubled_groups(completions)

    scored = read_rewards(ranked).score(groups(["few", "fine"], ["fine", "nan"], ["fine"]))
    assert calls == [["few", "fine"], ["fine", "nan"], ["fine"]]
    np.testing.assert_equal(scored.values[:, 0], [math.nan, math.nan, 1, math.nan, 1])
    assert "failed for 3 of 5 completions" in scored.warnings()[0]
    assert "it returned 1 number for 2 completions" in scored.warnings()[0]
    scored.check()
    with pytest.raises(UserError, match="fails for every completion"):
        read_rewards(ranked).score(groups(["few", "fine"])).check()


@pytest.mark.parametrize(
    ("given", "weights", "message"),
    [
        ([], None, r"no reward to learn from(.|\n)*rewards=.'package.module:function"),
        (lambda text: 1.0, None, "neither `completion` nor `completions`"),
        ("exact_mach", None, "did you mean"),
        ([length, length], None, "two rewards are called length"),
        ([length], [1, 2], "^2 weights for 1 reward"),
        (3, None, "not a function"),
        ("no.such.module:f", None, "cannot load"),
    ],
)
def test_bad_rewards_are_refused(given, weights, message):
    with pytest.raises(UserError, match=message):
        read_rewards(given, weights)


def test_a_missing_column_is_named():
    with pytest.raises(UserError, match="needs the column `answer`"):
        read_rewards(of_groups).check({"prompt": ["1"], "anser": ["2"]})
    with pytest.raises(UserError, match=r"1 prompt of 3 have none, the first one: 'b'"):
        read_rewards("exact_match").check({"prompt": list("abc"), "answer": ["1", None, "2"]})
    read_rewards(["exact_match", length]).check({"prompt": ["1"], "answer": ["2"]})


@pytest.mark.parametrize(
    ("returned", "says"),
    [("5", "it returned the text '5'"), (None, "it returned None"), ([None], "it returned None")],
)
def test_texts_and_none_are_no_numbers(returned, says):
    scored = read_rewards(lambda completion: returned).score(groups(["a"]))
    assert says in scored.warnings()[0]


def test_arrays_without_dimensions_are_numbers():
    given = [np.array(1.5), np.float32(2), jnp.float32(3)]
    scored = read_rewards(lambda completion: given[int(completion)]).score(groups(["0", "1", "2"]))
    assert scored.values.tolist() == [[1.5], [2], [3]]


def test_bundled_rewards():
    good = "<reasoning>3 fours</reasoning>\n<answer>12</answer>"
    assert [exact_match(text, 12) for text in ("12", " 12\n", good, "13", "")] == [1, 1, 1, 0, 0]
    cases = {"12": 3, " 12": 1.5, "12.5": 0.5, "14": 0.25, "20": -1, "twelve": -0.5, "": -0.5}
    assert {text: number_match(text, "12") for text in cases} == cases
    assert number_match(good, "12") == 3
    assert number_match("-1,000.0", "-1000") == 0.5
    assert number_match("0.0", "0") == 0.5
    assert [number_anywhere(t, "12") for t in ("so 12.", "3,4", "it is 1.2e1!")] == [1.5, 0, 1.5]
    assert [exact_format(t) for t in (good, f" {good}\n", f"{good}!", "12")] == [3, 3, 0, 0]
    assert partial_format(good) == 2
    assert partial_format("<answer>12</answer>") == 0
    assert partial_format("<answer><answer>") == -2
