"""Learning from rewards: rollouts on the training mesh, their files, resuming, and bad input."""

import itertools
import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshwright as mw
from meshwright.data.order import split_source
from meshwright.data.prompts import SumSource, prompt_source
from meshwright.data.tokenizer import ByteTokenizer
from meshwright.rewards.reward_set import read_rewards
from meshwright.tasks.grpo import token_log_probs
from meshwright.trainer.rollouts.completer import Completer
from meshwright.trainer.rollouts.rollout import Rollouts
from meshwright.trainer.rollouts.rollout_files import rollout_missing

PROMPTS = [{"prompt": f"{n}{'x' * (n % 3)}=", "answer": str(n)} for n in range(6)]
TOKENIZER = ByteTokenizer()
ADAPTERS = mw.LoRA(rank=2, targets=["out.kernel", "embed.embedding"])


class Mean(nnx.Module):
    """Predicts a token from the mean of those before it: small, and it looks back."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(128, 16, rngs=rngs)
        self.out = nnx.Linear(16, 128, rngs=rngs)

    def __call__(self, tokens):
        seen = jnp.tril(jnp.ones((tokens.shape[1], tokens.shape[1])))
        weights = seen / seen.sum(axis=1, keepdims=True)
        return self.out(jnp.tanh(weights @ self.embed(tokens))) * 2


def score(completion, answer):
    return float(completion.count(answer)) + 0.1 * len(set(completion))


def trainer(mesh="data=1", rewards=score, lora=None, **settings):
    sizes = {"max_prompt_length": 4, "max_generation_steps": 3, "num_generations": 4}
    task = {"num_iterations": 2, "tokenizer": TOKENIZER, "temperature": 0.9, "top_k": 50}
    made = mw.GRPO(rewards=rewards, **{**sizes, **task, **settings})
    devices = jax.devices()[: 1 if mesh == "data=1" else 8]
    return mw.Trainer(
        model=Mean, task=made, optimizer=optax.adam(0.01), mesh=mesh, devices=devices, log_every=1,
        lora=lora,
    )  # fmt: skip


def fit(made, folder, steps, **settings):
    every = mw.CheckpointConfig(every=1, keep_last=9)
    found = made.fit(
        PROMPTS, steps=steps, batch_size=8, run_dir=folder, checkpoint=every, progress=False,
        **settings,
    )  # fmt: skip
    return {name: np.asarray(value) for name, value in found.params.items()}


def counting(counter):
    """Return a reward that is another one whenever it is asked for."""
    return lambda completion, answer: score(completion, answer) + next(counter) % 7


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    with pytest.warns(UserWarning, match="without a time limit"):
        params = fit(trainer(rewards=counting(itertools.count())), folder, 6)
    return folder, params


def lines(folder, number):
    """Return the completions of a rollout, which serves two steps."""
    path = folder / "completions" / f"{2 * number + 1:06}.jsonl"
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_completions_are_written_with_their_rewards(whole):
    folder, _ = whole
    counter = itertools.count()
    found = [lines(folder, number) for number in range(3)]
    assert not (folder / "completions" / "000007.jsonl").exists()
    assert len({line["prompt"] for rollout in found for line in rollout}) == 6
    answers = {record["prompt"]: record["answer"] for record in PROMPTS}
    for rollout in found:
        assert [line["sample"] for line in rollout] == [0, 1, 2, 3] * 2
        for line in rollout:
            assert line["columns"] == {"answer": answers[line["prompt"]]}
            expected = score(line["completion"], answers[line["prompt"]]) + next(counter) % 7
            assert line["reward"] == pytest.approx(expected)
        for group in (rollout[:4], rollout[4:]):
            assert sum(line["advantage"] for line in group) == pytest.approx(0, abs=1e-5)
    rows = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {row["split"] for row in rows} == {"train", "rollout"}
    names = ("reward", "kl", "entropy", "mismatch", "truncated", "zero_variance", "clipped_low")
    assert all(name in row for row in rows if row["split"] == "train" for name in names)


def test_other_rewards_and_settings_are_refused_on_resume(whole):
    folder, _ = whole
    with pytest.raises(mw.UserError) as error:
        fit(trainer(rewards=score, temperature=0.5), folder, 7)
    assert "temperature was 0.9 and is 0.5" in error.value.why
    name = trainer(rewards=counting(itertools.count())).task.reward_names[0]
    assert f"reward_names was ['{name}'] and is ['score']" in error.value.why


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:the reward")
@pytest.mark.parametrize("mesh", ["data=1", "data=8", "fsdp=4,tensor=2"])
def test_sampled_log_probabilities_equal_teacher_forced_ones(mesh, tmp_path):
    made = trainer(mesh, counting(itertools.count()), beta=0.0)
    fit(made, tmp_path, 1)
    with np.load(tmp_path / "completions" / "000001.npz") as batch:
        before = made.assemble(dict(batch))
        model = before.model(before.init(made.seed))
        full = np.asarray(token_log_probs(model, {"tokens": batch["tokens"]}))
        mask = batch["completion_mask"] > 0
        np.testing.assert_allclose(batch["sampler_log_probs"][mask], full[mask], atol=1e-5)
        assert 0 < batch["importance"][mask].min() < batch["importance"][mask].max()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:the reward")
@pytest.mark.parametrize("mesh", ["data=1", "fsdp=4,tensor=2"])
def test_the_reference_of_adapters_is_the_base_without_a_copy(mesh, tmp_path, monkeypatch):
    """The second rollout is that of adapters which are no longer zero."""
    whole = Rollouts.__post_init__

    def without_initial(self):
        whole(self)
        self.initial = None

    monkeypatch.setattr(Rollouts, "__post_init__", without_initial)
    made, again = (
        trainer(mesh, counting(itertools.count()), beta=0.1, lora=ADAPTERS) for _ in range(2)
    )
    trained = made.fit(PROMPTS, steps=2, batch_size=8, progress=False).model
    fit(again, tmp_path, 3)
    with np.load(tmp_path / "completions" / "000003.npz") as batch:
        before = trainer(mesh).assemble(dict(batch))
        frozen = before.model(before.init(made.seed))
        tokens, mask = {"tokens": batch["tokens"]}, batch["completion_mask"] > 0
        base, now = (np.asarray(token_log_probs(each, tokens))[mask] for each in (frozen, trained))
        np.testing.assert_allclose(batch["reference_log_probs"][mask], base, atol=1e-6)
        np.testing.assert_allclose(batch["sampler_log_probs"][mask], now, atol=1e-5)
        assert np.abs(base - now).max() > 1e-4


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:the reward")
def test_a_run_resumed_inside_a_rollout_is_bit_equal(whole, tmp_path):
    """Rewards are asked for once, so that even those that change give the same run."""
    counter = itertools.count()
    fit(trainer(rewards=counting(counter)), tmp_path, 5)
    # As if it had been killed: the second rollout is in use, and the third was scored.
    for step in (4, 5):
        shutil.rmtree(tmp_path / "checkpoints" / str(step))
    assert not rollout_missing(tmp_path, 3)
    kept = tmp_path / "completions" / "000003.npz"
    shutil.move(kept, tmp_path / "away")
    assert "in use until step 4" in rollout_missing(tmp_path, 3)
    with pytest.raises(mw.UserError, match="multiple of 2"):
        fit(trainer(rewards=counting(counter)), tmp_path, 6)
    shutil.move(tmp_path / "away", kept)
    # Another run, on another mesh, continues the same rollout.
    other = fit(
        trainer("data=8", counting(itertools.count(16))),
        tmp_path / "other",
        6,
        resume=str(tmp_path),
    )
    resumed = fit(trainer(rewards=counting(counter)), tmp_path, 6)
    assert next(counter) == 24
    for name, value in resumed.items():
        np.testing.assert_allclose(other[name], value, atol=1e-5)
    for name, value in whole[1].items():
        np.testing.assert_array_equal(value, resumed[name])


@pytest.mark.filterwarnings("ignore:the reward")
def test_lost_rewards_are_counted_and_held_out_prompts_are_completed_greedily(tmp_path):
    def troubled(completion):
        return float("nan") if ord(completion[0]) % 2 else float(len(set(completion)))

    made = trainer(rewards={"odd": troubled}, beta=0.0, num_iterations=1)
    seen = []
    result = made.fit(
        PROMPTS,
        steps=1,
        batch_size=8,
        eval_data=PROMPTS[:2],
        run_dir=tmp_path,
        progress=False,
        on_metrics=lambda step, values: seen.append(values),
    )
    lost = [line for line in lines(tmp_path, 0) if line["reward"] is None]
    assert 0 < len(lost) < 8
    assert seen[0]["reward_failed"] == len(lost) / 8
    assert all(line["advantage"] == 0 for line in lost)
    assert f"the reward odd failed for {len(lost)} of 8" in (tmp_path / "events.jsonl").read_text()
    assert result.eval[1]["reward"] == -result.eval[1]["loss"]
    assert result.eval[1]["eval_samples"] == 2
    assert result.evaluate(PROMPTS[:2]) == result.eval[1]
    assert made.evaluate(PROMPTS[:2], of=tmp_path) == result.eval[1]
    assert dict(result.rewards) == {1: seen[0]["reward"]}
    assert str(result).endswith(f"of held-out prompts {result.eval[1]['reward']:.4f}")


@pytest.mark.filterwarnings("ignore:the reward")
@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([{"prompt": "12345"}], {}, "prompt 0 has 5 tokens"),
        ([{"prompt": ""}], {}, "prompt 0 has no tokens"),
        ([{"text": "1"}], {}, "record 0 has no prompt"),
        ([{"prompt": "1"}], {"rewards": score}, "needs the column `answer`"),
        ([], {}, "there are no prompts"),
        ({"prompt": ["1", "2"], "answer": ["1"]}, {}, "differ in length"),
        (PROMPTS, {"num_generations": 3}, "no whole groups"),
        (PROMPTS, {"eos_tokens": [10, 5000]}, "eos_tokens=.10, 5000. has the token 5000"),
        pytest.param(
            PROMPTS,
            {"rewards": lambda completion: 1 / 0},
            "fails for every completion",
            marks=pytest.mark.full,
        ),
    ],
)
def test_bad_input_is_refused(prompts, settings, message, tmp_path):
    made = trainer(**{"rewards": len_, **settings})
    with pytest.raises(mw.UserError, match=message):
        made.fit(prompts, steps=1, batch_size=8, run_dir=tmp_path / "run", progress=False)
    assert (tmp_path / "run").exists() == ("fails" in message)


def len_(completion):
    return float(len(completion))


def test_a_trainer_takes_a_loss_or_a_task():
    with pytest.raises(mw.UserError, match="there is no loss"):
        mw.Trainer(model=Mean, optimizer=optax.sgd(0.1))
    with pytest.raises(mw.UserError, match="both given"):
        mw.Trainer(
            model=Mean, optimizer=optax.sgd(0.1), task=mw.GRPO(rewards=len_),
            loss=lambda model, batch: 0.0,
        )  # fmt: skip


class Placed(Mean):
    """The same with positions, of which it has six."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.places = nnx.Embed(6, 128, rngs=rngs)

    def __call__(self, tokens):
        return super().__call__(tokens) + self.places(jnp.arange(tokens.shape[1]))


