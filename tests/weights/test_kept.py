"""What a run remembers of a folder: its tokenizer, and where texts end."""

from hf_folders import GPT2

import meshwright as mw
from meshwright.data.document_marks import named_ends
from meshwright.weights.hf_folder import open_folder
from meshwright.weights.kept import keep_files
from meshwright.weights.resolve import resolve_weights


def test_the_generation_config_says_where_texts_end():
    def ends(files):
        return [token for token, _ in named_ends(files.get)]

    config = '{"eos_token_id": 1}'
    assert set(ends(keep_files(open_folder(GPT2)))) == {0}
    both = {"config.json": config, "generation_config.json": '{"eos_token_id": [1, 106]}'}
    assert ends(both) == [1, 106, 1]
    assert ends({"config.json": config, "generation_config.json": "{}"}) == [1]
    assert ends({}) == []


def test_the_tokenizer_of_the_data_replaces_that_of_the_folder(tmp_path):
    (tmp_path / "mine.json").write_text("{}")
    files = keep_files(open_folder(GPT2), tokenizer=str(tmp_path / "mine.json"))
    assert files["tokenizer.json"] == "{}"
    assert keep_files(None, tokenizer=str(GPT2)) == {
        "tokenizer.json": (GPT2 / "tokenizer.json").read_text()
    }


def test_a_run_that_did_not_read_all_rates_goes_on_without_them():
    arguments = mw.hf_model(GPT2).arguments
    later = ("embedding_dropout", "attention_dropout", "rngs")
    before = {name: value for name, value in arguments.items() if name not in later}
    values = {"model": {**before, "kind": "gpt", "weights": str(GPT2)}}
    assert resolve_weights(values, saved=True).values == values
    assert resolve_weights(values, saved=False).values["model"]["attention_dropout"] == 0.1
    new = {"model": {"kind": "hf", "weights": str(GPT2)}}
    assert resolve_weights(new, saved=True).values["model"]["attention_dropout"] == 0.1
