"""Tokens of files, computed once and stored in memory-mapped files that runs share."""

import atexit
import hashlib
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.build_once import Progress, build_once
from meshwright.data.cache_entry import FORMAT, Entry, PartialEntry
from meshwright.data.corrupt import CANNOT_BE_READ, CorruptRecords, OnCorrupt, with_count
from meshwright.data.document_marks import DocumentMarks
from meshwright.data.documents import DocumentBlock, Packing, Position, tokenized
from meshwright.data.fingerprints import changed, digests, stamp
from meshwright.data.packing import PackedPart, PackingIndex, collect, pack_parts
from meshwright.data.protocols import Source
from meshwright.data.token_rows import PackedRows, StreamRows
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import ANY, Setting, UserError
from meshwright.runtime.activity import activity
from meshwright.runtime.host_machine import user_cache

_origins: dict[str, None] = {}
"""Where tokens came from, until a run reports it."""
NOTE_SECONDS = 5.0
"""How often a writer notes its progress, so that another process can continue from there."""


@dataclass(frozen=True)
class Corpus:
    """Files of documents, and everything that their tokens depend on.

    The tokenizer is None if documents come as tokens. ``read`` yields the documents from a position
    on; ``wrong`` is what is said about a record that cannot be read.
    """

    name: str
    files: Sequence[Path]
    tokenizer: Tokenizer | None
    dtype: Any
    settings: tuple[Any, ...]
    read: Callable[[Position], Iterator[DocumentBlock]]
    on_corrupt: OnCorrupt
    wrong: tuple[str, str] = CANNOT_BE_READ

    def rows(self, cache_dir: str | None, packing: Packing, sequence_length: int) -> Source:
        """Return the documents as rows of tokens, which are read from the cache."""
        entry, corrupt = self.cached(cache_dir)
        tokens, boundaries = entry.array("tokens"), entry.array("boundaries")
        self._tell_marks(entry, packing)
        if packing == "stream":
            rows = StreamRows([tokens], sequence_length, self.name, self.tokenizer)
        else:
            row_length = sequence_length + 1
            parts = partial(pack_parts, boundaries, row_length)
            index = packed(entry, f"rows-of-{row_length}", parts, row_length, self.name)
            rows = PackedRows(tokens, boundaries, index, self.name, self.tokenizer)
        return with_count(rows, corrupt)

    def cached(self, cache_dir: str | None) -> tuple[Entry, CorruptRecords]:
        """Return the tokens from the cache, written now if need be, and what was skipped."""
        entry = _cached(self, cache_dir)
        corrupt = self._corrupt(entry.facts)
        if not entry.lengths["tokens"]:
            raise nothing(self.name, corrupt, "there is no document with any content")
        return entry, corrupt

    def key(self, contents: Sequence[str]) -> str:
        """Return the name of the entry, which follows from what the tokens depend on."""
        own = None if self.tokenizer is None else self.tokenizer.fingerprint()
        facts = FORMAT, contents, own, np.dtype(self.dtype).str, self.settings
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]

    def write(self, entry: PartialEntry, progress: Progress) -> dict[str, Any]:
        """Write the tokens, continuing where an earlier writer stopped; return the facts."""
        state = entry.progress or {"after": [0], "done": 0.0, "skipped": 0, "first": None}
        self._corrupt(state)
        if not entry.lengths["boundaries"]:
            entry.append("boundaries", np.zeros(1, np.int64))
        total = sum(file.stat().st_size for file in self.files)
        progress.start_at(state["done"], total)
        noted = time.monotonic()
        blocks = self._checked(self.read(tuple(state["after"])))
        for batch in tokenized(blocks, self.tokenizer, self.dtype):
            entry.append("boundaries", entry.lengths["tokens"] + batch.ends)
            entry.append("tokens", batch.tokens)
            state["skipped"] += len(batch.skipped)
            state["first"] = state["first"] or next(iter(batch.skipped), None)
            progress(batch.done, total)
            if batch.after is None:
                continue
            state.update(after=batch.after, done=batch.done)
            if time.monotonic() - noted >= NOTE_SECONDS:
                entry.note(state)
                noted = time.monotonic()
        return {
            "source": self.name,
            "files": list(map(str, self.files)),
            "skipped": state["skipped"],
            "first": state["first"],
        }

    def _tell_marks(self, entry: Entry, packing: Packing) -> None:
        """Tell what documents start and end with; warn if they are joined without a separator."""
        marks = DocumentMarks() if self.tokenizer is None else self.tokenizer.marks
        for remark in marks.remarks:
            warnings.warn(remark, stacklevel=2)
        places = entry.array("boundaries")[1:1001] - 1
        joined = packing == "stream" and not (marks.start or marks.end)
        if joined and self.tokenizer is None:
            # Lists of tokens may end with a token of their own.
            joined = len(np.unique(entry.array("tokens")[places])) > 1
        if joined and len(places) > 1:
            warnings.warn(
                f"nothing separates the documents of {self.name}: one continues where another "
                'ends. Name the end token as "eos_token" in a tokenizer_config.json beside the '
                f"tokenizer, or write {Setting('data.packing', 'documents')}",
                stacklevel=2,
            )
        elif marks.text and (len(places) > 1 or marks.start):
            _origins[marks.text] = None

    def _checked(self, blocks: Iterator[DocumentBlock]) -> Iterator[DocumentBlock]:
        """Yield the blocks; the first corrupt record is an error unless they are skipped."""
        for block in blocks:
            if block.skipped and self.on_corrupt == "stop":
                self._corrupt({"skipped": 1, "first": (block.after[0], *block.skipped[0])})
            yield block

    def _corrupt(self, facts: dict[str, Any]) -> CorruptRecords:
        """Return the records that were skipped; raise for the first if that is not allowed."""
        found = CorruptRecords(self.on_corrupt, wrong=self.wrong)
        if facts["skipped"]:
            number, where, why = facts["first"]
            found.add(", ".join(filter(None, [str(self.files[number]), where])), why)
            found.count = facts["skipped"]
        return found


