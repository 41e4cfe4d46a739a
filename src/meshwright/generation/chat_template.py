"""Chat templates: a conversation as the text that a model was trained on, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from meshwright.errors import UserError, first_line, missing_package
from meshwright.generation.text_settings import TextSettings

Message = Mapping[str, Any]
"""One message: its ``role`` (system, user, assistant) and its ``content``."""


def render_chat(settings: TextSettings, messages: Sequence[Message], *, reply: bool = True) -> str:
    """Return a conversation as text, as transformers does.

    Args:
        settings: has the template.
        messages: the conversation.
        reply: whether the text ends where the assistant begins to speak.
    """
    if settings.template is None:
        raise UserError(
            f"there is no chat template in {settings.folder}",
            why="neither chat_template.jinja nor tokenizer_config.json has one",
            fix="use a model that was trained on conversations, or --prompt without --chat",
        )
    try:
        from jinja2 import TemplateError
    except ImportError as error:
        raise missing_package("a chat template", "jinja2", "hf") from error
    try:
        template = _environment().from_string(settings.template)
        return template.render(
            messages=list(messages), add_generation_prompt=reply, **settings.special_tokens
        )
    except (TemplateError, TypeError, OverflowError) as error:
        raise UserError(
            f"the chat template of {settings.folder} cannot write this conversation",
            why=first_line(error),
            fix='write messages such as {"role": "user", "content": "Hello"}',
        ) from error


def _environment() -> Any:
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
            return nodes.Scope(body, lineno=number)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    def now(form: str) -> str:
        return datetime.now().strftime(form)

    made: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals |= {"raise_exception": refuse, "strftime_now": now}
    return made
