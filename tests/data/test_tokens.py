"""Token arrays on disk: what NumPy reads from the same files, without reading all of it."""

import pickle

import numpy as np
import pytest

from meshwright.data.tokens import token_source
from meshwright.errors import UserError

pytestmark = pytest.mark.quick

TOKENS = np.random.default_rng(0).integers(0, 50_000, 10_001)


@pytest.fixture(params=["npy", "bin"])
def written(request, tmp_path):
    path = tmp_path / f"tokens.{request.param}"
    if request.param == "npy":
        np.save(path, TOKENS.astype(np.int32))
        return {"path": str(path)}
    TOKENS.astype(np.uint32).tofile(path)
    return {"path": str(path), "dtype": "uint32"}


def test_rows_are_those_of_the_file(written):
    source = token_source(**written, sequence_length=100, vocab_size=50_000)
    assert len(source) == 100
    ids = np.array([7, 0, 99])
    expected = np.stack([TOKENS[i * 100 : i * 100 + 101] for i in ids])
    np.testing.assert_array_equal(source.rows(ids)["tokens"], expected)


def test_another_process_opens_the_file_again(written):
    source = token_source(**written, sequence_length=100)
    sent = pickle.dumps(source)
    assert len(sent) < 1000
    copy = pickle.loads(sent)
    np.testing.assert_array_equal(
        copy.rows(np.arange(100))["tokens"], source.rows(np.arange(100))["tokens"]
    )
    assert copy.fingerprint() == source.fingerprint()
    part = pickle.loads(pickle.dumps(source.arrays[0][5:9]))
    np.testing.assert_array_equal(part, TOKENS[5:9])


def test_a_folder_of_shards(tmp_path):
    for number in range(3):
        np.save(tmp_path / f"shard{number}.npy", np.arange(11, dtype=np.uint16) + 100 * number)
    source = token_source(path=str(tmp_path), sequence_length=5)
    first = source.rows(np.arange(len(source)))["tokens"][:, 0]
    assert first.tolist() == [0, 5, 100, 105, 200, 205]


def test_documents_that_end_with_a_token(tmp_path, tokenizer_file):
    np.save(tmp_path / "tokens.npy", np.array([5, 6, 0, 7, 8, 9, 0, 1, 2], np.uint16))
    source = token_source(
        path=str(tmp_path / "tokens.npy"),
        sequence_length=8,
        separator=0,
        tokenizer=str(tokenizer_file),
    )
    rows = source.rows(np.array([0]))
    assert rows["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 2, 2, 3, 3]]
    assert rows["positions"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0, 1]]
    assert isinstance(source.tokenizer.decode(rows["tokens"][0]), str)


@pytest.mark.parametrize(
    ("array", "what"),
    [
        (np.zeros(20), "does not hold tokens of that type"),
        (np.zeros((4, 5), np.int32), "is not a flat array of tokens"),
        (np.zeros(0, np.int32), "is empty"),
        (np.zeros(4, np.int32), "is too short"),
    ],
)
def test_files_without_rows_of_tokens_are_named(tmp_path, array, what):
    np.save(tmp_path / "tokens.npy", array)
    with pytest.raises(UserError, match=what):
        token_source(path=str(tmp_path / "tokens.npy"), sequence_length=5)


def test_wrong_types_are_told_with_the_numbers(tmp_path):
    np.save(tmp_path / "tokens.npy", np.zeros(20, np.uint16))
    with pytest.raises(UserError) as caught:
        token_source(path=str(tmp_path / "tokens.npy"), sequence_length=5, dtype="int32")
    assert caught.value.why == "its dtype is uint16, and data.dtype=int32"
    (tmp_path / "odd.bin").write_bytes(b"12345")
    with pytest.raises(UserError) as caught:
        token_source(path=str(tmp_path / "odd.bin"), sequence_length=5)
    assert caught.value.why == "its 5 bytes are not a multiple of 2, the size of uint16"
    (tmp_path / "cut.npy").write_bytes((tmp_path / "tokens.npy").read_bytes()[:-7])
    with pytest.raises(UserError, match="cannot read") as caught:
        token_source(path=str(tmp_path / "cut.npy"), sequence_length=5)
    assert caught.value.fix == "write it with np.save or np.savez"
