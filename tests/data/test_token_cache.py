"""Tokens in the cache: the same rows as without it, written once, never damaged, never whole."""

import gzip
import json
import os
import pickle
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from meshwright.data.cache_entry import PartialEntry
from meshwright.data.documents import pieces
from meshwright.data.files import map_array
from meshwright.data.record_formats import JsonLines, ParquetRows
from meshwright.data.text_source import text_source
from meshwright.data.token_cache import take_origins
from meshwright.data.token_rows import StreamRows
from meshwright.data.tokenizer import load_tokenizer
from meshwright.errors import UserError

pytestmark = pytest.mark.quick

ROWS = {
    "jsonl documents": (3531714980, 2028611516, 2692877777),
    "jsonl stream": (378530305,),
    "jsonl ids": (7669635, 1938822504, 3085734755),
    "parquet": (3531714980, 2028611516, 2692877777),
    "text": (226454991,),
    "text documents": (2848477197, 4030880013, 2527521254),
}
"""Checksums of all rows, as they were computed without a cache."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Return a folder with the same texts as JSON Lines, a table and text files."""
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(7)
    sizes = random.integers(0, 90, 400)
    texts = ["".join(chr(97 + n) for n in random.integers(0, 26, size)) for size in sizes]
    records = [json.dumps({"text": t, "ids": [len(t), 1, 2]}) + "\n" for t in texts]
    (folder / "t.jsonl").write_text("".join(records))
    pq.write_table(pa.table({"text": texts}), folder / "t.parquet")
    (folder / "texts").mkdir()
    for number, text in enumerate(texts[:50]):
        (folder / "texts" / f"{number:03}.txt").write_text(text * 20)
    return folder


def sources(corpus, cache):
    """Return how each kind of data is read into a cache."""
    lines = {"path": str(corpus / "t.jsonl"), "sequence_length": 32, "cache_dir": str(cache)}
    table = {**lines, "path": str(corpus / "t.parquet")}
    texts = {**lines, "path": str(corpus / "texts")}
    return {
        "jsonl documents": lambda: JsonLines(**lines).source(),
        "jsonl stream": lambda: JsonLines(**lines, packing="stream").source(),
        "jsonl ids": lambda: JsonLines(**lines, field="ids", vocab_size=100).source(),
        "parquet": lambda: ParquetRows(**table).source(),
        "text": lambda: text_source(**texts),
        "text documents": lambda: text_source(**texts, packing="documents"),
    }


def all_rows(source):
    return source.rows(np.arange(len(source)))


def entries(cache, name="tokens.bin"):
    return {path.parent.name: path.stat().st_mtime_ns for path in cache.rglob(name)}


@pytest.fixture
def refuse_to_tokenize(monkeypatch):
    """Return what makes any further tokenizing fail."""

    def never(*_):
        raise AssertionError("tokenized again")

    return lambda: monkeypatch.setattr("meshwright.data.token_cache.tokenized", never)


@pytest.mark.parametrize("kind", ROWS)
def test_samples_are_the_same_from_the_cache(corpus, tmp_path, kind, refuse_to_tokenize):
    for _ in range(2):
        source = sources(corpus, tmp_path)[kind]()
        assert tuple(zlib.crc32(v.tobytes()) for v in all_rows(source).values()) == ROWS[kind]
        refuse_to_tokenize()
    again = pickle.loads(pickle.dumps(source))
    assert len(pickle.dumps(source)) < 4000
    for name, values in all_rows(source).items():
        np.testing.assert_array_equal(all_rows(again)[name], values)


def test_a_copy_under_another_name_shares_the_tokens(corpus, tmp_path, refuse_to_tokenize):
    cache = str(tmp_path / "cache")
    source = JsonLines(path=str(corpus / "t.jsonl"), sequence_length=32, cache_dir=cache).source()
    refuse_to_tokenize()
    (tmp_path / "copy.jsonl").write_bytes((corpus / "t.jsonl").read_bytes())
    copy = JsonLines(path=str(tmp_path / "copy.jsonl"), sequence_length=16, cache_dir=cache)
    assert copy.source().tokens.filename == source.tokens.filename


def test_an_edit_that_keeps_size_and_time_is_noticed(tmp_path):
    path = tmp_path / "t.jsonl"

    def read():
        found = JsonLines(path=str(path), sequence_length=8, cache_dir=str(tmp_path / "cache"))
        return bytes(np.asarray(found.source().tokens))

    path.write_text('{"text": "old"}\n')
    before = path.stat()
    assert read() == b"old\n"
    path.write_text('{"text": "new"}\n')
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read() == b"new\n"


