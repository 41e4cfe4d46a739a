"""Reward functions that go wrong, importable by other processes."""

import os
import time


def length(completion):
    return float(len(completion))


def of_groups(prompts, completions, answer):
    assert len(prompts) == len(completions) == len(answer)
    return [float(a == c) for a, c in zip(answer, completions, strict=True)]


def troubled(completion):
    """Hang, crash, raise, return NaN or nothing, as the completion says."""
    if completion == "hang":
        time.sleep(60)
    if completion == "crash":
        os._exit(7)
    if completion == "raise":
        raise ValueError("no such thing")
    if completion == "nan":
        return float("nan")
    print("rewards may print")
    return 1.0


def troubled_groups(completions):
    values = [troubled(each) for each in completions]
    return values[:-1] if "few" in completions else values


def timed(completion):
    """Take longer than a second for some completions, by their text alone."""
    if sum(map(ord, completion)) % 19 == 0:
        time.sleep(60)
    return float(len(set(completion)))
