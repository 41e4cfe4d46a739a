"""Tests of conversations in files: their rows, what does not fit, and what is refused."""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from tokenizer_folders import NAMES, make_folder

import meshwright as mw
from meshwright.config.compose import compose_config, validate
from meshwright.data.chat_source import chat_source
from meshwright.data.indexed_data import SourceData
from meshwright.data.packing import best_fit
from meshwright.data.shown_rows import shown_rows
from meshwright.data.token_cache import take_origins
from meshwright.errors import UserError
from meshwright.models import build_model
from meshwright.program.evaluate.widen import wide_evaluator
from meshwright.recipe import make_task, mixes_documents
from meshwright.tasks.language_modeling import LanguageModeling

TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def talk(question, answer):
    said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": said}


TALKS = [talk("a" * (3 * n % 7 + 1), "b" * (5 * n % 11 + 1)) for n in range(30)]


@pytest.fixture
def write(tmp_path):
    def write(records, name="talks.jsonl"):
        path = tmp_path / name
        if name.endswith(".parquet"):
            pyarrow = pytest.importorskip("pyarrow")
            table = pyarrow.Table.from_pylist(records)
            pytest.importorskip("pyarrow.parquet").write_table(table, path)
        else:
            lines = (r if isinstance(r, str) else json.dumps(r) for r in records)
            path.write_text("".join(f"{line}\n" for line in lines))
        return str(path)

    return write


def chat(path=None, **settings):
    usual = {"sequence_length": 31, "template": TEMPLATE, "packing": "best_fit"}
    return chat_source(path=path, **{**usual, **settings})


def documents(data):
    """Return every conversation of all rows: its text, and what is learned of it."""
    found = []
    batch = data.rows(np.arange(len(data)))
    learned = np.concatenate([np.zeros((len(data), 1), bool), batch["mask"] > 0], axis=1)
    segments = batch.get("segment_ids", batch["tokens"] != 0)
    for row, own, mask in zip(batch["tokens"], segments, learned, strict=True):
        for number in range(1, own.max() + 1):
            here = own == number
            texts = (
                bytes(part.astype(np.uint8)).decode() for part in (row[here], row[here & mask])
            )
            found.append(tuple(texts))
    return found


def expected(record):
    question, answer = (message["content"] for message in record["messages"])
    return f"<u>{question};<a>{answer};", f"{answer};"


@pytest.mark.parametrize("name", ["talks.jsonl", "talks.parquet"])
def test_every_conversation_is_in_one_row_whole_and_apart(write, name):
    data = chat(write(TALKS, name))
    assert sorted(documents(data)) == sorted(map(expected, TALKS))
    batch = data.rows(np.arange(len(data)))
    assert set(batch) == {"tokens", "mask", "segment_ids", "positions"}
    assert batch["tokens"].shape == (len(data), 32)
    assert batch["mask"].shape == (len(data), 31)
    starts = np.diff(batch["segment_ids"], axis=1) != 0
    assert (batch["positions"][:, 1:][starts] == 0).all()
    alone = chat(write(TALKS, name), packing="none")
    assert set(alone.rows(np.arange(2))) == {"tokens", "mask"}
    assert documents(alone) == [expected(record) for record in TALKS]
    assert alone.fingerprint() != data.fingerprint()


def test_rows_are_packed_only_for_models_that_tell_conversations_apart(write):
    path = write(TALKS)
    for packing, mixes, packed in [
        ("auto", str, True), ("auto", lambda: "it is recurrent", False), ("auto", None, False),
        ("best_fit", None, True), ("none", str, False),
    ]:  # fmt: skip
        take_origins()
        data = chat(path, packing=packing, mixes=mixes)
        assert ("segment_ids" in data.rows(np.arange(1))) == packed
        told = [line for line in take_origins() if "conversations have a row each" in line]
        assert len(told) == (packing == "auto" and not packed)
    with pytest.raises(UserError, match=r"data.packing=best_fit does not fit the model"):
        chat(path, mixes=lambda: "it is recurrent")
    kinds = {
        "gemma3_tiny": "",
        "lstm_tiny": "the model mixes the tokens of a row by `scan` in `rnn`",
    }
    for kind, why in kinds.items():
        config = validate(compose_config([f"model={kind}", "data=chat", f"data.path={path}"]))
        assert mixes_documents(config, make_task(config)) == why


