"""`meshwright train` as a person meets it: what it writes, what it says, what it refuses."""

import json
import logging
import sys
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import yaml
from quick import quick_module

from meshwright.checkpoint import read_params
from meshwright.cli.main import main
from meshwright.plan import Plan
from meshwright.report import read_run

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")

OWN = """
import numpy as np
from flax import nnx

class Net(nnx.Module):
    def __init__(self, *, width: int = 8, rngs: nnx.Rngs):
        self.layer = nnx.Linear(4, width, rngs=rngs)
    def __call__(self, x):
        return self.layer(x)

def loss(model, batch):
    return (model(batch["x"]) ** 2).mean()

def accuracy(model, batch):
    right = model(batch["x"]).argmax(-1) == batch["label"]
    return 1 - right.mean(), {"accuracy": right.mean(), "mistakes": 1 - right.mean()}

def not_a_loss(model, batch, more):
    return 0.0

class Lossless: pass

def data(step, batch_size):
    return {"x": np.random.default_rng(0).normal(size=(batch_size, 4))}
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Run `meshwright train` in an empty directory; return (exit code, stdout, stderr)."""
    (tmp_path / "own_train.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("COLUMNS", "40")

    def call(*overrides: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(["train", "training.steps=2", *overrides])
        out, err = capfd.readouterr()
        return code, out, err

    yield call
    sys.modules.pop("own_train", None)


@pytest.fixture
def talkative_libraries():
    """Let every library log to stderr, as some do once they are imported."""
    handler = logging.StreamHandler()
    root, level = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield
    root.removeHandler(handler)
    root.setLevel(level)


def test_a_run_leaves_everything_behind_and_says_where(run, tmp_path, talkative_libraries):
    folder = tmp_path / ("a-folder-with-a-name-longer-than-the-terminal-is-wide" * 3)
    code, out, err = run("model=mlp", "model.widths=[784,16,10]", f"hydra.run.dir={folder}")
    assert code == 0
    assert out.splitlines()[0].startswith("trained 2 steps of 32 samples on 8 devices in ")
    assert f"run folder: {folder}" in out.splitlines()
    assert "data=8, batch 32 = 4 × 8 × 1, precision no" in err
    assert "Orbax" not in err
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["task"]["kind"] == "classification"
    assert Plan.from_yaml((folder / "plan.yaml").read_text()).mesh == {"data": 8}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["split"], line["step"]) for line in lines] == [
        ("train", 1),
        ("train", 2),
        ("eval", 2),
    ]
    assert lines[0].keys() >= {"loss", "accuracy", "grad_norm", "learning_rate", "step_seconds"}
    assert read_params(folder)["layers.0.kernel"].shape == (784, 16)
    assert json.loads((folder / "result.json").read_text())["steps"] == 2


