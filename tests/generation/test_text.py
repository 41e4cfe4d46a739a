"""Text: stop strings across tokens, pieces that add up, folders, templates, commands."""

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hf_folders import GPT2, change_config, copy_folder
from tokenizer_folders import make_folder

import meshwright as mw
from meshwright.cli.main import main
from meshwright.data.tokenizer import ByteTokenizer
from meshwright.errors import UserError
from meshwright.generation.generate import Generator, generate
from meshwright.generation.row_placement import RowPlacement
from meshwright.generation.text_scores import score_documents, windows
from meshwright.generation.text_settings import TextSettings, read_text_settings

SAID = "ab3é€z <end>!\n"


class Chain(nnx.Module):
    """Says the bytes of a text one after the other, whatever comes before the last."""

    def __init__(self):
        said = SAID.encode()
        following = np.zeros(256, np.int32)
        for one, other in itertools.pairwise(said):
            following[one] = other
        self.following = nnx.Variable(jnp.asarray(following))

    def __call__(self, tokens):
        return 5 * jax.nn.one_hot(self.following[...][tokens], 256)


def say(**settings):
    pieces = []
    got = generate(
        Chain(),
        "a",
        max_new_tokens=15,
        on_piece=pieces.append,
        **{"tokenizer": ByteTokenizer(), **settings},
    )
    assert "".join(piece.text for piece in pieces) == got.texts[0]
    assert [t for piece in pieces for t in piece.tokens] == got.tokens[0]
    return got[0]


def test_pieces_add_up_and_never_have_half_a_character(monkeypatch):
    monkeypatch.setattr("meshwright.generation.generate.STREAMED_CHUNK", 1)
    assert say().text == SAID[1:-1]
    # A string that begins like a stop string and is none is held back, not lost.
    ended = say(stop=["<end>?", "d>!"])
    assert (ended.text, ended.ended) == ("b3é€z <en", "stop string")
    assert bytes(ended.tokens) == "b3é€z <end>!".encode()


def test_a_stop_string_is_found_inside_a_chunk():
    ended = say(stop="€z")
    assert (ended.text, bytes(ended.tokens).decode()) == ("b3é", "b3é€z")
    assert len(ended.log_probs) == len(ended.drawn_log_probs) == len(ended.tokens)
    ended = say(stop_tokens=[ord("z")])
    assert (ended.text, ended.ended, ended.tokens[-1]) == ("b3é€", "stop token", ord("z"))


def test_a_folder_says_how_to_sample_and_where_to_stop(tmp_path):
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 4]}
    names = {"bos_token": "<bos>", "eos_token": "<|done|>", "chat_template": "{{ bos_token }}hi"}
    folder = make_folder(
        tmp_path / "f", template="<bos> $A", generation_config=settings, tokenizer_config=names
    )
    found = read_text_settings(folder)
    assert found.stop_tokens == (2, 4)
    assert found.sampling == {"temperature": 0.6, "top_p": 0.9}
    assert found.chat.render([]) == "<bos>hi"
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "do_sample": false}')
    assert read_text_settings(folder).sampling == {}


@pytest.mark.parametrize(
    ("file", "says", "dtype"),
    [
        ("config.json", '{"torch_dtype": "bfloat16"}', "bfloat16"),
        ("config.json", '{"text_config": {"dtype": "float16"}}', "float16"),
        ("config.json", '{"dtype": "float32"}', None),
        ("config.yaml", "precision: {compute: bf16}", "bfloat16"),
        ("config.yaml", "training: {mixed_precision: fp16}\nprecision: {compute: null}", "float16"),
        ("config.yaml", "precision: {compute: 'no'}", None),
    ],
)
def test_folders_and_runs_name_the_format_to_compute_in(tmp_path, file, says, dtype):
    (tmp_path / file).write_text(says)
    assert read_text_settings(tmp_path).dtype == dtype


def test_a_run_that_learned_from_rewards_tells_how_long_completions_are(tmp_path, capfd):
    for rewards, most in (("exact_match", 6), ("", None)):
        text = f"grpo: {{rewards: [{rewards}]}}\ngeneration: {{max_generation_steps: 6}}"
        (tmp_path / "config.yaml").write_text(text)
        assert read_text_settings(tmp_path).completion == most
    words = ("--rewards", "exact_match", "--samples", "3")
    code, _, err = call(capfd, "eval", tmp_path, tmp_path / "p.jsonl", *words)
    assert (code, "write --preset standard" in err) == (2, True)


