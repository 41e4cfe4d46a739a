"""Prompts, each with further columns that rewards read: from files, lists, or as sums."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.chat_source import chat_files
from meshwright.data.contents import list_contents
from meshwright.data.corrupt import CorruptRecords, OnCorrupt
from meshwright.data.fingerprints import fingerprint_of
from meshwright.data.protocols import HostBatch
from meshwright.data.records import parsed_records
from meshwright.data.token_cache import nothing
from meshwright.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from meshwright.errors import Setting, UserError
from meshwright.text.units import a_type, counted

PROMPT = "prompt"


class PromptSource:
    """Records with a prompt each: a text, token ids, or the messages of a conversation.

    A tokenizer turns prompts into tokens; None if they are tokens.
    """

    def __init__(self, records: Sequence[Any], tokenizer: Any = None) -> None:
        self.records, self.tokenizer = records, tokenizer
        if not records:
            example = 'give records such as {"prompt": "37+48=", "answer": "85"}'
            raise UserError("there are no prompts", fix=example)
        for number, record in enumerate(records):
            prompt: Any = record.get(PROMPT) if isinstance(record, Mapping) else None
            if prompt is None or isinstance(prompt, bool | int | float):
                raise UserError(
                    f"record {number} has no prompt",
                    why=f"it is {a_type(record)}: {str(record)[:80]}",
                    fix='write records such as {"prompt": "37+48=", "answer": "85"}',
                )

    def __len__(self) -> int:
        return len(self.records)

    def rows(self, ids: NDArray[np.int64]) -> HostBatch:
        """Return the columns of these records; None where a record has no such field."""
        chosen = [self.records[int(n)] for n in ids]
        names = dict.fromkeys(name for record in chosen for name in record)
        return {name: as_objects([record.get(name) for record in chosen]) for name in names}

    def fingerprint(self) -> str:
        """Return a fingerprint of the records and the tokenizer."""
        tokens = self.tokenizer.fingerprint() if isinstance(self.tokenizer, Tokenizer) else ""
        return fingerprint_of("prompts", len(self), list_contents(list(self.records)), tokens)

    def describe(self) -> str:
        """Return the number of prompts and their columns."""
        others = [name for name in self.records[0] if name != PROMPT] if self.records else []
        return f"{len(self):,} prompts" + (f" with {', '.join(others)}" if others else "")


def prompt_source(
    *,
    path: str | list[str],
    field: str = PROMPT,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    on_corrupt: OnCorrupt = "stop",
) -> PromptSource:
    """Return the prompts of files.

    Args:
        path: JSON Lines or Parquet files: a file, a folder, a pattern, or a list of these.
        field: the field with the prompt.
        tokenizer: a ``tokenizers`` JSON file; without one, every byte is a token.
        vocab_size: size of the model's vocabulary, which must hold every token.
        on_corrupt: what to do about a record that cannot be read.
    """
    loaded = load_tokenizer(tokenizer, vocab_size)
    return PromptSource(read_prompts(path, field, CorruptRecords(on_corrupt)), loaded)


def read_prompts(
    path: str | list[str], field: str, corrupt: CorruptRecords, flag: str = ""
) -> list[dict[str, Any]]:
    """Return the records of files, with the prompt in ``prompt``; `flag` names its field."""
    reader, files = chat_files(path)
    records: list[dict[str, Any]] = []
    for where, record in parsed_records(reader, files, corrupt):
        if not isinstance(record, dict) or not isinstance(record.get(field), str | list):
            own = record if isinstance(record, dict) else {}
            why = f"its fields are {', '.join(own)}" if own else f"it is {a_type(record)}"
            texts = [name for name, value in own.items() if isinstance(value, str | list)]
            if texts and field not in own and not records and corrupt.policy == "stop":
                named = f"{flag} {' or '.join(texts)}" if flag else Setting("data.field", *texts)
                fix = f"write {named} for the field with the prompt, or repair the record"
                raise UserError(f"{where} has no field `{field}`", why=why, fix=fix)
            corrupt.add(where, f"it has no `{field}` that is a text or a list; {why}")
            continue
        named = {name: value for name, value in record.items() if name != field}
        records.append({PROMPT: record[field], **named})
    if not records:
        raise nothing(f"data.path={path}", corrupt, "there are no prompts")
    return records


def as_prompts(given: Any, tokenizer: Any = None) -> Any:
    """Return lists of records and dicts of columns as prompts; other data as they are."""
    if isinstance(given, Mapping) and PROMPT in given:
        columns = {str(name): list(column) for name, column in given.items()}
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise UserError("the columns of the prompts differ in length", why=str(lengths))
        rows = zip(*columns.values(), strict=True)
        return PromptSource([dict(zip(columns, row, strict=True)) for row in rows], tokenizer)
    return PromptSource(list(given), tokenizer) if isinstance(given, list | tuple) else given


def as_objects(values: Sequence[Any]) -> NDArray[Any]:
    """Return an array of objects, also of lists of one length."""
    return np.fromiter(values, object, len(values))


class SumSource:
    """All sums of two numbers of so many digits: as prompts with answers, or as rows of bytes.

    They come in a random order that is always the same. Only the answer counts in rows of bytes.

    Args:
        digits: the digits of the numbers.
        most: only the first so many sums; None for all.
        for_prompts: whether samples are prompts.
    """

    tokenizer = ByteTokenizer()

    def __init__(
        self, *, digits: int = 2, most: int | None = None, for_prompts: bool = False
    ) -> None:
        if digits not in (1, 2, 3):
            raise UserError(f"data.digits={digits}", fix="write 1, 2 or 3")
        self.digits, self.for_prompts = digits, for_prompts
        self._least = 10 ** (digits - 1)
        order = np.random.default_rng(0).permutation((9 * self._least) ** 2)
        if most is not None and not 1 <= most <= len(order):
            raise UserError(f"data.most={most}", fix=f"write a number from 1 to {len(order)}")
        self._order = order[:most]

    def __len__(self) -> int:
        return len(self._order)

    def rows(self, ids: NDArray[np.int64]) -> HostBatch:
        """Return these sums."""
        chosen = [divmod(int(n), 9 * self._least) for n in self._order[ids]]
        pairs = [(self._least + a, self._least + b) for a, b in chosen]
        prompts = [f"{a}+{b}=" for a, b in pairs]
        answers = [str(a + b) for a, b in pairs]
        if self.for_prompts:
            return {PROMPT: as_objects(prompts), "answer": as_objects(answers)}
        length = 3 * self.digits + 4
        tokens = np.zeros((len(ids), length), np.int32)
        mask = np.zeros((len(ids), length - 1), np.float32)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            text = f"{prompt}{answer}\n".encode()
            tokens[row, : len(text)] = list(text)
            mask[row, len(prompt) - 1 : len(text) - 1] = 1
        return {"tokens": tokens, "mask": mask}

    def fingerprint(self) -> str:
        """Return a fingerprint of the size."""
        return fingerprint_of("sums", self.digits, len(self))

    def describe(self) -> str:
        """Return the number of sums."""
        return f"{len(self):,} sums of two numbers of {counted(self.digits, 'digit')}"