@pytest.mark.full
def test_evaluation_says_how_many_samples_it_used(run, tmp_path):
    random = np.random.default_rng(0)
    images = random.integers(0, 255, (74, 28, 28, 1), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", image=images, label=random.integers(0, 10, 74))
    words = ["model=mlp", "model.widths=[784,16,10]", "data=images", "data.eval_fraction=0.5"]
    words += [f"data.path={tmp_path}/own.npz"]
    code, _, err = run(*words, f"hydra.run.dir={tmp_path}/all")
    assert code == 0
    assert "37 samples" in err
    lines = (tmp_path / "all/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["eval_samples"] == 37
    code, _, err = run(*words, f"hydra.run.dir={tmp_path}/one", "training.eval_batches=1")
    assert code == 0
    note = "note: each evaluation uses 32 of 37 samples, because of training.eval_batches=1"
    assert note in err


@pytest.mark.full
def test_a_named_run_evaluates_with_a_loss_of_its_own_on_a_known_number_of_samples(run, tmp_path):
    tiny = ("model=own_train:Net", "task=classification", "task.input_name=x", "data=synthetic")
    tiny += ("task.input_shape=[4]", "task.num_classes=8", "training.global_batch_size=8")
    own = "training.eval_loss=own_train:accuracy"
    code, _, err = run(*tiny, own, "run.name=first try", "hydra.run.dir=a", "training.eval_every=1")
    assert code == 0
    assert "each evaluation uses 128 synthetic samples (16 batches)" in err
    assert "write training.eval_batches=…" in err
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").open()]
    evaluations = [line for line in lines if line["split"] == "eval"]
    assert len(evaluations) == 2
    for values in evaluations:
        assert values["loss"] == pytest.approx(values["mistakes"])
        assert values["loss"] + values["accuracy"] == pytest.approx(1)
        assert values["loss"] * 128 == pytest.approx(round(values["loss"] * 128), abs=1e-4)
    assert json.loads((tmp_path / "a" / "run.json").read_text())["name"] == "first try"
    assert read_run(tmp_path / "a")["name"] == "first try"
    code, _, err = run(*tiny, "training.eval_loss=own_train:not_a_loss", "hydra.run.dir=b")
    assert code == 2
    assert "error: training.eval_loss=own_train:not_a_loss is not a loss\n" in err
    assert not (tmp_path / "b").exists()


def test_ones_own_model_loss_and_data_with_json(run):
    code, out, err = run(
        "model.kind=own_train:Net",
        "model.width=16",
        "task.kind=own_train:loss",
        "data.kind=own_train:data",
        "optimizer=sgd",
        "pipeline.schedule=gpipe",
        "hardware=8xA100-40GB",
        "strict=true",
        "mesh.fsdp=8",
        "--json",
    )
    assert code == 0
    report = json.loads(out)
    assert report["mesh"] == {"fsdp": 8}
    assert report["steps"] == 2
    assert report["final_loss"] < report["first_loss"]
    assert "pipeline.schedule=gpipe has no effect: the mesh fsdp=8 has no pipe" in err
    assert "hardware=8xA100-40GB has no effect" in err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["hardware=banana"], "unknown chip `banana`"),
        (["task.kind=own_train:Lossless"], "task.kind=own_train:Lossless has no loss"),
        (["data.kind=own_train:Lossless"], "data.kind=own_train:Lossless returns no batches"),
        (["model.kind=own_train:Net", "model.widht=4"], "did you mean `model.width`?"),
        (["model.kind=own_train:Net"], "task.kind=language_modeling fails on model.kind=own"),
        (["data.kind=own_train:data"], "the batch has no field 'tokens'"),
        (["training.global_batch_size=9"], "a global batch of 8 or 16 samples would work"),
        (["data.path=nowhere.txt"], "data.path=nowhere.txt"),
        (["training.max_duration=soon"], "max_duration=soon is not a duration"),
        (["training.max_duration=5min"], "optimizer.schedule=cosine needs the number of steps"),
        (["training.early_stopping_patience=2"], "write training.eval_every=… too"),
        (["resume=must"], "resume=must, and there is no checkpoint to resume from"),
        (["resume=nowhere"], "there is no folder"),
        (["training.callbacks=[own_train:Lossless]"], "own_train:Lossless] is not a callback"),
        (["training.callbacks=[own_train:Nobody]"], "cannot load `training.callbacks=[own_train:"),
    ],
)
def test_mistakes_exit_2_before_anything_is_written(run, tmp_path, overrides, message):
    code, out, err = run(*overrides)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".py"] in (
        [],
        ["__pycache__"],
    )


def test_strict_refuses_a_program_that_sends_more_than_its_plan(run, monkeypatch):
    monkeypatch.setattr("meshwright.ledgers.ledger_records.HIGHEST", 0.0)
    monkeypatch.setattr("meshwright.ledgers.ledger_records.LOWEST", -1.0)
    code, _, err = run(
        "model.kind=own_train:Net",
        "task.kind=own_train:loss",
        "data.kind=own_train:data",
        "strict=true",
    )
    assert code == 1
    assert "error: the program deviates from its plan" in err
    assert "over data each device sends" in err


OWN_RUN = (
    "model.kind=own_train:Net", "task.kind=own_train:loss", "data.kind=own_train:data",
    "optimizer=sgd", "hydra.run.dir=run",
)  # fmt: skip


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_compiled(
    run, tmp_path, monkeypatch
):
    (tmp_path / "run").write_text("a file, not a folder")
    monkeypatch.setattr("meshwright.trainer.training_run.compile_step", pytest.fail)
    code, _, err = run(*OWN_RUN)
    assert code == 2
    assert f"error: cannot write the output directory {tmp_path}/run" in err


def test_a_run_goes_on_and_a_changed_config_is_shown(run, tmp_path):
    assert run(*OWN_RUN)[0] == 0
    before = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    code, _, err = run(*OWN_RUN, "optimizer.learning_rate=0.5", "run.seed=7", "training.steps=4")
    assert code == 2
    assert "optimizer.learning_rate was 0.1 and is 0.5; run.seed was 0 and is 7" in err
    code, _, err = run(*OWN_RUN, "training.steps=4", "training.global_batch_size=64")
    assert code == 2
    assert "the global batch was 32 samples and is 64" in err
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == before
    code, out, _ = run(*OWN_RUN, "training.steps=4", "mesh.fsdp=4", "--json")
    assert code == 0
    assert json.loads(out)["steps"] == 4
    code, out, err = run(
        *OWN_RUN, "training.steps=5", "optimizer.learning_rate=0.5", "--json",
        "checkpoint.accept_changes=true",
    )  # fmt: skip
    assert code == 0
    assert "optimizer.learning_rate was 0.1 and is 0.5" in err
    # It is done already: nothing is left to do, and nothing is lost.
    code, out, _ = run(*OWN_RUN, "training.steps=5", "--json", "checkpoint.accept_changes=true")
    assert code == 0
    assert (json.loads(out)["steps"], json.loads(out)["final_loss"]) == (5, None)


