"""The sentences of the default corpus, and how texts of a model are graded."""

import numpy as np
import pytest

from meshwright.data.sentences import (
    NUM_SENTENCES,
    grade,
    is_sentence,
    sentence_file,
    sentences,
)
from meshwright.data.text_source import text_source
from meshwright.errors import UserError


def test_every_sentence_follows_the_grammar_and_they_are_always_the_same():
    drawn = sentences(500)
    assert all(map(is_sentence, drawn))
    assert drawn == sentences(500)
    assert len(set(drawn)) > 200


@pytest.mark.parametrize(
    "text",
    ["two dog wait.", "a dogs waits.", "the dog wait.", "the dogs waits.", "the dog waits",
     "the dog help a cat.", "the dog helps cat.", "dog the waits.", "tha dog waits.", ""],
)  # fmt: skip
def test_what_is_wrong_is_not_a_sentence(text):
    assert not is_sentence(text)


def test_texts_are_graded_by_their_complete_sentences():
    texts = ["its.\nthe dog waits.\ntwo dog wait.\nthe ca", "ng.\na cat sings.\n"]
    assert grade(texts) == "2 of 3 sentences that the model wrote follow the grammar"


def test_text_without_a_path_is_the_sentences():
    source = text_source(sequence_length=16)
    rows = source.rows(np.arange(3))["tokens"]
    assert source.tokenizer.decode(rows[0]) == "\n".join(sentences(2))[:17]
    assert sentence_file().read_text().splitlines() == sentences(NUM_SENTENCES)


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot write the built-in text") as caught:
        sentence_file()
    assert "XDG_CACHE_HOME" in caught.value.fix