def test_forms_of_records_may_be_mixed_and_fields_renamed(write):
    path = write([
        {"chat": TALKS[0]["messages"], "tools": None},
        {"question": "2 + 2 =", "answer": " 4"},
        {"question": TALKS[1]["messages"][:1], "answer": TALKS[1]["messages"][1:]},
        {"body": "all of it"},
    ])  # fmt: skip
    data = chat(path, messages="chat", prompt="question", completion="answer", text="body")
    assert sorted(documents(data)) == sorted([
        expected(TALKS[0]),
        ("2 + 2 = 4\n", " 4\n"),
        expected(TALKS[1]),
        ("all of it\n", "ll of it\n"),
    ])  # fmt: skip
    said = zip(("human", "gpt"), TALKS[2]["messages"], strict=True)
    shared = {"conversations": [{"from": role, "value": m["content"]} for role, m in said]}
    names = {"messages": "conversations", "role": "from", "content": "value"}
    assert documents(chat(write([shared]), **names)) == [expected(TALKS[2])]
    from_python = chat(records=[TALKS[3], TALKS[4]])
    assert sorted(documents(from_python)) == sorted(map(expected, TALKS[3:5]))


def test_best_fit_fills_rows_and_keeps_their_order():
    lengths = np.random.default_rng(0).integers(1, 20, 400)
    rows = best_fit(lengths, 32)
    filled = np.bincount(rows, lengths)
    assert filled.max() <= 32
    # No two rows could be joined, and rows are numbered by their first document.
    assert np.sort(filled)[:2].sum() > 32
    assert (np.diff(np.unique(rows, return_index=True)[1]) > 0).all()
    assert len(filled) <= lengths.sum() / 32 + 2


def test_what_does_not_fit_is_cut_dropped_or_refused_and_counted(write):
    path = write([talk("hi", "x" * 50), talk("q" * 50, "hidden"), talk("a", "b")])
    take_origins()
    cut = documents(chat(path))
    assert sorted(text for text, _ in cut) == ["<u>a;<a>b;", "<u>hi;<a>" + "x" * 23]
    told = "\n".join(take_origins())
    assert "longer than a row of 32 tokens, and cut: 2 of 3 conversations" in told
    assert "without anything to learn within a row, and left out: 1 of 3 conversations" in told
    assert documents(chat(path, too_long="drop")) == [("<u>a;<a>b;", "b;")]
    assert "2 of 3" in "\n".join(take_origins())
    with pytest.raises(UserError, match=r"2 conversations .*do not fit into a row") as error:
        chat(path, too_long="stop")
    assert "the longest has 64 tokens, and a row takes 32" in str(error.value)
    with pytest.raises(UserError, match="leaves nothing to learn"):
        chat(path, sequence_length=4)


@pytest.mark.parametrize("settings", [{}, {"template": "chatml", "sequence_length": 99}])
def test_empty_answers_are_counted(write, settings):
    empty = talk("a", "")["messages"]
    twice = {"messages": [*empty, *empty]}
    pair = {"prompt": empty[:1], "completion": empty[1:]}
    others = [talk("a", "b"), talk("", ";"), {"text": ";"}, {"prompt": "a", "completion": "b"}]
    path = write([talk("hi", ""), *others, twice, pair])
    for _ in range(2):
        take_origins()
        chat(path, **settings)
        told = "\n".join(take_origins())
        assert "with an empty answer, of which only the end is learned: 3 of 7 conv" in told
    chat(path, loss_on="all", **settings)
    assert "empty answer" not in "\n".join(take_origins())


