"""Tests of conversations as tokens, and of what is learned of them."""

import numpy as np
import pytest
from chat_cases import MARKED, PLAIN, said
from tokenizer_folders import make_folder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from meshwright.data.chat_rows import ChatEncoder
from meshwright.data.chat_template import ChatTemplate
from meshwright.data.tokenizer import ByteTokenizer, FileTokenizer

pytestmark = pytest.mark.quick


def encoder(template=PLAIN, loss_on="assistant", tokenizer=None):
    return ChatEncoder(tokenizer or ByteTokenizer(), ChatTemplate(template), loss_on)


def learned(row):
    return bytes(row.ids[row.mask].astype(np.uint8)).decode()


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_only_what_the_assistant_says_is_learned(template):
    talk = said("hé", "yés", "a", "b", "c")
    for loss_on, expected in [("assistant", "yés;b;"), ("last", "b;"), ("all", None)]:
        made = encoder(template, loss_on)
        row = made.row(made.conversation(talk))
        text = bytes(row.ids.astype(np.uint8)).decode()
        assert text == "<u>hé;<a>yés;<u>a;<a>b;<u>c;"
        assert learned(row) == (expected or text)
    assert not encoder(template).row(encoder(template).conversation(said("hé"))).mask.any()


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_of_a_prompt_and_a_completion_the_completion_is_learned(template):
    made = encoder(template)
    talk = said("a", "b", "c", "d")
    assert learned(made.row(made.completion(talk[:3], talk[3:]))) == "d;"
    row = made.row(made.completion("2 + 2 =", " 4"))
    assert learned(row) == " 4\n"
    assert learned(made.row(made.text("whole"))) == "whole\n"


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A byte-level BPE whose post-processor adds a BOS token, as that of Llama 3 does."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<bos>", "<eos>"], show_progress=False
    )
    made.train_from_iterator(["hello there, what is this? this is what is there."] * 3, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    folder = tmp_path_factory.mktemp("words")
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": "<eos>"}')
    return FileTokenizer(str(folder))


def test_bos_comes_once_whoever_writes_it(words):
    for template in (PLAIN, MARKED):
        made = ChatEncoder(words, ChatTemplate(template, {"bos_token": "<bos>"}))
        for text in (
            made.conversation(said("what", "this")),
            made.completion(said("what"), said("what", "this")[1:]),
            made.completion("what", " this"),
            made.completion("<bos>what", " this<eos>"),
            made.text("<bos>what"),
        ):
            row = made.row(text)
            assert row.ids[0] == 0
            assert (row.ids == 0).sum() == 1
            if not text.whole:
                assert row.ids[-1] == 1
                assert (row.ids == 1).sum() == 1
                assert row.mask[-1]


def test_a_token_across_the_end_of_a_prompt_belongs_to_the_answer(words):
    made = ChatEncoder(words)
    exact = made.row(made.completion("what", " is this"))
    assert not exact.joined
    assert words.decode(exact.ids[exact.mask]) == " is this<eos>"
    joined = made.row(made.completion("what ", "is this"))
    assert joined.joined
    np.testing.assert_array_equal(joined.ids, exact.ids)
    np.testing.assert_array_equal(joined.mask, exact.mask)


def test_tokens_have_the_characters_they_stand_for(words):
    for tokenizer in (words, ByteTokenizer()):
        text = "hello é there"
        ids, places = tokenizer.encode_places([text])[0]
        np.testing.assert_array_equal(ids, tokenizer.encode(text))
        assert places[0, 0] == 0
        assert places[-1, 1] == len(text)


def test_a_template_that_rewrites_earlier_turns_is_refused_unless_it_has_marks():
    only_last = (
        "{% for m in messages %}<{{ m.role[0] }}>{% if loop.last %}(thinks){% endif %}"
        "{{ m.content }};{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    talk = said("a", "b", "c", "d")
    made = encoder(only_last)
    with pytest.raises(ValueError, match=r"turn 2 in another way once more turns follow"):
        made.conversation(talk)


BAD = {
    "text": ("hi", r"`messages` is a str, not a list of messages"),
    "nothing": ([], r"`messages` has no messages"),
    "a list of text": (["hi"], r"message 1 of `messages` is a str, not an object"),
    "ShareGPT": ([{"from": "human", "value": "a"}], r"has no `role`, but from, value"),
    "an image": (
        [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}],
        r"message 1 of `messages` is a list of more than text",
    ),
    "half a character": ([{"role": "user", "content": "\ud83d"}], r"is not Unicode text"),
    "a number": ([{"role": "user", "content": 3}], r"the `content` of message 1 of `messages`"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_messages_say_what_is_wrong(case):
    given, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        encoder().conversation(given)


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "yé"}, {"type": "text", "text": "s", "image": None}]
    talk = [*said("hé"), {"role": "assistant", "content": parts}]
    assert learned(encoder().row(encoder().conversation(talk))) == "yés;"


def test_other_wrong_forms_say_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match=r"`prompt` is a str and `completion` a list"):
        encoder().completion("a", said("b"))
    with pytest.raises(ValueError, match=r"list of messages, and there is none"):
        ChatEncoder(ByteTokenizer()).conversation(said("a"))
    for bad in ("{% if %}", "{{ raise_exception('roles must alternate') }}"):
        with pytest.raises(ValueError, match=r"alternate|Expected"):
            encoder(bad).conversation(said("a", "b"))
    tokenizer = FileTokenizer(str(make_folder(tmp_path / "f")))
    row = encoder("mesh {{ messages[0].content }}", "all", tokenizer)
    assert row.row(row.conversation(said("axis"))).ids.tolist() == [6, 9]
