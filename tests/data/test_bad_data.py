"""Bad data on the command line: one error that names it, exit code 2, nothing written."""

import numpy as np
import pytest

from meshwright.cli.main import main

pytestmark = pytest.mark.quick

SMALL = ("model=gpt2_nano", "model.vocab_size=300", "model.context_length=16", "training.steps=2")


@pytest.fixture
def workplace(tmp_path, monkeypatch, tokenizer_file):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (tmp_path / "none.jsonl").write_text("\n")
    np.save(tmp_path / "wide.npy", np.arange(1000, dtype=np.uint16))
    np.save(tmp_path / "float.npy", np.arange(1000.0))
    return tmp_path


MISTAKES = {
    "missing file": (
        ["data.path=corpus.txt"],
        "error: data.path=corpus.txt does not exist\n",
    ),
    "empty file": (["data.path=empty.txt"], "error: data.path=empty.txt is empty\n"),
    "sequence longer than the data": (
        ["data.path=short.txt"],
        "error: data.path=short.txt is too short\n"
        "  it has 6 tokens and one row takes 17\n"
        "  give more data, or a smaller data.sequence_length\n",
    ),
    "corrupt record": (
        ["data=jsonl", "data.path=bad.jsonl"],
        "error: bad.jsonl, line 2 cannot be read\n  it is not JSON: ",
    ),
    "no records": (
        ["data=jsonl", "data.path=none.jsonl"],
        "error: data.path=none.jsonl is empty\n  there are no records\n",
    ),
    "tokenizer larger than the model": (
        ["data.tokenizer=tokenizer.json", "model.vocab_size=200"],
        "or train a new model with model.vocab_size=",
    ),
    "tokens beyond the vocabulary": (
        ["data=tokens", "data.path=wide.npy"],
        ", which the model does not know\n  tokens are from 0 to 299\n",
    ),
    "wrong dtype": (
        ["data=tokens", "data.path=float.npy"],
        "error: float.npy does not hold tokens of that type\n  its dtype is float64\n",
    ),
    "no such policy": (
        ["data.on_corrupt=ignore"],
        "error: `data.on_corrupt=ignore` is not valid\n",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_bad_data_is_one_error_and_exit_code_2(workplace, capfd, mistake):
    before = {path.name for path in workplace.iterdir()}
    overrides, message = MISTAKES[mistake]
    code = main(["train", *SMALL, *overrides])
    out, err = capfd.readouterr()
    assert message in err
    assert (code, out) == (2, "")
    assert err.count("error: ") == 1
    assert "Traceback" not in err
    assert {path.name for path in workplace.iterdir()} == before