class Foreseeing(Mean):
    """A model whose probabilities of a token depend on the later ones."""

    def __call__(self, tokens):
        return super().__call__(tokens) + self.embed(tokens).sum((1, 2))[:, None, None] * (
            jnp.arange(128) - 64
        )


def test_a_model_that_completions_do_not_fit_is_named():
    made = replace(trainer(), model=Placed)
    with pytest.raises(mw.UserError, match="completions of 3 tokens do not fit the model") as error:
        made.fit(PROMPTS, steps=1, batch_size=8, progress=False)
    assert "it takes 6 tokens: the table of positions that gather in places" in error.value.why


@pytest.mark.full
def test_a_model_that_sees_later_tokens_is_warned_about():
    made = replace(trainer(rewards=len_, beta=0.0, num_iterations=1), model=Foreseeing)
    with pytest.warns(UserWarning, match="does it see later tokens"):
        made.fit(PROMPTS, steps=1, batch_size=8, progress=False)


TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}~\n{% endfor %}"


def echo(model_of_tokens, length=128):
    """Return a model that says 1, 2, ~ and so on, whatever comes before."""

    class Echo(nnx.Module):
        def __call__(self, tokens):
            following = jnp.array([model_of_tokens.get(n, 49) for n in range(length)])
            return jax.nn.one_hot(following[tokens], length) * 50

    return Echo()