def nothing(name: str, corrupt: CorruptRecords, why: str) -> UserError:
    """Return the error about data without a single document."""
    if corrupt.count:
        why = f"every record is corrupt: {corrupt.first}"
    return UserError(f"{name} is empty", why=why)


def _cached(corpus: Corpus, cache_dir: str | None) -> Entry:
    """Return the tokens of a corpus: from the cache, or written to it now."""
    root = user_cache("tokens") if cache_dir is None else Path(cache_dir).expanduser().absolute()
    before = [stamp(file) for file in corpus.files]
    with activity(f"looking for changes in {corpus.name}") as report:
        name = corpus.key(digests(corpus.files, root / "files", report))

    written = False

    def write(entry: PartialEntry, progress: Progress) -> dict[str, Any]:
        nonlocal written
        written = True
        facts = corpus.write(entry, progress)
        for file, known in zip(corpus.files, before, strict=True):
            if stamp(file) != known:
                raise changed(file)
        return facts

    dtypes = {"tokens": corpus.dtype, "boundaries": np.int64}
    what = f"tokenizing {corpus.name}"
    try:
        entry = build_once(root / name, what, dtypes, write)
        _origins[_origin(corpus.name, entry, written=written)] = None
        return entry
    except OSError as error:
        why = error.strerror or str(error)
        if cache_dir is not None:
            raise UserError(
                "the tokens of the data cannot be stored in "
                f"{Setting('data.cache_dir', cache_dir)}",
                why=f"{why}: {root}",
                fix="name a folder that can be written to",
            ) from error
        _warn_unwritable(str(root), why)
        return build_once(_temporary_folder() / name, what, dtypes, write)


def _origin(name: str, entry: Entry, *, written: bool) -> str:
    """Return where tokens come from."""
    count = entry.lengths["boundaries"] - 1
    documents = f"{count:,} document{'s' * (count != 1)}"
    tokens = f"{entry.lengths['tokens']:,} tokens"
    if written:
        return f"tokenized {documents} of {name}, {tokens}, into {entry.folder}"
    return f"{tokens} of {name} from the cache: {entry.folder}"


def take_origins() -> list[str]:
    """Return where the tokens come from that were read since the last call, a line for each."""
    taken = list(_origins)
    _origins.clear()
    return taken


def tell(line: str) -> None:
    """Have a run say this about its tokens when it starts."""
    _origins[line] = None


def packed(
    entry: Entry, suffix: str, parts: Callable[[], Iterator[PackedPart]], row_length: int, name: str
) -> PackingIndex:
    """Return how documents are packed into rows of one length: beside the tokens in the cache.

    The suffix distinguishes this way to pack them from others.
    """
    width = np.dtype(entry.dtypes["tokens"]).itemsize

    def write(target: PartialEntry, progress: Progress) -> dict[str, Any]:
        # Cheap to recompute, so no progress is noted.
        num_tokens = 0
        for part in parts():
            target.append("starts", part.starts)
            target.append("lengths", part.lengths)
            target.append("first", part.first)
            num_tokens += int(part.lengths.sum())
            progress(int(part.starts.max()) * width, entry.lengths["tokens"] * width)
        target.append("first", np.array([target.lengths["starts"]]))
        return {"num_tokens": num_tokens}

    dtypes = {"starts": np.int64, "lengths": np.int32, "first": np.int64}
    folder = entry.folder.with_name(f"{entry.folder.name}-{suffix}")
    try:
        built = build_once(folder, f"packing the documents of {name}", dtypes, write)
    except OSError:
        # A complete cache that this process may only read.
        return collect(parts(), row_length)
    starts, lengths, first = (built.array(each) for each in ("starts", "lengths", "first"))
    return PackingIndex(starts, lengths, first, row_length, built.facts["num_tokens"])


@cache
def _temporary_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="meshwright-tokens-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def _warn_unwritable(folder: str, why: str) -> None:
    warnings.warn(
        f"the tokens of the data cannot be stored in {folder} ({why}): they go to a temporary "
        f"folder, in every process, and the next run recomputes them. Name another folder "
        f"with {Setting('data.cache_dir', ANY)}",
        stacklevel=2,
    )
