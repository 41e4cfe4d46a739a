"""The rewards of a training: several functions with weights, applied to groups of completions."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.config.builders import import_named
from meshwright.errors import Setting, UserError, did_you_mean
from meshwright.rewards.bundled import BUNDLED
from meshwright.rewards.reward_processes import Answer, Calls, RewardProcesses
from meshwright.rewards.reward_worker import call, import_function
from meshwright.text.units import counted

Reward = Callable[..., Any]
_Todo = tuple[int, int, list[Sequence[int]]]
"""A function, a group, and which of its completions each call is for."""


class Group(NamedTuple):
    """The completions of one prompt, and its other columns."""

    prompt: Any
    completions: Sequence[Any]
    columns: Mapping[str, Any]


class Scored(NamedTuple):
    """Rewards of completions, float64 [completions, functions]; NaN where a function failed.

    Problems are by function, with the number of completions each cost.
    """

    values: NDArray[np.float64]
    problems: dict[str, tuple[int, str]]

    def check(self) -> None:
        """Refuse a function that failed for every completion."""
        for name, (count, problem) in self.problems.items():
            if count == len(self.values):
                raise UserError(f"the reward {name} fails for every completion", why=problem)

    def warnings(self) -> list[str]:
        """Say which functions failed, how often and why."""
        return [
            f"the reward {name} failed for {count:,} of {counted(len(self.values), 'completion')}, "
            f"which {'does' if count == 1 else 'do'} not count; the first time: {problem}"
            for name, (count, problem) in self.problems.items()
        ]


@dataclass(frozen=True)
class _Function:
    """A reward function: its name, whether it takes groups, and what else it takes."""

    name: str
    function: Reward
    of_groups: bool
    takes: frozenset[str] | None
    imported: str | None

    def arguments(self, group: Group, which: Sequence[int]) -> dict[str, Any]:
        """Return its arguments for some completions of a group."""
        texts = [group.completions[n] for n in which]
        columns = {"prompt": group.prompt, **group.columns}
        if self.of_groups:
            columns = {"prompts": group.prompt, **group.columns}
            own = {name: [value] * len(which) for name, value in columns.items()}
            own["completions"] = texts
        else:
            own = {**columns, "completion": texts[0]}
        takes = self.takes
        return own if takes is None else {name: own[name] for name in own if name in takes}


@dataclass(frozen=True)
class RewardSet:
    """Several reward functions with weights.

    Importable functions are called in processes with a time limit, others in this process. A
    function of ``completions`` is called once for each prompt: if the call fails, all of them are
    lost. One of ``completion`` is called once for each completion. If a process ends or takes too
    long, its calls are made again one by one, so that only those that fail alone are lost.

    Attributes:
        processes: calls those that can be imported.
    """

    functions: tuple[_Function, ...]
    weights: tuple[float, ...]
    processes: RewardProcesses = field(repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the functions."""
        return tuple(each.name for each in self.functions)

    @property
    def note(self) -> str:
        """Which functions run in this process; empty if none does."""
        own = [each.name for each in self.functions if each.imported is None]
        if not own:
            return ""
        return (
            f"{'the reward' if len(own) == 1 else 'the rewards'} {', '.join(own)} cannot be "
            f"imported by name and {'runs' if len(own) == 1 else 'run'} in the training process, "
            "without a time limit"
        )

    def check(self, columns: Mapping[str, Any]) -> None:
        """Refuse functions that need columns which prompts do not have: none of them, or some."""
        for each in self.functions:
            known = {"completions", "prompts"} if each.of_groups else {"completion", "prompt"}
            parameters = inspect.signature(each.function).parameters.values()
            named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
            for name in (p.name for p in named if p.default is p.empty):
                lacking = [n for n, v in enumerate(columns.get(name, [None])) if v is None]
                if name not in known and lacking:
                    others = [other for other in columns if other not in ("prompt", name)]
                    why = f"the prompts have {', '.join(map(repr, others)) or 'no columns'}"
                    if name in columns:
                        why = f"{counted(len(lacking), 'prompt')} of {len(columns[name]):,} have "
                        why += f"none, the first one: {str(columns['prompt'][lacking[0]])[:60]!r}"
                    raise UserError(
                        f"the reward {each.name} needs the column `{name}`",
                        why=why,
                        fix=did_you_mean(name, others) or "add it to every prompt",
                    )

    def score(self, groups: Sequence[Group]) -> Scored:
        """Call all functions on all completions, group after group."""
        starts = np.cumsum([0, *(len(group.completions) for group in groups)])
        values = np.full((int(starts[-1]), len(self.functions)), math.nan)
        problems: dict[str, tuple[int, str]] = {}
        todo: list[_Todo] = []
        for f, each in enumerate(self.functions):
            for g, group in enumerate(groups):
                all_ = range(len(group.completions))
                todo.append((f, g, [all_] if each.of_groups else [[n] for n in all_]))
        while todo:
            again: list[_Todo] = []
            for (f, g, pieces), found in zip(todo, self._run(todo, groups), strict=True):
                if isinstance(found, str) and len(pieces) > 1:
                    # Which of several calls a process hung in is not known.
                    again += [(f, g, [which]) for which in pieces]
                    continue
                answers = [(None, found)] if isinstance(found, str) else found
                for which, (numbers, problem) in zip(pieces, answers, strict=True):
                    own, problem = _checked(numbers, len(which), problem)
                    values[starts[g] + np.array(which), f] = own
                    if problem:
                        name, lost = self.functions[f].name, int(np.isnan(own).sum())
                        count, first = problems.get(name, (0, problem))
                        problems[name] = (count + lost, first)
            todo = again
        return Scored(values, problems)

    def total(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the weighted sum of the functions for each completion; NaN if one failed."""
        return values @ np.array(self.weights)

    def _run(self, todo: Sequence[_Todo], groups: Sequence[Group]) -> list[list[Answer] | str]:
        own: dict[int, list[Answer] | str] = {}
        others: dict[int, Calls] = {}
        remote = [f for f, each in enumerate(self.functions) if each.imported is not None]
        for number, (f, g, pieces) in enumerate(todo):
            each = self.functions[f]
            arguments = [each.arguments(groups[g], which) for which in pieces]
            if each.imported is None:
                own[number] = [call(each.function, one) for one in arguments]
            else:
                others[number] = Calls(remote.index(f), arguments)
        own |= zip(others, self.processes.run(list(others.values())), strict=True)
        return [own[number] for number in range(len(todo))]


def read_rewards(
    given: Any, weights: Sequence[float] | None = None, *, seconds: float = 10.0, processes: int = 2
) -> RewardSet:
    """Return the rewards that a user gives.

    Args:
        given: a function, or several, in a list or by name; bundled ones by their name, others
            also as ``package.module:function``.
        weights: how much each counts; 1 each by default.
        seconds: the most seconds of a call.
        processes: the most processes that call functions.
    """
    if isinstance(given, Mapping):
        named = [(str(name), function) for name, function in given.items()]
    else:
        several = isinstance(given, Sequence) and not isinstance(given, str)
        named = [("", function) for function in (given if several else [given])]
    if not named:
        raise UserError(
            "there is no reward to learn from",
            why=f"the bundled ones are {', '.join(BUNDLED)}",
            fix=f"write {Setting('grpo.rewards', ['package.module:function'])} with a function of "
            f"yours, or a bundled one as in {Setting('grpo.rewards', ['exact_match'])}",
        )
    functions = tuple(_read_one(name, function) for name, function in named)
    names = [each.name for each in functions]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two rewards are called {name}", fix="give them by name, in a dict")
    if weights is not None and len(weights) != len(functions):
        raise UserError(
            f"{counted(len(weights), 'weight')} for {counted(len(functions), 'reward')}",
            why=f"the rewards are {', '.join(names)}",
            fix="give one weight for each reward",
        )
    imported = [each.imported for each in functions if each.imported is not None]
    pool = RewardProcesses(imported, seconds, processes)
    return RewardSet(functions, tuple(weights or [1.0] * len(functions)), pool)


def _read_one(name: str, given: Any) -> _Function:
    function = given
    if isinstance(given, str):
        if given not in BUNDLED and ":" not in given:
            raise UserError(
                f"there is no reward `{given}`",
                why=f"the bundled ones are {', '.join(BUNDLED)}",
                fix=did_you_mean(given, BUNDLED) or "write your own as package.module:function",
            )
        path = given if ":" in given else f"meshwright.rewards.bundled:{given}"
        function = import_named(f"grpo.rewards=[{given}]", path)
    if not callable(function):
        raise UserError(
            f"a reward is {type(function).__name__}, not a function",
            fix="write def reward(completion, answer): return …",
        )
    name = name or getattr(function, "__name__", type(function).__name__)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        parameters = {}
    if not {"completion", "completions"} & set(parameters):
        raise UserError(
            f"the reward {name} takes neither `completion` nor `completions`",
            why=f"its parameters are ({', '.join(parameters)})",
            fix="write f(completion, **columns) -> float, or "
            "f(prompts, completions, **columns) -> list[float]",
        )
    any_column = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    takes = None if any_column else frozenset(parameters)
    return _Function(name, function, "completions" in parameters, takes, _imported(function))


def _imported(function: Reward) -> str | None:
    """Return how another process can import a function; None if it cannot."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in (None, "__main__", "builtins") or "<" in name:
        return None
    path = f"{module}:{name}"
    try:
        return path if import_function(path) is function else None
    except Exception:
        return None


def _checked(
    values: list[float] | None, count: int, problem: str
) -> tuple[NDArray[np.float64], str]:
    """Return what a function returned, NaN where it is of no use, and why."""
    if problem or values is None or len(values) != count:
        found = 0 if values is None else len(values)
        why = f"it returned {counted(found, 'number')} for {counted(count, 'completion')}"
        return np.full(count, math.nan), problem or why
    bad = next((value for value in values if not math.isfinite(value)), None)
    own = np.array(values, np.float64)
    return np.where(np.isfinite(own), own, math.nan), "" if bad is None else f"it returned {bad}"
