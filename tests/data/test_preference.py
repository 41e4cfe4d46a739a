"""Preferences: the same pairs from every format, with masks on the answers."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import meshwright as mw
from meshwright.data.preference import preference_source
from meshwright.data.sentences import is_sentence
from meshwright.data.token_cache import take_origins
from meshwright.errors import UserError

pytestmark = pytest.mark.quick

TEXTS = [
    {"prompt": "2+2=", "chosen": "4", "rejected": "five"},
    {"prompt": "the sky is ", "chosen": "blue ☃", "rejected": "green"},
]


def said(role, content):
    return {"role": role, "content": content}


CHATS = [
    {
        "chosen": [said("user", row["prompt"]), said("assistant", row["chosen"])],
        "rejected": [said("user", row["prompt"]), said("assistant", row["rejected"])],
    }
    for row in TEXTS
]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def write(path, records):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=1)
    else:
        path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


def read(path, tmp_path, **settings):
    settings = {"sequence_length": 31, "cache_dir": str(tmp_path / "cache"), **settings}
    return preference_source(path=path, **settings)


def texts(batch, side, row):
    """A row's text, and the part of it that the mask has."""
    tokens, mask = batch[side][row], batch[f"{side}_mask"][row]
    last = np.flatnonzero(tokens)[-1] + 1
    return bytes(tokens[:last].tolist()).decode(), bytes(tokens[mask].tolist()).decode()


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.parquet"])
def test_the_mask_has_the_answer_and_its_end(name, tmp_path):
    source = read(write(tmp_path / name, TEXTS), tmp_path)
    batch = source.rows(np.arange(2))
    assert batch["chosen"].shape == batch["chosen_mask"].shape == (2, 32)
    for row, pair in enumerate(TEXTS):
        for side in ("chosen", "rejected"):
            answer = pair[side] + "\n"
            assert texts(batch, side, row) == (pair["prompt"] + answer, answer)
    assert source.describe().endswith("2 pairs of 52 tokens in rows of 31")


def chat_folder(tmp_path, tokenizer_file):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


@pytest.mark.parametrize("form", ["common", "prompt"])
@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.parquet"])
def test_conversations_are_written_by_the_template(name, form, tmp_path, tokenizer_file):
    records = CHATS
    if form == "prompt":
        records = [
            {"prompt": row["chosen"][:1], **{side: row[side][1:] for side in row}} for row in CHATS
        ]
    folder = chat_folder(tmp_path, tokenizer_file)
    source = read(write(tmp_path / name, records), tmp_path, tokenizer=folder)
    batch = source.rows(np.arange(2))
    answer = batch["chosen"][0][batch["chosen_mask"][0]]
    assert source.tokenizer.decode(answer) == "4;"
    whole = source.tokenizer.decode(batch["rejected"][1])
    assert whole.startswith("<u>the sky is ;<a>green;")


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (3, "it is an int, not an object"),
        ({"prompt": "a", "chosen": "b"}, "it has no `rejected`, but `prompt`, `chosen`"),
        ({"chosen": "b", "rejected": "c"}, "it has no `prompt`"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "`rejected` is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "`prompt` is a str and `rejected` an int"),
        ({"prompt": "a", "chosen": ["b"], "rejected": "c"}, "both as text, or both as lists"),
        (
            {"chosen": [said("user", "a")], "rejected": [said("user", "b")]},
            "do not begin alike and go on differently",
        ),
    ],
)
def test_a_bad_record_is_named_or_skipped(record, why, tmp_path):
    path = write(tmp_path / "pairs.jsonl", [*TEXTS, record])
    with pytest.raises(UserError, match="line 3 is not a pair of answers") as error:
        read(path, tmp_path)
    assert why in error.value.why
    with pytest.warns(UserWarning, match="1 record of another form skipped"):
        assert len(read(path, tmp_path, on_corrupt="skip")) == 2


def test_conversations_without_a_template_say_what_is_missing(tmp_path):
    with pytest.raises(UserError, match="there is no chat template"):
        read(write(tmp_path / "pairs.jsonl", CHATS), tmp_path)


def test_too_long_a_pair_is_cut_dropped_or_refused(tmp_path):
    path = write(tmp_path / "pairs.jsonl", TEXTS)
    take_origins()
    batch = read(path, tmp_path, sequence_length=9).rows(np.arange(2))
    assert "1 of 2 pairs" in take_origins()[-1]
    # "blue ☃\n" has nine bytes, which leaves one for both prompts.
    assert texts(batch, "chosen", 1) == (" blue ☃\n", "blue ☃\n")
    assert texts(batch, "rejected", 1) == (" green\n", "green\n")
    assert texts(batch, "chosen", 0) == ("2+2=4\n", "4\n")
    assert len(read(path, tmp_path, sequence_length=9, too_long="drop")) == 1
    assert "are left out: the longest has 20 tokens" in take_origins()[-1]
    with pytest.raises(UserError, match=r"1 of 2 pairs .* do not fit into a row"):
        read(path, tmp_path, sequence_length=9, too_long="stop")


def test_answers_longer_than_a_row_lose_their_end(tmp_path):
    path = write(tmp_path / "pairs.jsonl", TEXTS)
    batch = read(path, tmp_path, sequence_length=3).rows(np.arange(2))
    assert texts(batch, "rejected", 1) == (" gre", "gre")
    assert texts(batch, "chosen", 0) == ("=4\n", "4\n")


def test_records_may_be_given_in_python(tmp_path):
    given = mw.PreferenceData(records=TEXTS, sequence_length=31, cache_dir=str(tmp_path))
    path = write(tmp_path / "pairs.jsonl", TEXTS)
    assert given.fingerprint() == read(path, tmp_path).fingerprint()


@pytest.mark.full
def test_the_built_in_pairs_differ_in_their_verbs(tmp_path):
    source = preference_source(sequence_length=63, cache_dir=str(tmp_path))
    batch = source.rows(np.arange(0, len(source), 100))
    for row in range(len(batch["chosen"])):
        assert is_sentence(texts(batch, "chosen", row)[0].strip())
        assert not is_sentence(texts(batch, "rejected", row)[0].strip())
