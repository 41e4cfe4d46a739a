"""Training for no steps: the initial model is evaluated and saved, and the run can continue."""

import json
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from hf_folders import GPT2, expected, saved_tensors
from quick import quick_module

import meshwright as mw
from meshwright.cli.main import main
from meshwright.config.schema import Config
from meshwright.errors import UserError
from meshwright.generation.text_settings import read_text_settings
from meshwright.models.gpt import GPT
from meshwright.trainer.starting.run_warnings import _long_warmup, fitting_warmup

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")


def loss(model, batch):
    logits = model(batch["tokens"])[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


def published_loss():
    """Return the loss by the logits of transformers, in float64."""
    tokens, logits = expected("gpt2")
    logits = np.asarray(logits, np.float64)[:, :-1]
    largest = logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(logits - largest).sum(-1)) + largest[..., 0]
    picked = np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return (log_sum - picked).mean()


def test_a_folder_is_evaluated_without_training():
    tokens, _ = expected("gpt2")
    data = {"tokens": np.asarray(tokens, np.int32)}
    one = jax.devices()[:1]
    trainer = mw.Trainer(model=mw.hf_model(GPT2), loss=loss, optimizer=optax.sgd(0.1), devices=one)
    result = trainer.fit(data, steps=0, batch_size=len(tokens), eval_data=data)
    assert (result.steps, result.losses) == (0, {})
    assert result.stopped == "no steps were asked for"
    assert result.eval_loss == pytest.approx(published_loss(), rel=1e-5)
    assert trainer.evaluate(data)["loss"] == result.eval_loss
    first, second = str(result).splitlines()
    assert first.startswith("trained nothing on 1 device in ")
    assert second == f"held out {result.eval_loss:.4f}"


@pytest.mark.full
def test_a_result_generates_with_the_tokenizer_of_its_data(tmp_path):
    sizes = {"num_blocks": 1, "hidden_size": 8, "num_heads": 2, "context_length": 17}
    talks = [{"prompt": "a", "completion": "b"}] * 8
    data = mw.ChatData(records=talks, sequence_length=16, cache_dir=str(tmp_path))
    trainer = mw.Trainer(
        model=lambda rngs: GPT(vocab_size=256, rngs=rngs, **sizes),
        loss=loss,
        optimizer=optax.sgd(0.1),
    )
    result = trainer.fit(data, steps=0, batch_size=8)
    for each in (result, replace(result, run_dir=tmp_path)):
        assert isinstance(each.generate(["a"], max_new_tokens=1).texts[0], str)


@pytest.mark.parametrize("chosen", [(), ("optimizer.warmup_steps",)])
def test_no_steps_need_no_warm_up(chosen):
    kinds = {"model": "gpt", "task": "language_modeling", "data": "text", "optimizer": "sgd"}
    values = {"training": {"steps": 0}, **{name: {"kind": kind} for name, kind in kinds.items()}}
    values["optimizer"]["warmup_steps"] = 100
    config = Config.parse(values)
    assert fitting_warmup(config, chosen, None) == (config, [])
    assert _long_warmup(config, 0, 8) == []


def test_fewer_than_no_steps_are_refused():
    trainer = mw.Trainer(model=mw.hf_model(GPT2), loss=loss, optimizer=optax.sgd(0.1))
    with pytest.raises(UserError, match="steps=-1 is not valid"):
        trainer.fit({"tokens": np.zeros((8, 4), np.int32)}, steps=-1, batch_size=8)


@pytest.mark.full
def test_the_command_saves_a_run_that_can_be_used_and_continued(tmp_path, capfd):
    run = tmp_path / "run"
    words = ["train", "--json", "model=hf", f"model.weights={GPT2}", "data=synthetic"]
    words += ["optimizer=sgd", "training.eval_batches=1", f"hydra.run.dir={run}"]
    assert main([*words, "training.steps=0"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["steps"], told["first_loss"]) == (0, None)
    assert told["eval_loss"] > 0
    table = mw.load_model(run, step=0).vocabulary.tokens.embedding[...]
    np.testing.assert_array_equal(table, saved_tensors(GPT2)["transformer.wte.weight"])
    assert main(["export", str(run), "--to", "hf", str(tmp_path / "out"), "--step", "0"]) == 0
    for name, array in saved_tensors(GPT2).items():
        np.testing.assert_array_equal(saved_tensors(tmp_path / "out")[name], array)
    assert main([w for w in [*words, "training.steps=2"] if w != "--json"]) == 0
    told = capfd.readouterr()
    assert "continuing after step 0" in told.err
    assert "trained 2 steps of " in told.out
    assert main([w for w in [*words, "training.steps=3"] if w != "--json"]) == 0
    assert "trained 1 step (3 steps in all) of " in capfd.readouterr().out


def test_a_run_of_python_keeps_the_chat_template_and_tokenizer_of_its_data(tmp_path):
    talk = [{"role": role, "content": "hi"} for role in ("user", "assistant")]
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    data = mw.ChatData(
        path=str(tmp_path / "talks.jsonl"), sequence_length=64, template="chatml", packing="none"
    )
    trainer = mw.Trainer(
        model=lambda rngs: GPT(
            num_blocks=1, hidden_size=8, num_heads=1, vocab_size=256, context_length=65, rngs=rngs
        ),
        loss=loss,
        optimizer=optax.sgd(0.1),
        devices=jax.devices()[:1],
    )
    trainer.fit(data, steps=0, batch_size=1, run_dir=tmp_path / "run")
    kept = read_text_settings(tmp_path / "run")
    assert "<|im_end|>" in kept.chat.text
    assert kept.tokenizer.encode_many(["é"])[0].tolist() == [0xC3, 0xA9]