BAD = {
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "Hello"}]},
        ["but `conversations`; for those of ShareGPT, write data.role=from data.content=value"],
    ),
    "ShareGPT by its name": ({"messages": [{"from": "gpt", "value": ""}]}, ["data.role=from"]),
    "another field": ({"conversation": []}, ["neither `messages`", "but `conversation`"]),
    "text for messages": ({"messages": "hi"}, ["`messages` is a str, not a list of messages"]),
    "no assistant": ({"messages": TALKS[0]["messages"][:1]}, ["no turn of the assistant"]),
    "half a pair": ({"prompt": "hi"}, ["`prompt` with `completion`", "but `prompt`"]),
    "no JSON": ("{", ["it is not JSON"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_record_of_another_form_names_its_line_field_and_setting(write, case):
    record, parts = BAD[case]
    path = write([TALKS[0], record, TALKS[1]])
    with pytest.raises(UserError, match=r"talks.jsonl, line 2 is not a conversation") as error:
        chat(path)
    message = str(error.value)
    assert all(part in message for part in [*parts, "messages", "on_corrupt"])
    assert "corrupt record" not in message
    with pytest.warns(UserWarning, match=r"1 record of another form skipped"):
        assert len(documents(chat(path, on_corrupt="skip"))) == 2


def test_a_template_comes_from_the_folder_a_file_or_the_setting(write, tmp_path):
    path = write([{"messages": [{"role": "assistant", "content": "axis"}]}])
    folder = make_folder(tmp_path / "f", tokenizer_config=NAMES)
    with pytest.raises(UserError, match="there is no chat template") as error:
        chat(path, template=None, tokenizer=str(folder))
    assert "chatml" in str(error.value)
    (folder / "chat_template.jinja").write_text("{{ bos_token }} mesh {{ messages[0].content }}")
    for settings in (
        {},
        {"template": str(folder)},
        {"template": str(folder / "chat_template.jinja")},
    ):
        data = chat(path, tokenizer=str(folder), loss_on="all", **{"template": None, **settings})
        assert data.rows(np.arange(1))["tokens"][0, :4].tolist() == [1, 6, 9, 0]
    with pytest.raises(UserError, match=r"template=nowhere.* does not exist|does not exist"):
        chat(path, template="nowhere")
    with pytest.raises(UserError, match="it is not a template"):
        chat(path, template="{% if %}")


def test_the_cache_knows_everything_that_changes_tokens(write):
    path = write(TALKS)
    others = [
        {"loss_on": "all"},
        {"sequence_length": 40},
        {"template": TEMPLATE.replace(";", "!")},
        {"packing": "none"},
    ]
    prints = {chat(path, **settings).fingerprint() for settings in [{}, *others]}
    assert len(prints) == 5
    assert chat(path).fingerprint() == chat(path).fingerprint()


def gradients(model, batch):
    """Return the gradients of the summed loss by parameter, and its weight, in float64."""
    model.eval()
    graph, state, rest = nnx.split(model, nnx.Param, ...)
    leaves, tree = jax.tree.flatten(state)

    def total(*leaves):
        merged = nnx.merge(graph, jax.tree.unflatten(tree, leaves), rest)
        loss, _ = LanguageModeling().loss(merged, batch)
        return loss.total, loss.weight

    program = jax.make_jaxpr(total)(*leaves)
    with jax.enable_x64(True):
        wide = [leaf.astype(np.float64) for leaf in leaves]
        run = wide_evaluator().run
        return jax.jit(jax.grad(lambda wide: tuple(run(program, wide)), has_aux=True))(wide)


@pytest.mark.parametrize("kind", ["gpt", pytest.param("gemma3", marks=pytest.mark.full)])
def test_packed_conversations_have_the_gradients_of_those_alone(write, kind):
    path = write(TALKS[:12])
    batches = [
        (data := chat(path, packing=packing)).rows(np.arange(len(data)))
        for packing in ("best_fit", "none")
    ]
    assert len(batches[0]["tokens"]) < len(batches[1]["tokens"])
    sizes = {"num_blocks": 1}
    if kind == "gemma3":
        sizes = {"num_blocks": 2, "head_dim": 8, "num_kv_heads": 1, "mlp_size": 32}
        sizes |= {"sliding_window": 4}
    sizes |= {"vocab_size": 128, "context_length": 32, "hidden_size": 16, "num_heads": 2}
    model = build_model(kind, rngs=nnx.Rngs(0), **sizes)
    (packed, count), (alone, same) = (gradients(model, batch) for batch in batches)
    assert count == same == sum(len(expected(record)[1]) for record in TALKS[:12])
    largest = max(np.abs(leaf).max() for leaf in alone)
    for one, other in zip(packed, alone, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * largest)


def test_sources_are_made_in_python(write):
    data = mw.ChatData(path=write(TALKS), sequence_length=31, template=TEMPLATE)
    assert len(documents(data)) == len(TALKS)
    texts = mw.TextData(path=write(["plain text"] * 9), sequence_length=15)
    assert texts.rows(np.arange(2))["tokens"].shape == (2, 16)


def test_samples_are_shown_with_what_is_learned(write):
    data = SourceData(chat(write(TALKS)), seed=0)
    first = "".join(text for text, _ in shown_rows(data)[0])
    assert (first, shown_rows(data)[0][1][0]) in map(expected, TALKS)
    alone = SourceData(chat(write(TALKS[:1]), packing="none"), seed=0)
    assert shown_rows(alone, 1) == [[("<u>a;<a>", False), ("b;", True)]]
    assert shown_rows(SourceData(mw.TextData(sequence_length=15), seed=0)) == []
