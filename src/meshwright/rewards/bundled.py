"""Bundled rewards: exact match, numbers with tolerance, and the format of an answer."""

import re

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
"""The tags of a formatted completion, in this order."""

_FORMAT = re.compile(
    r"\s*<reasoning>(?:(?!</?(?:reasoning|answer)>).)*</reasoning>"
    r"\s*<answer>(?:(?!</?(?:reasoning|answer)>).)*</answer>\s*",
    re.DOTALL,
)
_ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def answer_of(completion: str) -> str:
    """Return what the last ``<answer>`` of a completion holds; without one, all of it."""
    found = _ANSWER.findall(completion)
    return found[-1] if found else completion


def read_number(text: str) -> float | None:
    """Return the number that a text is; None if it is none."""
    text = text.strip()
    return _as_float(text) if _NUMBER.fullmatch(text) else None


def exact_match(completion: str, answer: object) -> float:
    """Return 1 if the answer is exactly the expected one, spaces around it aside, else 0."""
    return float(answer_of(completion).strip() == str(answer).strip())


def number_match(completion: str, answer: object) -> float:
    """Score a number.

    Returns:
        3 for the expected text, 1.5 up to spaces around it, 0.5 for a number within 10% of the
        expected one, 0.25 within 20%, -1 for any other, and -0.5 if it is no number.
    """
    given, expected = answer_of(completion), str(answer)
    if given == expected:
        return 3.0
    if given.strip() == expected.strip():
        return 1.5
    number, right = read_number(given), read_number(expected)
    if number is None or right is None:
        return -0.5
    difference = abs(number - right)
    if difference <= 0.1 * abs(right):
        return 0.5
    return 0.25 if difference <= 0.2 * abs(right) else -1.0


def number_anywhere(completion: str, answer: object) -> float:
    """Return 1.5 if the expected number is anywhere in the completion, else 0."""
    right = read_number(str(answer))
    found = map(_as_float, _NUMBER.findall(completion))
    return 1.5 if right is not None and right in found else 0.0


def exact_format(completion: str) -> float:
    """Return 3 for ``<reasoning>…</reasoning><answer>…</answer>`` and nothing else, else 0."""
    return 3.0 if _FORMAT.fullmatch(completion) else 0.0


def partial_format(completion: str) -> float:
    """Return 0.5 for each of the four tags that is there exactly once, and -0.5 for any other."""
    return sum(0.5 if completion.count(tag) == 1 else -0.5 for tag in TAGS)


def _as_float(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


BUNDLED = ("exact_match", "number_match", "number_anywhere", "exact_format", "partial_format")
"""The rewards that a config may name without a module."""