def test_conversations_in_parquet_end_with_the_turn(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    talk = [{"role": "user", "content": "hi"}]
    table = {"prompt": [talk, talk], "answer": ["12", "1"]}
    parquet.write_table(pytest.importorskip("pyarrow").table(table), tmp_path / "p.parquet")
    source = prompt_source(path=str(tmp_path / "p.parquet"))
    columns = source.rows(np.arange(2))
    files = {"chat_template.jinja": TEMPLATE}
    same = read_rewards(lambda completion, answer: completion == answer)
    completer = Completer(same, TOKENIZER, files.get)
    assert TOKENIZER.decode(completer.encode(columns["prompt"][0])) == "u:hi~\n"
    said = []
    model = echo({ord("1"): ord("2"), ord("2"): ord("~")})
    rows = completer.complete(model, columns, said.append, max_new_tokens=8)
    assert [(row.text, len(row.tokens), str(row.ended)) for row in rows] == [
        ("12", 3, "stop token")
    ] * 2
    assert said[-1] == "2 of 2 completions, 6 tokens"
    groups, scored = completer.score(columns, rows)
    assert scored.values.tolist() == [[1.0], [0.0]]
    assert groups[0].columns == {"answer": "12"}
    with pytest.raises(mw.UserError, match="no chat template"):
        Completer(same, TOKENIZER, {}.get).encode(talk)


def test_prompts_from_files(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"q": "1+1=", "answer": 2}\n{"q": [49, 43], "level": "b"}\n')
    made = prompt_source(path=str(file), field="q")
    rows = made.rows(np.array([1, 0]))
    assert rows["prompt"].tolist() == [[49, 43], "1+1="]
    assert rows["answer"].tolist() == [None, 2]
    assert "2 prompts with answer" in made.describe()
    file.write_text('{"text": "1", "level": 2}\n')
    with pytest.raises(mw.UserError, match=r"(?s)no field `q`.*text, level.*field=.text. for"):
        prompt_source(path=str(file), field="q")
    with pytest.raises(mw.UserError, match=r"every record is corrupt: .*fields are text, level"):
        prompt_source(path=str(file), on_corrupt="skip")


def test_sums():
    every = np.arange(8100)
    prompts = SumSource(for_prompts=True).rows(every)
    assert len(set(prompts["prompt"])) == len(SumSource()) == 8100
    first = prompts["prompt"].tolist().index("37+48=")
    assert prompts["answer"][first] == "85"
    text = SumSource().rows(every[first:])
    tokens, mask = text["tokens"][0], text["mask"][0]
    assert TOKENIZER.decode(tokens).rstrip("\0") == "37+48=85\n"
    assert TOKENIZER.decode(tokens[1:][mask > 0]) == "85\n"


def test_sums_held_out_of_fewer_are_held_out_of_all():
    few, all_ = (split_source(SumSource(most=n, for_prompts=True), 0.1) for n in (900, None))
    held, train = (set(all_[n].rows(np.arange(len(all_[n])))["prompt"]) for n in (1, 0))
    assert set(few[1].rows(np.arange(len(few[1])))["prompt"]) < held
    assert set(few[0].rows(np.arange(len(few[0])))["prompt"]) < train