@pytest.mark.full
def test_traps_of_schedules_are_told_with_the_numbers(run):
    def warned(*overrides: str) -> list[str]:
        code, _, err = run(*OWN_RUN, *overrides)
        assert code == 0, err
        said = [line for line in err.splitlines() if "learning rate" in line or "overrides" in line]
        return list(dict.fromkeys(said))

    cosine = ("optimizer.schedule=cosine", "optimizer.learning_rate=0.1")
    assert warned(*cosine, "training.steps=4") == []
    (rises,) = warned(*cosine, "training.steps=8")
    # Half a cosine over 4 steps, and over 8: at step 3 and at step 4.
    assert "it was 0.0146 at the checkpoint (step 4) and is 0.05 after it" in rises
    assert "(optimizer.schedule=cosine ended at step 4 and now ends at step 8)" in rises
    assert warned(*cosine, "training.steps=8") == []
    (warmup,) = warned("optimizer.warmup_steps=10", "training.steps=5", "hydra.run.dir=b")
    assert "optimizer.warmup_steps=10 is not shorter than the run of 5 steps" in warmup
    assert "the learning rate ends at 0.04 and never reaches 0.1" in warmup
    # The warm-up of a default file is a tenth of a short run, also when the run gets longer.
    code, _, err = run(*OWN_RUN, "optimizer=adamw", "training.steps=20", "hydra.run.dir=d")
    assert code == 0
    assert "the warm-up takes 2 steps instead of the default's 40, a tenth of the run" in err
    code, _, err = run(*OWN_RUN, "optimizer=adamw", "training.steps=21", "hydra.run.dir=d")
    assert code == 0
    assert "the warm-up takes 2 steps instead of the default's 40, as before" in err
    (both,) = warned("training.max_duration=3st", "hydra.run.dir=c")
    assert "training.max_duration=3st overrides training.steps=2" in both
    assert "which is 3 steps" in both


def test_data_that_end_before_the_time_limit_are_named(run, tmp_path):
    (tmp_path / "own_short.py").write_text(
        "from meshwright.data.protocols import OutOfData\n"
        "from own_train import data as endless\n"
        "def data(step, batch_size):\n"
        "    if step > 2:\n"
        "        raise OutOfData('no more')\n"
        "    return endless(step, batch_size)\n"
    )
    code, out, _ = run(
        *OWN_RUN, "data.kind=own_short:data", "training.max_duration=1h",
        "optimizer.schedule=constant",
    )  # fmt: skip
    assert code == 0
    assert "the batches ran out after 3 steps, before 3600 s had passed" in out
    sys.modules.pop("own_short", None)


@pytest.mark.full
def test_a_saved_config_runs_again(run, tmp_path):
    code, first, err = run(*OWN_RUN, "--json")
    assert code == 0, err
    code, second, err = run("--config", str(tmp_path / "run"), "hydra.run.dir=again", "--json")
    assert code == 0, err
    assert json.loads(second)["final_loss"] == json.loads(first)["final_loss"]
    saved = [tmp_path / folder / "config.yaml" for folder in ("run", "again")]
    assert saved[0].read_text() == saved[1].read_text()


def test_a_run_of_the_same_second_gets_a_folder_of_its_own(run, tmp_path):
    now = datetime.now()
    for second in range(120):
        at = now + timedelta(seconds=second)
        (tmp_path / f"outputs/meshwright/{at:%Y-%m-%d/%H-%M-%S}").mkdir(parents=True)
    code, out, err = run("model=mlp", "model.widths=[784,4,10]")
    assert code == 0, err
    folder = Path(out.partition("run folder: ")[2].splitlines()[0])
    assert folder.name.endswith("-2")
    assert (folder / "result.json").is_file()


def test_a_mistake_leaves_no_folder_behind(run, tmp_path):
    assert run("model.kind=own_train:Net", "task.kind=own_train:Nothing")[0] == 2
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("own_train:Nte", "`model.kind=own_train:Nte`: did you mean `Net`?"),
        ("own_trian:Net", "`model.kind=own_trian:Net`: did you mean `own_train`?"),
    ],
)
def test_names_in_the_users_own_files_are_suggested(run, name, hint):
    code, _, err = run(f"model.kind={name}", "task.kind=own_train:loss")
    assert code == 2
    assert hint in " ".join(err.split())


@pytest.mark.full
def test_it_says_where_tokens_come_from(run, tmp_path):
    (tmp_path / "own.txt").write_text("a few words\n" * 400)
    own = ("data.path=own.txt", f"data.cache_dir={tmp_path / 'kept'}", "training.steps=0")
    for said in (
        "note: tokenized 1 document of data.path=own.txt, 4,801 tokens, into ",
        "note: 4,801 tokens of data.path=own.txt from the cache: ",
    ):
        code, _, err = run(*own)
        assert code == 0, err
        assert said in " ".join(err.split())
        assert str(tmp_path / "kept") in err