def chat(tmp_path, template, messages, **settings):
    (tmp_path / "chat_template.jinja").write_text(template)
    return TextSettings(tmp_path).chat.render(messages, **settings)


def test_templates_are_written_as_transformers_does_and_kept_in_a_sandbox(tmp_path):
    said = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "b"}]
    template = (
        "{% for m in messages %}\n    {% if m.role == 'system' %}{% continue %}{% endif %}\n"
        "{% generation %}<{{ m['role'] }}>{{ m | tojson }}{% endgeneration %}\n\n{% endfor %}\n"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    expected = "".join(f"<{m['role']}>{json.dumps(m, ensure_ascii=False)}\n" for m in said)
    assert chat(tmp_path, template, said) == expected + "<assistant>"
    assert chat(tmp_path, template, said, reply=False) == expected
    assert len(chat(tmp_path, "{{ strftime_now('%Y') }}", [])) == 4
    for bad in ("{{ raise_exception('no') }}", "{{ ''.__class__.__mro__ }}", "{% if %}",
                "{{ messages.append(1) }}", "{{ range(10**9) | list }}"):  # fmt: skip
        with pytest.raises(UserError, match="cannot write this conversation"):
            chat(tmp_path, bad, said)
    with pytest.raises(UserError, match="no chat template"):
        TextSettings(GPT2).chat.render(said)


TURNS = "{{% for m in messages %}}{{{{ m.role }}}}: {{{{ m.content }}}}{}{{% endfor %}}"


@pytest.mark.parametrize(
    ("end", "token", "stops"),
    [
        ("<eot>\n", 4, ()),
        ("<eot> {{ eos_token }}", None, ("<eot> <|done|>",)),
        (" {{ eos_token }}", 2, ()),
        (" the end\n", None, ("the end",)),
        ("<unknown>", None, ("<unknown>",)),
        ("\n", None, ("\nuser:",)),
        ("{{ m.nothing.at_all }}", None, ()),
    ],
)
def test_an_answer_ends_where_the_template_ends_its_turn(tmp_path, end, token, stops):
    names = {"eos_token": "<|done|>", "chat_template": TURNS.format(end)}
    found = read_text_settings(make_folder(tmp_path / "f", tokenizer_config=names))
    assert (found.stop_tokens, found.stops) == ((2,), ())
    found = replace(found, answers=True)
    assert found.stop_tokens == tuple(dict.fromkeys([2, token or 2]))
    assert found.stops == stops


def test_a_template_of_bytes_ends_answers_by_its_text(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(TURNS.format("<end>\n"))
    answers = TextSettings(tmp_path, bytes_are_tokens=True, answers=True)
    assert say(tokenizer=answers).text == "b3é€z "
    reply = "{% if add_generation_prompt %}a{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(TURNS.format("<end>\n") + reply)
    talk, plain = [{"role": "user", "content": "Hi"}], TextSettings(tmp_path, bytes_are_tokens=True)
    for prompts in (talk, [talk, talk]):
        got = generate(Chain(), prompts, max_new_tokens=15, tokenizer=plain)
        assert got.texts == ["b3é€z "] * (1 if prompts is talk else 2)
        assert bytes(got[0].prompt.tokens.tolist()) == b"user: Hi<end>\na"


@pytest.mark.parametrize(("length", "stride"), [(7, 1), (7, 3), (7, 6), (40, 20)])
def test_windows_count_every_token_but_the_first_once(length, stride):
    found = list(windows(np.arange(23), length, stride))
    assert [t for tokens, first in found for t in tokens[first:]] == list(range(1, 23))
    assert all(len(tokens) <= length and first >= 1 for tokens, first in found)


class Bigrams(nnx.Module):
    """Predicts a token from the one before it."""

    def __init__(self):
        self.table = nnx.Param(jnp.asarray(np.random.default_rng(0).normal(size=(30, 30)) * 2))

    def __call__(self, tokens):
        return self.table[...][tokens]


@pytest.mark.parametrize("mesh", [{}, {"data": 4, "fsdp": 2}])
def test_scores_are_those_of_the_logits_on_any_mesh(mesh):
    model, random = Bigrams(), np.random.default_rng(1)
    documents = [random.integers(0, 30, n).astype(np.int32) for n in (1, 5, 12, 40, 0)]
    table = np.asarray(model.table[...], np.float64)
    log_probs = table - np.log(np.exp(table).sum(axis=-1, keepdims=True))
    expected = -sum(log_probs[one[:-1], one[1:]].sum() for one in documents)
    placement = RowPlacement(mw.build_mesh(mesh)) if mesh else None
    score = score_documents(model, documents, length=12, num_bytes=50, placement=placement)
    np.testing.assert_allclose(score.nats, expected, rtol=1e-6)
    assert (score.tokens, score.first_tokens) == (54, 4)
    assert score.to_json()["bits_per_byte"] == pytest.approx(score.nats / 50 / np.log(2))
    learned = [random.random(len(one)) < 0.5 for one in documents]
    expected = -sum(
        log_probs[one[:-1], one[1:]][mask[1:]].sum()
        for one, mask in zip(documents, learned, strict=True)
    )
    score = score_documents(model, documents, length=12, learned=learned, placement=placement)
    np.testing.assert_allclose(score.nats, expected, rtol=1e-6)
    assert score.tokens + score.first_tokens == sum(mask.sum() for mask in learned)


def call(capfd, *words):
    code = main([str(word) for word in words])
    out, err = capfd.readouterr()
    return code, out, err


@pytest.mark.full
def test_eval_computes_in_the_format_of_the_folder(tmp_path, capfd):
    folder, text = copy_folder("gpt2", tmp_path / "f"), tmp_path / "text.txt"
    change_config(folder, dtype="bfloat16")
    text.write_text("the mesh of the model")
    tokens = read_text_settings(folder).tokenizer.encode(text.read_text())
    exact = score_documents(mw.load_model(folder), [np.array(tokens)], length=16).nats
    found = {}
    for words in ((), ("--dtype", "float32")):
        code, out, err = call(capfd, "eval", folder, text, "--json", *words)
        assert code == 0, err
        result = json.loads(out)
        found[result["dtype"]] = result["nats"]
        assert (f"computing in bfloat16, as {folder} says" in err) == (not words)
    assert found["float32"] == pytest.approx(exact, rel=1e-6)
    assert found["bfloat16"] == pytest.approx(exact, rel=0.02)
    assert found["bfloat16"] != found["float32"]


@pytest.mark.full
def test_a_file_is_continued_and_what_is_written_is_kept(tmp_path, capfd):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "the"}, {"tokens": [5, 6]}, {"prompt": "mesh"}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ("generate", GPT2, "--file", prompts, "--out", out, "--max-new-tokens", 3)
    words = (*words, "--temperature", 1, "--batch-size", 1)
    code, _, err = call(capfd, *words)
    assert code == 0, err
    whole = out.read_text()
    written = [json.loads(line) for line in whole.splitlines()]
    assert [(w["index"], w["input"], len(w["tokens"])) for w in written] == [
        (n, line, 3) for n, line in enumerate(lines)
    ]
    # A process that was killed while it wrote the second.
    out.write_text(whole[: whole.index('"index": 1') + 20])
    code, _, err = call(capfd, *words)
    assert code == 0, err
    assert "1 of 3 prompts were written before" in err
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert [each["tokens"] for each in again] == [each["tokens"] for each in written]
    prompts.write_text(json.dumps({"prompt": "other"}) + "\n")
    code, _, err = call(capfd, *words)
    assert code == 2
    assert "was written for other prompts" in err


@pytest.mark.full
def test_two_processes_generate_and_score_as_one_does(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the"}\n{"tokens": [5, 6]}\n{"prompt": "mesh"}\n')
    words = ["--file", str(prompts), "--temperature", "1", "--max-new-tokens", "6", "--batch-size"]
    words = ["generate", str(GPT2), *words, "2"]
    (tmp_path / "text.txt").write_text("the mesh of the model")
    score = ["eval", str(GPT2), str(tmp_path / "text.txt"), "--json"]
    launched = ["launch", "--nprocs", "2", "--devices-per-process", "2", "--"]
    found = []
    for number, (before, mesh) in enumerate((([], []), (launched, ["--mesh", "data=2,tensor=2"]))):
        out = tmp_path / f"{number}.jsonl"
        for command in ([*words, "--out", str(out)], score):
            done = subprocess.run(
                [sys.executable, "-m", "meshwright", *before, *command, *mesh],
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
        written = [json.loads(line)["tokens"] for line in out.read_text().splitlines()]
        nats = re.search(r'"nats": ([0-9.]+)', done.stdout)
        found.append((written, float(nats[1])))
    assert len(found[0][0]) == 3
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-6)


BAD = {
    "nothing": ((), "takes --prompt, --chat or --file"),
    "a model": (("--prompt", "x", "--model", "a:B"), "--model is for runs of your own models"),
    # Refused before anything is typed.
    "no template": (("--chat",), "there is no chat template"),
    "an empty prompt": (("--prompt", ""), "what was given is empty"),
    "equal samples": (("--prompt", "the", "--samples", "2"), "--samples 2 would all be the same"),
    "a stop token": (
        ("--prompt", "the", "--stop-tokens", "9999"),
        "has the token 9999",
    ),
    "a long prompt": (("--prompt", "the " * 200), "leaves no room for new tokens"),
    "an empty line": (("--file", "{empty}"), "line 1 of"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_message(name, tmp_path, capfd):
    (tmp_path / "empty.jsonl").write_text("{}\n")
    words, says = BAD[name]
    words = [word.replace("{empty}", str(tmp_path / "empty.jsonl")) for word in words]
    code, out, err = call(capfd, "generate", GPT2, *words)
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


def test_a_missing_folder_is_told_with_the_newest_run(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "one" / "checkpoints").mkdir(parents=True)
    code, _, err = call(capfd, "generate", "outputs/on", "--prompt", "the")
    assert code == 2
    assert "there is no folder outputs/on" in err
    assert "the newest run here is outputs/one" in err


OWN = """
import jax.numpy as jnp
from flax import nnx

class Bytes(nnx.Module):
    def __init__(self, *, rngs):
        self.tokens = nnx.Embed(256, 4, rngs=rngs)
        self.head = nnx.Linear(4, 256, rngs=rngs)

    def __call__(self, tokens):
        return self.head(jnp.cumsum(self.tokens(tokens), 1))
"""


def test_a_run_of_a_users_own_model_names_its_code(tmp_path, capfd, monkeypatch):
    (tmp_path / "own_bytes.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    words = ["training.steps=1", "training.micro_batch_size=2", "data.sequence_length=8"]
    words += ["training.eval_batches=1", "training.sample_tokens=2", "hydra.run.dir=run"]
    code, out, err = call(capfd, "train", "model.kind=own_bytes:Bytes", *words)
    assert code == 0, err
    words = ["generate", str(tmp_path / "run"), "--model", "own_bytes:Bytes", "--prompt"]
    assert f'{" ".join(words)} "…"' in out
    module = sys.modules.pop("own_bytes")
    code, _, err = call(capfd, "generate", "run", "--prompt", "the")
    assert code == 2
    assert "--model own_bytes:Bytes" in err
    code, _, err = call(capfd, *words, "the", "--max-new-tokens", 2)
    assert code == 0, err
    (tmp_path / "text.txt").write_text("one two")
    code, _, err = call(capfd, "eval", "run", "text.txt", "--model", "own_bytes:Bites")
    assert code == 2
    assert "did you mean `Bytes`" in err
    assert sys.modules.pop("own_bytes") is not module


@pytest.mark.full
def test_what_is_kept_and_what_has_no_effect_is_said(tmp_path, capfd, monkeypatch):
    code, _, err = call(capfd, "generate", GPT2, "--prompt", "the", "--seed", 3)
    assert code == 0, err
    assert "--seed changes nothing" in err
    assert "without compiling" in err
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the"}\n{"prompt": "mesh"}\n')
    usual, calls = Generator.__call__, itertools.count()

    def interrupted(*given, **settings):
        if next(calls) == 1:
            raise KeyboardInterrupt
        return usual(*given, **settings)

    monkeypatch.setattr(Generator, "__call__", interrupted)
    words = ("--file", tmp_path / "prompts.jsonl", "--max-new-tokens", 2, "--batch-size", 1)
    code, _, err = call(capfd, "generate", GPT2, *words, "--out", tmp_path / "out.jsonl")
    assert code != 0
    assert f"1 of 2 prompts are done and in {tmp_path}/out.jsonl; the same command" in err


def test_a_folder_without_a_tokenizer_is_told(tmp_path, capfd):
    folder = copy_folder("gpt2", tmp_path / "f")
    (folder / "tokenizer.json").unlink()
    code, _, err = call(capfd, "generate", folder, "--prompt", "the")
    assert code == 2
    assert "there is no tokenizer" in err
