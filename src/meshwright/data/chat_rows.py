"""Conversations as tokens, and which of the tokens are learned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meshwright.data.chat_template import ChatTemplate, Message, Span
from meshwright.data.documents import check_text, missing_mark
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import ANY, Setting, UserError
from meshwright.text.units import a_type

LossOn = Literal["assistant", "last", "all"]
"""What is learned: all that the assistant says, its last turn, or every token."""

ASSISTANT = "assistant"

SHARED = {"human": "user", "gpt": ASSISTANT}
"""Roles of ShareGPT."""
CONVERT = "; for those of ShareGPT, write data.role=from data.content=value"


_KEYS = ("role", "content")


@dataclass(frozen=True)
class ChatText:
    """A conversation as text.

    Attributes:
        learned: the parts of it that are learned.
        marked: whether a template marks these parts, or else they follow prompts.
        whole: whether the text has its own start and end tokens, as a template writes them.
        prompt: the prompt alone, if a template writes it otherwise than with its answer.
    """

    text: str
    learned: Sequence[Span]
    marked: bool = False
    whole: bool = True
    prompt: str | None = None


@dataclass(frozen=True)
class ChatRow:
    """A conversation as tokens [T], and which of them are learned: predicted from those before [T].

    It is ``joined`` if the tokens of a prompt alone differ from those before its answer.
    """

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    joined: bool = False


@dataclass(frozen=True)
class ChatEncoder:
    """Makes tokens of conversations, and of prompts with completions.

    A ValueError says what is wrong with a conversation.

    Attributes:
        template: the chat template; None refuses lists of messages.
        loss_on: what is learned.
        keys: the fields of a message: who says it, and what.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    loss_on: LossOn = ASSISTANT
    keys: tuple[str, str] = _KEYS

    def conversation(self, messages: Any, name: str = "messages", **more: Any) -> ChatText:
        """Return the messages of a field as text; ``more`` are variables such as ``tools``."""
        read, template = read_messages(messages, name, self.keys), self._template(name)
        if self.loss_on == "all":
            text = template.write(read, **more)
            return ChatText(text, [(0, len(text))])
        if template.has_marks:
            text, spans = template.write_marked(read, **more)
            return ChatText(text, spans if self.loss_on == ASSISTANT else spans[-1:], marked=True)
        turns = [at for at, message in enumerate(read) if message["role"] == ASSISTANT]
        text = template.write(read, **more)
        if self.loss_on == "last":
            turns = turns[-1:]
        return ChatText(text, [_turn(template, read, at, text, more) for at in turns])

    def completion(
        self, prompt: Any, completion: Any, names: Sequence[str] = ("prompt", "completion"),
        **more: Any,
    ) -> ChatText:  # fmt: skip
        """Return a prompt and what follows it as text; both are texts, or lists of messages."""
        if isinstance(prompt, str) and isinstance(completion, str):
            begin = 0 if self.loss_on == "all" else len(prompt)
            text = check_text(prompt, names[0]) + check_text(completion, names[1])
            return ChatText(text, [(begin, len(text))], whole=False)
        if isinstance(prompt, str) or isinstance(completion, str):
            kinds = f"`{names[0]}` is {a_type(prompt)} and `{names[1]}` {a_type(completion)}"
            raise ValueError(f"{kinds}; write both as text, or both as lists of messages")
        read, more_read = (
            read_messages(said, name, self.keys)
            for said, name in zip((prompt, completion), names, strict=True)
        )
        both, template = [*read, *more_read], self._template(names[0])
        text, before = template.write(both, **more), template.write(read, reply=True, **more)
        begin = 0 if self.loss_on == "all" else len(commonprefix([before, text]))  # noqa: RUF071
        return ChatText(text, [(begin, len(text))], prompt=before)

    def text(self, text: Any, name: str = "text") -> ChatText:
        """Return a text, all of which is learned."""
        return ChatText(check_text(text, name), [(0, len(text))], whole=False)

    def rows(self, texts: Sequence[ChatText]) -> list[ChatRow]:
        """Return the tokens of conversations."""
        bounds = [_bounds(text) for text in texts]
        encoded = self.tokenizer.encode_places([text.text for text in texts])
        prefixes = iter(
            self.tokenizer.encode_many([each for own in bounds for each in own.values()])
        )
        rows = list[ChatRow]()
        for text, own, (ids, places) in zip(texts, bounds, encoded, strict=True):
            mask, joined = _mask(text, ids, places, {at: next(prefixes) for at in own})
            rows.append(self._whole(text, ChatRow(ids.astype(np.int32), mask, joined)))
        return rows

    def row(self, text: ChatText) -> ChatRow:
        """Return the tokens of one conversation."""
        return self.rows([text])[0]

    def _whole(self, text: ChatText, row: ChatRow) -> ChatRow:
        """Return a row with what documents start and end with, unless a template wrote it."""
        if text.whole or not len(row.ids):
            return row
        marks = self.tokenizer.marks
        start = missing_mark(np.array(marks.start, np.int32), row.ids)
        end = np.array(marks.end, np.int32)
        end = missing_mark(end, row.ids[-len(end) :])
        mask = [np.zeros(len(start), bool), row.mask, np.ones(len(end), bool)]
        return ChatRow(np.concatenate([start, row.ids, end]), np.concatenate(mask), row.joined)

    def _template(self, name: str) -> ChatTemplate:
        if self.template is None:
            raise UserError(
                "there is no chat template",
                why=f"`{name}` is a list of messages, and there is none beside the tokenizer",
                fix=f"write {Setting('data.template', ANY)} with a file, or "
                f"{Setting('data.template', 'chatml')}",
            )
        return self.template


