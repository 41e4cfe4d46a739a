"""Records in JSONL, Parquet and ArrayRecord: the same samples, and what is wrong with one."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from meshwright.data.record_formats import ArrayRecords, JsonLines, ParquetRows
from meshwright.data.tokenizer import load_tokenizer
from meshwright.errors import UserError

pytestmark = pytest.mark.quick

TEXTS = ["first record", "☃", "a third one that is longer than the others", ""]
RECORDS = [
    {"text": text, "ids": [n, n + 1, n + 2], "x": [n / 2, 1.5], "label": n}
    for n, text in enumerate(TEXTS)
]


def write_jsonl(path, records):
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    return JsonLines


def write_zipped(path, records):
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return JsonLines


def write_parquet(path, records):
    pq.write_table(pa.Table.from_pylist(records), path, row_group_size=2)
    return ParquetRows


def write_array_record(path, records):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(json.dumps(record).encode())
    writer.close()
    return ArrayRecords


FORMATS = {
    "records.jsonl": write_jsonl,
    "records.jsonl.gz": write_zipped,
    "records.parquet": write_parquet,
    "records.array_record": write_array_record,
}


@pytest.fixture(params=FORMATS)
def read(request, tmp_path):
    """Return the source of the format, reading the records."""

    def call(records=RECORDS, **settings):
        path = tmp_path / request.param
        files = FORMATS[request.param](path, records)
        return files(path=str(path), **settings).source()

    return call


def documents(source) -> list[list[int]]:
    """Return the documents of packed rows, in order."""
    rows = source.rows(np.arange(len(source)))
    return [
        tokens[segments == number].tolist()
        for tokens, segments in zip(rows["tokens"], rows["segment_ids"], strict=True)
        for number in range(1, segments.max() + 1)
    ]


def test_texts_become_documents_of_bytes(read):
    source = read(sequence_length=63)
    expected = [[*text.encode(), 10] for text in TEXTS if text]
    assert documents(source) == expected
    assert source.tokenizer.decode(documents(source)[1]) == "☃\n"


def test_texts_become_documents_of_a_tokenizer(read, tokenizer_file):
    tokenizer = load_tokenizer(str(tokenizer_file))
    source = read(sequence_length=63, tokenizer=str(tokenizer_file))
    expected = [[*tokenizer.encode(text), tokenizer.marks.end[0]] for text in TEXTS if text]
    assert documents(source) == expected


def test_lists_of_tokens_are_documents_as_they_are(read):
    source = read(sequence_length=7, field="ids", vocab_size=10)
    assert documents(source) == [record["ids"] for record in RECORDS]
    assert source.tokenizer is None


def test_records_become_one_stream_if_asked(read):
    source = read(sequence_length=4, packing="stream")
    rows = source.rows(np.arange(len(source)))
    assert set(rows) == {"tokens"}
    whole = np.concatenate([rows["tokens"][:, :-1].reshape(-1), rows["tokens"][-1:, -1]])
    expected = "".join(text + "\n" for text in TEXTS if text).encode()
    assert bytes(whole.astype(np.uint8)) == expected[: len(whole)]


def test_fields_of_numbers_become_arrays(read):
    source = read(fields=["x", "label"])
    rows = source.rows(np.array([2, 0]))
    np.testing.assert_array_equal(rows["x"], [[1.0, 1.5], [0.0, 1.5]])
    np.testing.assert_array_equal(rows["label"], [2, 0])


BAD_VALUES = {
    "no text": ({"text": None}, {}),
    "token beyond the vocabulary": ({"ids": [1, 99]}, {"field": "ids", "vocab_size": 50}),
    "token below zero": ({"ids": [1, -1]}, {"field": "ids"}),
    "another shape": ({"x": [1.0, 2.0, 3.0]}, {"fields": ["x"]}),
}


@pytest.mark.parametrize("problem", BAD_VALUES)
def test_a_bad_record_stops_or_is_skipped_and_counted(read, problem):
    change, settings = BAD_VALUES[problem]
    records = [*RECORDS[:2], {**RECORDS[2], **change}, RECORDS[3]]
    settings = {"sequence_length": 63, **settings}
    with pytest.raises(UserError, match=r"(line|row) 3|record 2") as caught:
        read(records, **settings)
    assert caught.value.what.endswith(" cannot be read")
    assert "data.on_corrupt=skip" in caught.value.fix
    with pytest.warns(UserWarning, match="1 corrupt record was skipped") as warned:
        source = read(records, **settings, on_corrupt="skip")
    assert len(warned) == 1
    assert "1 corrupt record was skipped" in source.describe()
    assert "1 corrupt record was skipped" in source.describe()
    good = read([*RECORDS[:2], RECORDS[3]], **settings)
    for name, values in good.rows(np.arange(len(good))).items():
        np.testing.assert_array_equal(source.rows(np.arange(len(good)))[name], values)


def test_a_line_that_is_no_json_is_named(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "b"\n{"text": "c"}\n"d"\n')
    with pytest.raises(UserError, match=r"records\.jsonl, line 3 cannot be read") as caught:
        JsonLines(path=str(path), sequence_length=4).source()
    assert caught.value.why.startswith("it is not JSON: ")
    with pytest.warns(UserWarning, match="2 corrupt records were skipped"):
        source = JsonLines(path=str(path), sequence_length=4, on_corrupt="skip").source()
    assert documents(source) == [[97, 10], [99, 10]]


def test_a_dataset_without_a_whole_record_is_empty(read):
    with pytest.raises(UserError, match="is empty"):
        read([{"text": ""}], sequence_length=4)
    with pytest.raises(UserError, match="is empty") as caught:
        read([{"text": "a", "x": "b"}], fields=["x"], on_corrupt="skip")
    assert "every record is corrupt" in caught.value.why


def test_the_tokenizer_must_fit_the_model(read, tokenizer_file):
    with pytest.raises(UserError, match="the tokenizer does not fit the model"):
        read(sequence_length=4, tokenizer=str(tokenizer_file), vocab_size=10)


def test_a_missing_column_is_named(tmp_path):
    write_parquet(tmp_path / "t.parquet", RECORDS)
    with pytest.raises(UserError, match="has no column `txt`") as caught:
        ParquetRows(path=str(tmp_path / "t.parquet"), field="txt", sequence_length=4).source()
    assert caught.value.why == "its columns are text, ids, x, label"
    assert caught.value.fix == "did you mean `text`?"


@pytest.mark.parametrize(
    ("name", "files"),
    [("t.parquet", ParquetRows), ("t.array_record", ArrayRecords)],
)
def test_a_file_that_is_cut_off_is_named(tmp_path, name, files):
    FORMATS[f"records{name[1:]}"](tmp_path / name, RECORDS * 50)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=f"cannot read .*{name}"):
        files(path=str(tmp_path / name), sequence_length=4).source()


@pytest.mark.parametrize("content", ["text", "tokens"])
def test_array_records_of_text_or_tokens(tmp_path, content):
    writer = ArrayRecordWriter(str(tmp_path / "t.array_record"), "group_size:1")
    for text in TEXTS:
        tokens = np.frombuffer(text.encode(), np.uint8).astype(np.uint16)
        writer.write(text.encode() if content == "text" else tokens.tobytes())
    writer.close()
    source = ArrayRecords(path=str(tmp_path), content=content, sequence_length=63).source()
    end = [10] if content == "text" else []
    assert documents(source) == [[*text.encode(), *end] for text in TEXTS if text]
