"""Chat templates: a conversation as the text that a model was trained on, in a sandbox."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.data.document_marks import CONFIG, Files, files_of, object_in
from meshwright.data.documents import check_text
from meshwright.errors import UserError, first_line, missing_package

TEMPLATE = "chat_template.jinja"

Message = Mapping[str, Any]
"""One message: its ``role`` (system, user, assistant) and its ``content``."""

Span = tuple[int, int]
"""Where a part of a text begins and ends, in characters."""

BEGIN, END = "\ufdd0", "\ufdd1"
"""Noncharacters around what the assistant says, while a text is written with its marks."""


_ANSWERED = (("user", "One?"), ("assistant", "Two."), ("user", "Three?"))

_FAILURES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What the code of a template may raise, besides errors of its own."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, written as transformers does.

    Attributes:
        special_tokens: the texts of special tokens by name, such as ``bos_token``.
        origin: where it comes from, for messages.
        arguments: further variables of the template.
        today: the date for templates that write one, such as 2025-01-31; None for the real one.
    """

    text: str
    special_tokens: Mapping[str, str] = field(default_factory=dict[str, str])
    origin: str = field(default="the chat template", repr=False)
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    today: str | None = None

    @cached_property
    def has_marks(self) -> bool:
        """Whether it marks what the assistant says with ``{% generation %}``."""
        return re.search(r"\{%[-+]?\s*generation\b", self.text) is not None

    @cached_property
    def turn_end(self) -> str:
        """What it writes after an answer, without the space around it; empty if it is not known.

        If that is only space, the beginning of the next turn of the user is the end of the answer.
        """
        said = [{"role": role, "content": text} for role, text in _ANSWERED]
        (_, answer), (_, question) = _ANSWERED[1:]
        try:
            last, whole = self.write(said[:2]), self.write(said)
        except ValueError:
            return ""
        after = whole.partition(answer)[2].partition(question)[0]
        return last.partition(answer)[2].strip() or after.rstrip()

    def check(self) -> None:
        """Raise if it is not a template."""
        _ = self._compiled

    def write(self, messages: Sequence[Message], *, reply: bool = False, **more: Any) -> str:
        """Return a conversation as text; a ValueError says why the template fails.

        For a ``reply``, the text ends where the assistant begins to speak.
        """
        return self._write(messages, marked=False, add_generation_prompt=reply, **more)

    def write_marked(self, messages: Sequence[Message], **more: Any) -> tuple[str, list[Span]]:
        """Return a conversation as text, and where the template marks what the assistant says."""
        text = self._write(messages, marked=True, add_generation_prompt=False, **more)
        plain, spans, begin = "", list[Span](), 0
        for part in re.split(f"([{BEGIN}{END}])", text):
            if part == BEGIN:
                begin = len(plain)
            elif part == END:
                spans.append((begin, len(plain)))
            else:
                plain += part
        if plain != self.write(messages, **more):
            raise ValueError("the template changes the text around its generation marks")
        return plain, [(begin, end) for begin, end in spans if begin < end]

    def render(self, messages: Sequence[Message], *, reply: bool = True) -> str:
        """Return a conversation as text; an error explains itself to the user."""
        self.check()
        try:
            return self.write(messages, reply=reply)
        except ValueError as error:
            raise UserError(
                f"{self.origin} cannot write this conversation",
                why=first_line(error),
                fix='write messages such as {"role": "user", "content": "Hello"}',
            ) from error

    def _write(self, messages: Sequence[Message], *, marked: bool, **more: Any) -> str:
        from jinja2 import TemplateError

        values = {**self.special_tokens, **self.arguments, **more}
        template = self._compiled[marked]
        try:
            text = template.render(messages=list(messages), **values)
        except (TemplateError, *_FAILURES) as error:
            raise ValueError(f"the template fails: {first_line(error)}") from error
        return check_text(text, "the conversation")

    @cached_property
    def _compiled(self) -> tuple[Any, Any]:
        """The template without and with its marks."""
        try:
            from jinja2 import TemplateError
        except ImportError as error:
            raise missing_package("a chat template", "jinja2", "hf") from error
        try:
            plain, marked = (
                _environment(self.today, marked=each).from_string(self.text)
                for each in (False, True)
            )
        except TemplateError as error:
            what = f"{self.origin} cannot write this conversation, because it is not a template"
            raise UserError(what, why=first_line(error)) from error
        return plain, marked


def read_template(folder: Path | None) -> ChatTemplate | None:
    """Return the template that the files of a folder have; None if there is none."""
    return template_of(files_of(folder), folder)


def template_of(files: Files, origin: object) -> ChatTemplate | None:
    """Return the template that files have, which are from somewhere; None if there is none."""
    found = object_in(files, CONFIG, origin).get("chat_template")
    if isinstance(found, list):
        found = {str(each.get("name")): each.get("template") for each in found}.get("default")
    if (own := files(TEMPLATE)) is not None:
        found = own.decode() if isinstance(own, bytes) else own
    if not isinstance(found, str):
        return None
    return ChatTemplate(found, special_tokens(files, origin), f"the chat template of {origin}")


def special_tokens(files: Files, origin: object) -> dict[str, str]:
    """Return the special tokens that files name, by key, such as ``bos_token``."""
    texts = {
        key: value.get("content") if isinstance(value, Mapping) else value
        for name in ("special_tokens_map.json", CONFIG)
        for key, value in object_in(files, name, origin).items()
        if key.endswith("_token")
    }
    return {key: value for key, value in texts.items() if isinstance(value, str)}


def no_template(folder: object, fix: str) -> UserError:
    """Return the error about a folder without a template."""
    if folder is None:
        why = "the model comes from no folder that has one"
        return UserError("there is no chat template", why=why, fix=fix)
    why = f"neither {TEMPLATE} nor {CONFIG} has one"
    return UserError(f"there is no chat template in {folder}", why=why, fix=fix)


def _environment(today: str | None, *, marked: bool) -> Any:
    """Return the environment that templates are written for: that of transformers."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Marks what the assistant says, which changes nothing in the text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            number = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            if marked:
                first, last = (nodes.Output([nodes.TemplateData(each)]) for each in (BEGIN, END))
                body = [first, *body, last]
            return nodes.Scope(body, lineno=number)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    def now(form: str) -> str:
        return (datetime.now() if today is None else datetime.fromisoformat(today)).strftime(form)

    made: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals |= {"raise_exception": refuse, "strftime_now": now}
    return made