def read_messages(given: Any, name: str, keys: tuple[str, str] = _KEYS) -> list[Message]:
    """Return a list of messages, without fields that are null."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise ValueError(f"`{name}` is {a_type(given)}, not a list of messages")
    read = list[Message]()
    for number, message in enumerate(given, start=1):
        if not isinstance(message, Mapping):
            raise ValueError(f"message {number} of `{name}` is {a_type(message)}, not an object")
        known = {str(key): value for key, value in message.items() if value is not None}
        known |= {own: known.pop(k) for own, k in zip(_KEYS, keys, strict=True) if k in known}
        if isinstance(role := known.get("role"), str) and keys[0] != "role":
            known["role"] = SHARED.get(role, role)
        if not isinstance(role, str):
            own = f"{', '.join(known) or 'nothing'}{CONVERT if 'from' in known else ''}"
            raise ValueError(f"message {number} of `{name}` has no `role`, but {own}")
        # A turn that only calls tools has no content.
        content = known.get("content", "")
        if isinstance(content, list) and all(_is_text(part) for part in content):
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            what = "a list of more than text" if isinstance(content, list) else a_type(content)
            raise ValueError(f"the `content` of message {number} of `{name}` is {what}")
        read.append({**known, "content": content})
    if not read:
        raise ValueError(f"`{name}` has no messages")
    return read


def _is_text(part: Any) -> bool:
    """Whether a part of a message is text, and not an image."""
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _turn(
    template: ChatTemplate, messages: list[Message], at: int, text: str, more: Mapping[str, Any]
) -> Span:
    """Return where a turn of the assistant is in the text of the whole conversation."""
    before = template.write(messages[:at], reply=True, **more)
    until = template.write(messages[: at + 1], **more)
    if text.startswith(until) and until.startswith(before):
        return len(before), len(until)
    raise ValueError(
        f"{template.origin} writes turn {at + 1} in another way once more turns follow, so that "
        "its tokens are not known: learn the last turn only, or use a template with "
        "{% generation %} marks"
        if at + 1 < len(messages)
        else f"{template.origin} writes the beginning of turn {at + 1} in another way when it asks "
        "for a reply: use a template with {% generation %} marks"
    )


def _bounds(text: ChatText) -> dict[int, str]:
    """Return what comes before each place of a text where something learned begins or ends."""
    places = () if text.marked else sorted({place for span in text.learned for place in span})
    inside = (place for place in places if 0 < place < len(text.text))
    return {place: text.prompt or text.text[:place] for place in inside}


def _mask(
    text: ChatText, ids: NDArray[Any], places: NDArray[np.int64], before: Mapping[int, Any]
) -> tuple[NDArray[np.bool_], bool]:
    """Return which tokens are learned, and whether one of them begins before its answer."""
    mask, joined = np.zeros(len(ids), bool), False
    for begin, end in text.learned:
        if text.marked:
            mask |= (places[:, 0] < end) & (places[:, 1] > begin)
            continue
        first, last = 0, len(ids)
        if begin in before:
            first, exact = _count(ids, before[begin])
            joined |= not exact
        if end in before:
            last, _ = _count(ids, before[end])
        mask[first:last] = True
    return mask, joined


def _count(ids: NDArray[Any], before: NDArray[Any]) -> tuple[int, bool]:
    """Return how many of these tokens a text begins with, and whether it is all of them."""
    length = min(len(ids), len(before))
    differs = np.flatnonzero(ids[:length] != before[:length])
    return (int(differs[0]), False) if len(differs) else (length, length == len(before))
