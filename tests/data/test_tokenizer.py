"""Tokenizers: text there and back, and no larger than the model's vocabulary."""

import numpy as np
import pytest
from tokenizers import Tokenizer

from meshwright.data.tokenizer import ByteTokenizer, check_vocabulary, load_tokenizer, token_dtype
from meshwright.errors import UserError

pytestmark = pytest.mark.quick

TEXTS = ["the mesh", "naïve ☃ text\nof two lines", "  spaces  ", "", "\x00\x7f"]


@pytest.fixture(params=["bytes", "file"])
def tokenizer(request, tokenizer_file):
    return load_tokenizer(None if request.param == "bytes" else str(tokenizer_file))


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_as_it_was(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokens.max(initial=0) < tokenizer.vocab_size
    np.testing.assert_array_equal(tokenizer.encode_many(TEXTS)[TEXTS.index(text)], tokens)


def test_a_file_gives_the_tokens_its_library_gives(tokenizer_file):
    library = Tokenizer.from_file(str(tokenizer_file))
    ours = load_tokenizer(str(tokenizer_file))
    for text in TEXTS:
        expected = library.encode(text, add_special_tokens=False).ids
        assert ours.encode(text).tolist() == expected
    assert ours.vocab_size == library.get_vocab_size()
    assert ours.marks.end[0] == library.token_to_id("<|endoftext|>")
    assert load_tokenizer(str(tokenizer_file.parent)).fingerprint() == ours.fingerprint()


def test_tokens_beyond_the_vocabulary_do_not_stop_decoding(tokenizer):
    assert "mesh" in tokenizer.decode([*tokenizer.encode("mesh"), 100_000])


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused(tokenizer_file):
    large = load_tokenizer(str(tokenizer_file))
    check_vocabulary(large, large.vocab_size)
    check_vocabulary(large, None)
    with pytest.raises(UserError, match="the tokenizer does not fit the model") as caught:
        check_vocabulary(large, 100)
    assert f"it has {large.vocab_size} tokens, the model's vocabulary 100" in caught.value.why
    assert f"model.vocab_size={large.vocab_size} or more" in caught.value.fix
    with pytest.raises(UserError, match="does not fit"):
        check_vocabulary(ByteTokenizer(), 255)


def test_what_is_no_tokenizer_is_named(tmp_path):
    with pytest.raises(UserError, match=r"data\.tokenizer=.* does not exist"):
        load_tokenizer(str(tmp_path / "none.json"))
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(UserError, match="is not a tokenizer"):
        load_tokenizer(str(tmp_path / "other.json"))


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.uint32)],
)
def test_tokens_are_kept_in_the_smallest_type(size, dtype):
    assert token_dtype(size) == dtype


def test_bytes_are_the_same_tokens_in_a_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text(ByteTokenizer.to_json(), encoding="utf-8")
    file, bytes_ = load_tokenizer(str(tmp_path)), ByteTokenizer()
    for text in ["", "Hello\n  world\t!", "".join(map(chr, range(1, 1000))), "<|im_end|>é漢😀"]:
        assert file.encode_many([text])[0].tolist() == bytes_.encode_many([text])[0].tolist()
        assert file.decode(bytes_.encode_many([text])[0]) == text
