"""What starts and ends documents: as the tokenizer's files say, once, and told."""

import json
import warnings
from itertools import pairwise

import numpy as np
import pytest
from tokenizer_folders import BOS, DONE, FOLDERS, NAMES, make_folder
from tokenizers import Tokenizer

from meshwright.data.record_formats import JsonLines
from meshwright.data.text_source import text_source
from meshwright.data.token_cache import take_origins
from meshwright.data.tokenizer import load_tokenizer
from meshwright.errors import UserError

pytestmark = pytest.mark.quick

TEXTS = ["the mesh has an axis", "an axis", "the mesh has the mesh has the mesh"]


@pytest.fixture
def read(tmp_path):
    """Return what reads records with the tokenizer of a folder, and gives their tokens."""

    def read(folder, records=TEXTS, field="text", **settings):
        path = tmp_path / "t.jsonl"
        path.write_text("".join(json.dumps({field: each}) + "\n" for each in records))
        cache = str(tmp_path / "cache")
        tokenizer = None if folder is None else str(folder)
        settings = {"sequence_length": 4, "tokenizer": tokenizer, **settings}
        source = JsonLines(path=str(path), field=field, cache_dir=cache, **settings).source()
        if settings.get("packing") == "stream":
            return source.arrays[0].tolist()
        ends = source.boundaries.tolist()
        return [source.tokens[a:b].tolist() for a, b in pairwise(ends)]

    return read


@pytest.mark.filterwarnings("ignore:documents start without <bos>")
@pytest.mark.parametrize("kind", FOLDERS)
def test_documents_have_the_tokens_of_the_library_and_an_end(tmp_path, read, kind):
    how, start, end = FOLDERS[kind]
    folder = make_folder(tmp_path / "folder", **how)
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.no_truncation()
    documents = read(folder)
    for text, document in zip(TEXTS, documents, strict=True):
        whole = library.encode(text).ids
        assert document == (whole if tuple(whole[-len(end) :]) == end else [*whole, *end])
        assert document[: len(start)] == [*start]
    marks = load_tokenizer(str(folder)).marks
    assert (marks.start, marks.end) == (start, end)
    # By its file, a tokenizer is the same.
    assert load_tokenizer(str(folder / "tokenizer.json")).marks == marks


def test_documents_that_have_their_marks_do_not_get_them_twice(tmp_path, read):
    folder = make_folder(tmp_path / "f", template="<bos> $A", tokenizer_config=NAMES)
    texts = ["<bos> the mesh", "the mesh <|done|>", "<bos> the mesh <|done|>", "the mesh"]
    assert read(folder, texts) == [[BOS, 5, 6, DONE]] * 4
    ids = [[BOS, 5, 6, DONE], [5, 6], [5, 6, DONE]]
    assert read(folder, ids, "ids", vocab_size=10) == [[BOS, 5, 6, DONE]] * 3


def test_a_long_document_starts_and_ends_once(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "f", template="<bos> $A", tokenizer_config=NAMES)
    text = "the mesh\nhas an axis\n" * 400
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(text)
    for name, value in (("LONG", 1000), ("PIECE", 100), ("CONTEXT", 30)):
        monkeypatch.setattr(f"meshwright.data.documents.{name}", value)
    monkeypatch.setattr("meshwright.data.text_source.LONG", 1000)
    monkeypatch.setattr("meshwright.data.text_source.READ_BYTES", 700)
    source = text_source(
        path=str(tmp_path / "*.txt"),
        sequence_length=9,
        tokenizer=str(folder),
        packing="documents",
        cache_dir=str(tmp_path / "cache"),
    )
    whole = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert source.tokens.tolist() == [*whole, DONE] * 2
    assert source.boundaries.tolist() == [0, len(whole) + 1, 2 * len(whole) + 2]


def test_what_separates_documents_is_told(tmp_path, read):
    said = {
        "like Llama 3": "documents start with <bos> (1) and end with <|done|> (2), the eos_token "
        "of tokenizer_config.json",
        "a list in generation_config": "documents end with <|done|> (2), the eos_token_id of "
        "generation_config.json",
        "a known name": "documents end with <|endoftext|> (3), known by its name only",
        "neither": "nothing separates documents",
    }
    for number, (kind, text) in enumerate(said.items()):
        take_origins()
        read(make_folder(tmp_path / str(number), **FOLDERS[kind][0]))
        assert take_origins()[1:] == [text]
    read(None)
    assert "documents end with a line break" in take_origins()


def test_a_stream_without_a_separator_is_warned_about(tmp_path, read):
    folder = make_folder(tmp_path / "f", **FOLDERS["neither"][0])
    with pytest.warns(UserWarning, match=r"nothing separates the documents of data.path=.*t\.jso"):
        assert len(read(folder, ["the axis", "an axis"] * 3, packing="stream")) == 12
    with pytest.warns(UserWarning, match="nothing separates the documents"):
        read(None, [[5, 6], [5, 7]], "ids", packing="stream", sequence_length=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(None, [[5, 6, 9], [7, 9]], "ids", packing="stream", sequence_length=2)


def test_what_the_files_say_without_effect_is_warned_about(tmp_path, read):
    config = {**NAMES, "add_bos_token": True}
    with pytest.warns(UserWarning, match="documents start without <bos>, because the post-proc"):
        read(make_folder(tmp_path / "f", tokenizer_config=config))
    generation = {"eos_token_id": [50256, DONE]}
    with pytest.warns(UserWarning, match=r"end token 50256 .*generation_config.json.* is not in"):
        documents = read(make_folder(tmp_path / "g", generation_config=generation))
    assert documents[0][-1] == DONE


def test_a_token_that_only_the_config_names_is_added_as_transformers_adds_it(tmp_path, read):
    names = {"bos_token": "<start>", "eos_token": "<stop>", "pad_token": "<pad>"}
    folder = make_folder(tmp_path / "f", tokenizer_config=names)
    assert read(folder, ["the <stop> mesh"]) == [[5, 11, 6, 11]]
    assert load_tokenizer(str(folder)).vocab_size == 12


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tokenizer_config": {"eos_token": 7}}, "eos_token in tokenizer_config.json is not the"),
        (
            {"generation_config": {"eos_token_id": "x"}},
            "eos_token_id=x in generation_config.json is no",
        ),
        ({"config": []}, "cannot read config.json"),
    ],
)
def test_files_that_cannot_be_understood_are_refused(tmp_path, files, said):
    with pytest.raises(UserError, match=said):
        load_tokenizer(str(make_folder(tmp_path / "f", **files)))


def test_an_edited_end_token_has_tokens_of_its_own(tmp_path, read):
    folder = make_folder(tmp_path / "f", tokenizer_config=NAMES)
    assert read(folder)[1][-1] == DONE
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eot>"}')
    assert np.unique([document[-1] for document in read(folder)]).tolist() == [4]
