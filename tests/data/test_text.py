"""Text files as rows of tokens, against the same files read by hand."""

import numpy as np
import pytest

from meshwright.data.text_source import text_source
from meshwright.data.tokenizer import load_tokenizer
from meshwright.errors import UserError

pytestmark = pytest.mark.quick


def all_rows(source) -> dict[str, np.ndarray]:
    return source.rows(np.arange(len(source)))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b.txt").write_text("second file ☃")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.txt").write_bytes(b"first\nfile\xff")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".hidden").write_text("not read")
    return tmp_path


def test_bytes_of_all_files_in_the_order_of_their_names(folder):
    source = text_source(path=str(folder), sequence_length=4)
    rows = all_rows(source)["tokens"]
    whole = np.concatenate([rows[:, :-1].reshape(-1), rows[-1:, -1]])
    expected = b"first\nfile\xff\n" + "second file ☃\n".encode()
    assert bytes(whole.astype(np.uint8)) == expected[: len(whole)]
    assert len(expected) - len(whole) < 4
    assert source.tokenizer.decode(rows[0]) == "first"


def test_files_stay_apart_when_they_are_documents(folder):
    source = text_source(path=str(folder), sequence_length=31, packing="documents")
    rows = all_rows(source)
    assert len(source) == 1
    sizes = np.bincount(rows["segment_ids"][0])
    assert sizes.tolist() == [32 - 12 - 16, 12, 16]


def test_a_tokenizer_reads_the_same_text(folder, tokenizer_file):
    (folder / "a" / "one.txt").write_text("the mesh has an axis")
    tokenizer = load_tokenizer(str(tokenizer_file))
    source = text_source(path=str(folder), sequence_length=3, tokenizer=str(tokenizer_file))
    rows = all_rows(source)["tokens"]
    got = np.concatenate([rows[:, :-1].reshape(-1), rows[-1:, -1]])
    texts = ["the mesh has an axis", "second file ☃"]
    expected = [t for text in texts for t in (*tokenizer.encode(text), tokenizer.marks.end[0])]
    np.testing.assert_array_equal(got, expected[: len(got)])


def test_a_file_that_is_no_utf8_stops_or_is_skipped(folder, tokenizer_file):
    settings = {"path": str(folder), "sequence_length": 3, "tokenizer": str(tokenizer_file)}
    with pytest.raises(UserError, match=r"one\.txt cannot be read") as caught:
        text_source(**settings)
    assert caught.value.why == "it is not UTF-8: invalid start byte at byte 10"
    with pytest.warns(UserWarning, match="1 corrupt record was skipped"):
        source = text_source(**settings, on_corrupt="skip")
    assert "1 corrupt record was skipped" in source.describe()
    assert source.describe().endswith("; 1 corrupt record was skipped")


def test_what_is_missing_empty_or_too_short_is_named(tmp_path):
    with pytest.raises(UserError, match="does not exist") as caught:
        text_source(path=str(tmp_path / "corpus.txt"), sequence_length=4)
    (tmp_path / "corpsu.txt").write_text("")
    with pytest.raises(UserError, match="does not exist") as caught:
        text_source(path=str(tmp_path / "corpus.txt"), sequence_length=4)
    assert caught.value.fix == "did you mean `corpsu.txt`?"
    with pytest.raises(UserError, match="is empty"):
        text_source(path=str(tmp_path / "corpsu.txt"), sequence_length=4)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match="is empty") as caught:
        text_source(path=str(tmp_path / "nothing"), sequence_length=4)
    assert caught.value.why == "the folder has no files"
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(UserError, match="is too short") as caught:
        text_source(path=str(tmp_path / "short.txt"), sequence_length=4)
    assert caught.value.why == "it has 4 tokens and one row takes 5"
    with pytest.raises(UserError, match="the tokenizer does not fit the model"):
        text_source(sequence_length=4, vocab_size=100)
