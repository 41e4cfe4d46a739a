"""Hiding secrets in everything that is printed or written: passwords, tokens, keys, credentials."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.text.json_text import flatten

HIDDEN = "(hidden)"
"""What stands for a secret."""

_SECRET_WORD = re.compile("token|secret|passw(or)?d|passphrase|credentials?|apikey|jwt")
_KEY_TO = re.compile(
    "api|access|private|secret|account|auth|signing|encryption|ssh|service|license"
)
"""Words before ``key``: other keys, such as ``label_key``, name parts of the data."""
_TOKEN_OF_TEXT = re.compile(
    "bos|eos|pad|unk|sep|cls|mask|class|image|start|end|stop|begin|max|min|num|new"
)
"""Words before ``token``: a token of a text, not one that opens a service."""

_BROAD = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|KEY|JWT|CREDENTIAL|AUTH|SIGNATURE|\bSIG\b"
    r"|PRECONDITION_TRANSPORTS",
    re.IGNORECASE,
)
"""Names of environment variables and parameters of addresses, which hold no other such words."""
_LOGIN = re.compile(r"(?<=://)[^/\s\"'`]+@")
_PARAMETER = re.compile(r"(?<=[?&])([\w.-]+)=([^&\s\"'`#]+)")
_ASSIGNMENT = re.compile(
    r"(?<![\w?&.-])(-{0,2}[A-Za-z_][\w.-]*)="
    r"(?!\(hidden\))('[^']*'|\"[^\"]*\"|(?:\(hidden\)|[^\s`'\",;)])+)"
)
_NAME = re.compile(r"[-+~]*[A-Za-z_][\w.-]*")
_BEARER = re.compile(r"\b(bearer\s+)[\w.~+/=-]+", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Whether a name, such as ``tracking.api_key`` or ``AWS_SECRET_ACCESS_KEY``, is a secret's.

    Environment variables, in capitals, are judged more broadly than settings: ``HF_KEY`` is a
    secret, ``data.label_key`` the name of a column.
    """
    last = name.lstrip("-").rpartition(".")[2]
    if last.isupper():
        return bool(_BROAD.search(last))
    words = re.findall(r"[a-z]+|[A-Z]+(?![a-z])|[A-Z][a-z]*", last)
    words = [word.lower() for word in words]
    for before, word in zip(["", *words], words, strict=False):
        if word == "key" and _KEY_TO.fullmatch(before):
            return True
        if word == "token" and _TOKEN_OF_TEXT.fullmatch(before):
            continue
        if _SECRET_WORD.fullmatch(word):
            return True
    return False


def mask_text(text: str) -> str:
    """Return a text without the logins in addresses, and the values that are named as secrets."""
    text = _LOGIN.sub(f"{HIDDEN}@", text)
    text = _PARAMETER.sub(lambda m: f"{m[1]}={HIDDEN}" if _BROAD.search(m[1]) else m[0], text)
    text = _ASSIGNMENT.sub(_hide_assignment, text)
    return _BEARER.sub(rf"\g<1>{HIDDEN}", text)


def mask_value(name: str, value: Any) -> Any:
    """Return a value of a setting or variable without its secrets; containers are copied."""
    if isinstance(value, str):
        return HIDDEN if value and is_secret_name(name) else mask_text(value)
    if isinstance(value, Mapping):
        return mask_tree(value)
    if isinstance(value, list | tuple):
        return [mask_value(name, each) for each in value]
    return value


def mask_tree(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return nested settings without their secrets."""
    return {name: mask_value(str(name), value) for name, value in values.items()}


def mask_words(words: Sequence[str]) -> list[str]:
    """Return a command line without its secrets: those of ``--token VALUE`` too."""
    shown: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        flag = before.startswith("--") and "=" not in before and is_secret_name(before)
        masked = ",".join(map(_mask_whole_value, mask_text(word).split(",")))
        shown.append(HIDDEN if flag and not word.startswith("--") else masked)
    return shown


def _mask_whole_value(part: str) -> str:
    """Hide all that follows a secret's name, as in ``--export=TOKEN=…``."""
    names = part.split("=")
    for count, name in enumerate(names[:-1], start=1):
        if _NAME.fullmatch(name) and is_secret_name(name.lstrip("+~")):
            return "=".join([*names[:count], HIDDEN])
    return part


def hidden_names(values: Mapping[str, Any]) -> list[str]:
    """Return the dotted names of values that were hidden when they were saved."""
    found = ((name, value) for name, value in flatten(values) if isinstance(value, list | str))
    return [name for name, value in found if HIDDEN in str(value)]


def _hide_assignment(match: re.Match[str]) -> str:
    if is_secret_name(match[1]):
        return f"{match[1]}={HIDDEN}"
    # A value may hold an assignment itself: --export=TOKEN=….
    return f"{match[1]}={_ASSIGNMENT.sub(_hide_assignment, match[2])}"