def test_a_tokenizer_has_tokens_of_its_own(corpus, tmp_path, tokenizer_file):
    settings = {"path": str(corpus / "texts"), "sequence_length": 8, "cache_dir": str(tmp_path)}
    bytes_, words = text_source(**settings), text_source(**settings, tokenizer=str(tokenizer_file))
    assert len(entries(tmp_path)) == 2
    assert bytes_.arrays[0].dtype == np.uint8
    assert words.arrays[0].dtype == np.uint16


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "header", "packing"])
def test_a_damaged_entry_is_named_and_written_again(corpus, tmp_path, caplog, damage):
    read = sources(corpus, tmp_path)["jsonl documents"]
    expected = all_rows(read())
    file = next(tmp_path.rglob("lengths.bin" if damage == "packing" else "tokens.bin"))
    if damage == "truncated":
        os.truncate(file, 100)
    elif damage in ("changed", "packing"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "missing":
        file.unlink()
    else:
        (file.parent / "entry.json").write_text('{"format": 1}')
    source = read()
    assert str(file.parent) in caplog.text
    assert "it is rewritten" in caplog.text
    for name, values in all_rows(source).items():
        np.testing.assert_array_equal(values, expected[name])
    caplog.clear()
    read()
    assert not caplog.text


@pytest.mark.parametrize("kind", ["jsonl", "gz", "parquet", "texts"])
def test_a_writer_goes_on_where_another_has_stopped(corpus, tmp_path, monkeypatch, kind):
    """Writers die after one more batch each; the last finds all but the last batch written."""
    path = {"texts": corpus / "texts", "gz": tmp_path / "t.jsonl.gz"}.get(kind)
    path = path or corpus / f"t.{kind}"
    if kind == "gz":
        path.write_bytes(gzip.compress((corpus / "t.jsonl").read_bytes()))
    settings = {"path": str(path), "sequence_length": 32, "on_corrupt": "skip"}

    def read(cache):
        settings["cache_dir"] = str(tmp_path / cache)
        if kind == "texts":
            return text_source(**settings, packing="documents")
        return (ParquetRows if kind == "parquet" else JsonLines)(**settings).source()

    expected = read("whole")
    monkeypatch.setattr("meshwright.data.record_formats.BLOCK_BYTES", 1000)
    monkeypatch.setattr("meshwright.data.record_formats.BATCH_BYTES", 1000)
    monkeypatch.setattr("meshwright.data.documents.BATCH_SIZE", 3000)
    monkeypatch.setattr("meshwright.data.token_cache.NOTE_SECONDS", 0)
    died, real = 0, PartialEntry.note

    def die_after_it(entry, progress):
        real(entry, progress)
        # What comes after the note is lost.
        entry.append("tokens", np.full(7, 1))
        raise KeyboardInterrupt

    monkeypatch.setattr(PartialEntry, "note", die_after_it)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            read("stopped")
        died += 1
        assert not entries(tmp_path / "stopped", "entry.json")
        assert not list((tmp_path / "stopped").glob("*.lock"))
    monkeypatch.setattr(PartialEntry, "note", real)
    source = read("stopped")
    assert died == 3
    assert bytes(source.tokens) == bytes(expected.tokens)
    assert bytes(source.boundaries) == bytes(expected.boundaries)
    assert not list((tmp_path / "stopped").glob("*partial*"))


def test_skipping_goes_on_after_the_record_that_stopped_the_run(tmp_path, monkeypatch):
    """Entries do not depend on the policy; one with skipped records still stops a strict run."""
    monkeypatch.setattr("meshwright.data.record_formats.BLOCK_BYTES", 10)
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "a"}\n{"text": 5}\n{"text": "b"}\n')
    settings = {"path": str(path), "sequence_length": 4, "cache_dir": str(tmp_path / "cache")}
    for policy in ("stop", "skip", "stop"):
        if policy == "stop":
            with pytest.raises(UserError, match=r"t\.jsonl, line 2 cannot be read") as caught:
                JsonLines(**settings).source()
            assert caught.value.why == "`text` is an int, not text"
        else:
            with pytest.warns(UserWarning, match=r"t\.jsonl, line 2: `text` is an int"):
                source = JsonLines(**settings, on_corrupt="skip").source()
            assert "1 corrupt record was skipped" in source.describe()


