"""Tokens at the start and the end of documents, as the files beside a tokenizer say."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.text.json_text import parse_json

CONFIG = "tokenizer_config.json"

Files = Callable[[str], str | bytes | None]
"""Returns the content of a file by its name; None if there is none."""

END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
"""Names of the end-of-document token, tried in this order if no file names one."""


@dataclass(frozen=True)
class DocumentMarks:
    """The tokens before and after every document, also in words.

    ``names`` are the special tokens by their keys in tokenizer_config.json; ``remarks`` say what in
    the files has no effect, although it seems to.
    """

    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    text: str = ""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    remarks: tuple[str, ...] = ()


def read_marks(tokenizer: Any, file: Path) -> DocumentMarks:
    """Return the marks of documents, and make the tokenizer give the tokens transformers gives.

    Its post-processor decides what is put around a text, whatever ``add_bos_token`` says. Special
    tokens that only tokenizer_config.json names are added. Texts are never cut or padded.
    """
    # Files beside one of another name may belong to another tokenizer.
    files = files_of(file.parent if file.name == "tokenizer.json" else None)
    config = object_in(files, CONFIG)
    if "added_tokens_decoder" not in config:
        config |= object_in(files, "special_tokens_map.json")
    names = {key: name for key in ("bos_token", "eos_token") if (name := _name(config, key))}
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_special_tokens([name for name in names.values() if name not in added])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    start, end = _around(tokenizer)
    source, remarks = "as the post-processor says", list[str]()
    if config.get("add_bos_token") and "bos_token" in names and not start:
        remarks.append(
            f"documents start without {names['bos_token']}, because the post-processor of {file} "
            f"does not add it; as in transformers, add_bos_token in {CONFIG} has no effect then"
        )
    eos = [tokenizer.token_to_id(names["eos_token"])] if "eos_token" in names else []
    for token, named in [(each, f"the eos_token of {CONFIG}") for each in eos] or named_ends(files):
        if tokenizer.id_to_token(token) is not None:
            end, source = end if token in end else (*end, token), named
            break
        remarks.append(f"the end token {token} ({named}) is not in the tokenizer {file}")
    if not end:
        known = (tokenizer.token_to_id(name) for name in END_NAMES)
        end = tuple(token for token in known if token is not None)[:1]
        source = "known by its name only"
    if end:
        names.setdefault("eos_token", tokenizer.id_to_token(end[-1]))
    text = _describe(tokenizer, start, end, source)
    return DocumentMarks(start, end, text, names, tuple(remarks))


def named_ends(files: Files) -> Iterator[tuple[int, str]]:
    """Yield the end tokens that a model's files name, and where."""
    for name in ("generation_config.json", "config.json"):
        values = object_in(files, name)
        text = values.get("text_config")
        for section in (values, text if isinstance(text, dict) else {}):
            found = section.get("eos_token_id")
            for token in found if isinstance(found, list) else [] if found is None else [found]:
                if type(token) is not int or token < 0:
                    raise UserError(f"eos_token_id={found} in {name} is not a token or a list")
                yield token, f"the eos_token_id of {name}"


def _around(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what the post-processor puts before and after a text."""
    for text in ("a", *tokenizer.get_vocab()):
        encoded = tokenizer.encode(text)
        own = [place for place, of in enumerate(encoded.sequence_ids) if of is not None]
        if own:
            return tuple(encoded.ids[: own[0]]), tuple(encoded.ids[own[-1] + 1 :])
    return (), ()


def _describe(tokenizer: Any, start: tuple[int, ...], end: tuple[int, ...], source: str) -> str:
    first, last = ([f"{tokenizer.id_to_token(i)} ({i})" for i in ids] for ids in (start, end))
    parts = [f"start with {' '.join(first)}"] if start else []
    parts += [f"end with {' '.join(last)}, {source}"] if end else []
    return f"documents {' and '.join(parts)}" if parts else "nothing separates documents"


def _name(config: Mapping[str, Any], key: str) -> str | None:
    value = config.get(key)
    content = value.get("content") if isinstance(value, dict) else value
    if content is None or isinstance(content, str):
        return content
    raise UserError(f"{key} in {CONFIG} is not the text of a token", why=f"it is {value}")


def files_of(folder: Path | None) -> Files:
    """Return what reads the files of a folder; None has none."""

    def read(name: str) -> bytes | None:
        path = None if folder is None else folder / name
        return path.read_bytes() if path is not None and path.is_file() else None

    return read


def object_in(files: Files, name: str, origin: object = None) -> dict[str, Any]:
    """Return the object in a JSON file, which is from somewhere; empty without the file."""
    text = files(name)
    values = {} if text is None else parse_json(text)
    if isinstance(values, dict):
        return values
    raise UserError(
        f"cannot read {name if origin is None else f'{origin}/{name}'}",
        why="it is not a JSON object",
        fix="download the folder again, or remove the file",
    )
