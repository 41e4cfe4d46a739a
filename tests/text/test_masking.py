"""Secrets do not appear in anything that is printed or written."""

import json

import pytest
import yaml
from quick import quick_module

from meshwright.cli.main import main
from meshwright.text.masking import (
    HIDDEN,
    hidden_names,
    is_secret_name,
    mask_text,
    mask_tree,
    mask_value,
    mask_words,
)

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")

SECRET = "hunter2"
URI = f"http://me:{SECRET}@127.0.0.1:1/x?token={SECRET}&run=3"


SECRETS = (
    *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "SLURM_JWT", "MY_KEY", "DB_PASSWORD"),
    *("tracking.api_key", "data.hubToken", "password", "--token", "model.credentials", "passwd"),
)
OTHERS = (
    *("data.tokenizer", "data.eos_token", "training.sample_tokens", "data.label_key", "data.path"),
    *("optimizer.kind", "model.num_key_value_heads", "key", "model.class_token", "keep_last"),
)


@pytest.mark.parametrize("name", SECRETS)
def test_names_of_secrets(name):
    assert is_secret_name(name)
    assert mask_value(name, SECRET) == HIDDEN
    assert SECRET not in mask_text(f"cannot read `{name}={SECRET}`, sorry")


@pytest.mark.parametrize("name", OTHERS)
def test_names_of_other_settings_stay_readable(name):
    assert not is_secret_name(name)
    assert mask_value(name, "value") == "value"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (URI, f"http://{HIDDEN}@127.0.0.1:1/x?token={HIDDEN}&run=3"),
        ("s3://k:p@h/b and ssh://u@h", f"s3://{HIDDEN}@h/b and ssh://{HIDDEN}@h"),
        ("https://h/f?X-Amz-Signature=ab&x=1", f"https://h/f?X-Amz-Signature={HIDDEN}&x=1"),
        ("Authorization: Bearer ab.cd", f"Authorization: Bearer {HIDDEN}"),
        ("http://host:5000/a?b=c mail me@host", "http://host:5000/a?b=c mail me@host"),
        ("optimizer.learning_rate=0.1 a==b", "optimizer.learning_rate=0.1 a==b"),
        ("--export=TOKEN=ab", f"--export=TOKEN={HIDDEN}"),
        ("--export=ALL,A=b,HF_TOKEN=ab", f"--export=ALL,A=b,HF_TOKEN={HIDDEN}"),
    ],
)
def test_secrets_inside_of_text(text, shown):
    assert mask_text(text) == shown
    assert mask_text(shown) == shown


def test_nested_settings_and_command_lines():
    given = {"a": {"api_key": SECRET, "rows": [URI, 3]}, "token": "", "n": 1}
    shown = mask_tree(given)
    assert shown["a"] == {"api_key": HIDDEN, "rows": [mask_text(URI), 3]}
    assert (shown["token"], shown["n"]) == ("", 1)
    assert hidden_names(shown) == ["a.api_key", "a.rows"]
    assert given["a"]["api_key"] == SECRET
    assert mask_words(["a.password=b;c)d", "a.b=c;d,e"]) == [f"a.password={HIDDEN}", "a.b=c;d,e"]
    words = ["train", "--token", SECRET, f"x.password={SECRET}", "--json"]
    assert mask_words(words) == ["train", "--token", HIDDEN, f"x.password={HIDDEN}", "--json"]


def test_the_printed_config_has_no_secret(capfd):
    for words in (["config"], ["config", "--cfg", "all"]):
        assert main([*words, f"tracking.mlflow_uri='{URI}'"]) == 0
        out, err = capfd.readouterr()
        assert SECRET not in out + err
        assert HIDDEN in out


@pytest.mark.parametrize("resumed", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_run_folder_has_no_secret_and_says_so(tmp_path, monkeypatch, capfd, resumed):
    monkeypatch.chdir(tmp_path)
    command = ["train", "model=mlp", "model.widths=[784,4,10]", "training.global_batch_size=8"]
    command += ["hydra.run.dir=run", f"tracking.mlflow_uri='{URI}'", "data.workers=0"]
    monkeypatch.setattr("sys.argv", ["meshwright", *command])
    # The same command resumes: the real value comes from the command again.
    for steps in (1, 2) if resumed else (1,):
        assert main([*command, f"training.steps={steps}"]) == 0
    _, err = capfd.readouterr()
    assert SECRET not in err
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file():
            assert SECRET.encode() not in file.read_bytes(), file
    saved = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert saved["tracking"]["mlflow_uri"].startswith(f"http://{HIDDEN}@127.0.0.1")
    assert HIDDEN in " ".join(json.loads((tmp_path / "run/run.json").read_text())["command"])
    assert main(["train", "--config", "run/config.yaml"]) == 2
    err = capfd.readouterr().err
    assert "tracking.mlflow_uri in --config run/config.yaml is hidden" in err
    assert "write tracking.mlflow_uri=… after --config" in err
    again = ["config", "--config", "run/config.yaml", "tracking.mlflow_uri=null"]
    assert main(again) == 0