def test_a_row_of_a_table_is_named_with_its_row_group(tmp_path):
    table = pa.table({"text": ["a", "b", None, "d"]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    with pytest.raises(UserError) as caught:
        ParquetRows(path=str(tmp_path / "t.parquet"), sequence_length=4).source()
    assert caught.value.what.endswith("t.parquet, row 3 (row group 1) cannot be read")
    whole = bytearray((tmp_path / "t.parquet").read_bytes())
    begin = pq.ParquetFile(tmp_path / "t.parquet").metadata.row_group(1).column(0)
    whole[begin.data_page_offset : begin.data_page_offset + 8] = bytes(8)
    (tmp_path / "t.parquet").write_bytes(whole)
    with pytest.raises(UserError, match=r"cannot read .*t\.parquet, row group 1"):
        ParquetRows(path=str(tmp_path / "t.parquet"), sequence_length=4).source()


def test_a_text_that_is_no_unicode_is_named_with_its_line(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": "fine"}\n{"text": "half \\ud83d"}\n')
    with pytest.raises(UserError, match=r"t\.jsonl, line 2 cannot be read") as caught:
        JsonLines(path=str(tmp_path / "t.jsonl"), sequence_length=4).source()
    assert "surrogates not allowed at character 5" in caught.value.why


def test_a_long_text_is_cut_without_changing_its_tokens(tmp_path, monkeypatch, tokenizer_file):
    """Against the library, which gets the whole text at once."""
    random = np.random.default_rng(0)
    words = ["the", "axis", "naïve", "☃", "  ", "\n", "\n\n", " \n", "has", ";\n"]
    text = "".join(words[n] + " " * int(n % 3 == 0) for n in random.integers(0, 10, 20_000))
    (tmp_path / "t.txt").write_text(text)
    (tmp_path / "t.jsonl").write_text(json.dumps({"text": text}) + "\n")
    for name, value in (("LONG", 10_000), ("PIECE", 500), ("CONTEXT", 64)):
        monkeypatch.setattr(f"meshwright.data.documents.{name}", value)
    monkeypatch.setattr("meshwright.data.text_source.LONG", 10_000)
    monkeypatch.setattr("meshwright.data.text_source.READ_BYTES", 3_001)
    library = Tokenizer.from_file(str(tokenizer_file))
    expected = library.encode(text, add_special_tokens=False).ids
    expected.append(library.token_to_id("<|endoftext|>"))
    settings = {"tokenizer": str(tokenizer_file), "sequence_length": 9, "packing": "documents"}
    settings["cache_dir"] = str(tmp_path / "cache")
    whole = text_source(path=str(tmp_path / "t.txt"), **settings)
    record = JsonLines(path=str(tmp_path / "t.jsonl"), **settings).source()
    for source in (whole, record):
        assert source.tokens.tolist() == expected
        assert source.boundaries.tolist() == [0, len(expected)]
    parts = [text[start : start + 1000] for start in range(0, len(text), 1000)]
    groups = list(pieces(parts, load_tokenizer(str(tokenizer_file))))
    assert "".join(piece for group in groups for piece in group) == text
    assert len(groups) > 4
    assert max(len(piece) for group in groups for piece in group) < 5000


def test_a_byte_that_is_not_utf8_is_named_in_a_long_text(tmp_path, monkeypatch, tokenizer_file):
    monkeypatch.setattr("meshwright.data.text_source.LONG", 100)
    monkeypatch.setattr("meshwright.data.text_source.READ_BYTES", 64)
    (tmp_path / "t.txt").write_bytes("☃".encode() * 50 + b"\xff" + b"a" * 100)
    with pytest.raises(UserError, match=r"t\.txt cannot be read") as caught:
        text_source(path=str(tmp_path / "t.txt"), sequence_length=4, tokenizer=str(tokenizer_file))
    assert caught.value.why == "it is not UTF-8: invalid start byte at byte 150"


@pytest.mark.parametrize("form", ["pattern", "list", "folder"])
def test_several_files_are_one_corpus(tmp_path, form):
    folder = tmp_path / "parts"
    folder.mkdir()
    for number in (2, 0, 1):
        (folder / f"{number}.jsonl").write_text(json.dumps({"text": str(number)}) + "\n")
    path = {
        "pattern": str(folder / "*.jsonl"),
        "list": [str(folder / f"{number}.jsonl") for number in (0, 1, 2)],
        "folder": str(folder),
    }[form]
    source = JsonLines(path=path, sequence_length=4, cache_dir=str(tmp_path / "cache")).source()
    assert bytes(np.asarray(source.tokens)) == b"0\n1\n2\n"
    with pytest.raises(UserError, match="matches no file"):
        JsonLines(path=str(folder / "*.txt"), sequence_length=4).source()
    with pytest.raises(UserError, match="the list names no files"):
        JsonLines(path=[], sequence_length=4).source()


def test_reading_all_rows_keeps_little_of_them_in_memory(tmp_path, monkeypatch):
    """A process holds the pages it has read, unless it gives them back."""
    tokens = np.arange(2**24, dtype=np.uint16)
    tokens.tofile(tmp_path / "t.bin")
    rows = StreamRows([map_array(str(tmp_path / "t.bin"), np.uint16, 0, tokens.shape)], 1023, "t")

    def grown():
        before = mapped_bytes()
        for start in range(0, len(rows), 64):
            ids = np.arange(start, min(start + 64, len(rows)))
            assert rows.rows(ids)["tokens"][0, 0] == tokens[start * 1023]
        return mapped_bytes() - before

    monkeypatch.setattr("meshwright.data.files.RESIDENT_BYTES", 2**40)
    assert grown() > 30 * 2**20
    monkeypatch.setattr("meshwright.data.files.RESIDENT_BYTES", 2**22)
    grown()
    assert grown() < 8 * 2**20


def mapped_bytes():
    """Return how much of mapped files is in this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile"))


def test_where_tokens_come_from_is_told_once(tmp_path):
    (tmp_path / "own.txt").write_text("a few words\n" * 400)
    settings = {
        "sequence_length": 16,
        "path": str(tmp_path / "own.txt"),
        "cache_dir": str(tmp_path),
    }
    take_origins()
    for said in ("own.txt, 4,801 tokens, into ", "own.txt from the cache: "):
        text_source(**settings)
        (line,) = take_origins()
        assert said in line
        assert str(tmp_path) in line
    assert not take_origins()
