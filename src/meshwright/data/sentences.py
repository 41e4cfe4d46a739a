"""Sentences of a small grammar: something a small model learns in a minute, and we can grade."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from meshwright.errors import ANY, Setting, UserError
from meshwright.runtime.host_machine import user_cache
from meshwright.text.json_text import write_atomically

NUM_SENTENCES = 20_000
_VERSION = 1
"""Raised whenever other sentences are drawn, so that no file of earlier ones is read."""

_NOUNS = ("bird", "cat", "dog", "king")
_ADJECTIVES = ("big", "red")
_ACTIONS = ("sing", "wait")
_DEEDS = ("help", "see")
_SINGULAR = ("a", "the")
_PLURAL = ("the", "two")


def _any(words: tuple[str, ...]) -> str:
    return f"({'|'.join(words)})"


_ONE = f"{_any(_SINGULAR)}( {_any(_ADJECTIVES)})? {_any(_NOUNS)}"
_SEVERAL = f"{_any(_PLURAL)}( {_any(_ADJECTIVES)})? {_any(_NOUNS)}s"
_OBJECT = f"({_ONE}|{_SEVERAL})"
_SENTENCE = re.compile(
    f"{_ONE} ({_any(_DEEDS)}s {_OBJECT}|{_any(_ACTIONS)}s)\\."
    f"|{_SEVERAL} ({_any(_DEEDS)} {_OBJECT}|{_any(_ACTIONS)})\\."
)
"""Articles fit their nouns, and verbs agree with their subjects in number."""


def sentence_file() -> Path:
    """Return a file of sentences, a line each, which is written on first use."""
    return _written(f"sentences-{_VERSION}.txt", lambda: "\n".join(sentences(NUM_SENTENCES)))


def pair_file() -> Path:
    """Return a file of preferences, which is written on first use: verbs that agree are chosen."""
    return _written(f"pairs-{_VERSION}.jsonl", lambda: "\n".join(map(json.dumps, _pairs())))


def _pairs() -> list[dict[str, str]]:
    """Return different sentences as a subject, and what follows it right or wrong."""
    verb = re.compile(f"(.*?) ({'|'.join((*_DEEDS, *_ACTIONS))})(s?)\\b(.*)")
    found = (verb.fullmatch(each) for each in dict.fromkeys(sentences(NUM_SENTENCES)))
    return [
        {
            "prompt": each[1],
            "chosen": f" {each[2]}{each[3]}{each[4]}",
            "rejected": f" {each[2]}{'' if each[3] else 's'}{each[4]}",
        }
        for each in found
        if each is not None
    ]


def _written(name: str, text: Callable[[], str]) -> Path:
    path = user_cache("text") / name
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Several processes may write it at once, each the same.
        write_atomically(path, text())
    except OSError as error:
        raise UserError(
            f"cannot write the built-in text to {path}",
            why=str(error),
            fix=f"set XDG_CACHE_HOME to a folder for caches, or write {Setting('data.path', ANY)}",
        ) from error
    return path


def grade(texts: Sequence[str]) -> str:
    """Say how many of the complete sentences in generated texts follow the grammar."""
    lines = [line for text in texts for line in text.split("\n")[1:-1]]
    right = sum(is_sentence(line) for line in lines)
    return f"{right} of {len(lines)} sentences that the model wrote follow the grammar"


def sentences(count: int) -> list[str]:
    """Return this many sentences, drawn with a fixed seed."""
    random = np.random.default_rng(0)

    def one_of(words: tuple[str, ...]) -> str:
        return words[random.integers(len(words))]

    def noun_phrase(*, several: bool) -> str:
        adjective = f"{one_of(_ADJECTIVES)} " if random.random() < 0.5 else ""
        noun = one_of(_NOUNS) + "s" * several
        return f"{one_of(_PLURAL if several else _SINGULAR)} {adjective}{noun}"

    def sentence() -> str:
        several = bool(random.integers(2))
        ending = "" if several else "s"
        if random.random() < 0.6:
            thing = noun_phrase(several=bool(random.integers(2)))
            predicate = f"{one_of(_DEEDS)}{ending} {thing}"
        else:
            predicate = f"{one_of(_ACTIONS)}{ending}"
        return f"{noun_phrase(several=several)} {predicate}."

    return [sentence() for _ in range(count)]


def is_sentence(text: str) -> bool:
    """Whether a text is a sentence of the grammar."""
    return _SENTENCE.fullmatch(text) is not None
