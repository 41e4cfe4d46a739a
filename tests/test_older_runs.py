"""Runs that were kept: read, exported, reported on, and resumed; other formats are refused."""

import json
import shutil

import numpy as np
import pytest
import yaml
from older_runs import FIXTURES, GPT, RESUMED, SAVED, everything, fit_noisy
from quick import quick_module
from safetensors.numpy import load_file

import meshwright as mw
from meshwright.checkpoint import CheckpointReader
from meshwright.checkpoint.metadata import FORMAT
from meshwright.cli.main import main
from meshwright.config.compose import compose_config, validate
from meshwright.config.schema import Config
from meshwright.plan import make_plan
from meshwright.report import read_run

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")


def expected(name, step):
    arrays = dict(np.load(FIXTURES / f"{name}_{step}.npz"))
    return arrays.pop("losses"), arrays


@pytest.fixture
def copied(tmp_path):
    """Return a function that copies a run to where it may be written to."""
    return lambda name: shutil.copytree(FIXTURES / name, tmp_path / name)


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_same(arrays, wanted, **tolerance):
    assert set(arrays) == set(wanted)
    for path, value in wanted.items():
        np.testing.assert_allclose(arrays[path], value, err_msg=path, **tolerance)


def test_the_parameters_are_those_that_were_saved():
    assert_same(mw.read_params(FIXTURES / "gpt"), expected("gpt", SAVED)[1], rtol=0)
    assert_same(mw.read_params(FIXTURES / "gpt" / "checkpoints" / "2"), expected("gpt", SAVED)[1])
    statistics = mw.read_params(FIXTURES / "noisy", statistics=True)
    wanted = {path.partition("/")[2]: v for path, v in expected("noisy", SAVED)[1].items()}
    assert {"norm.mean", "norm.var", "first.kernel"} <= set(statistics)
    assert_same(statistics, {path: wanted[path] for path in statistics}, rtol=0)


def test_an_export_holds_parameters_and_statistics(tmp_path):
    assert main(["export", str(FIXTURES / "noisy"), str(tmp_path / "noisy.safetensors")]) == 0
    statistics = mw.read_params(FIXTURES / "noisy", statistics=True)
    assert_same(load_file(tmp_path / "noisy.safetensors"), statistics, rtol=0)


def test_a_checkpoint_says_where_it_comes_from():
    reader = CheckpointReader(FIXTURES / "gpt" / "checkpoints")
    said = reader.metadata(SAVED)
    assert reader.steps() == [SAVED]
    assert reader.best() == SAVED
    assert (said.step, said.seed, said.global_batch_size, said.format) == (SAVED, 3, 8, FORMAT)
    assert said.config == yaml.safe_load((FIXTURES / "gpt" / "config.yaml").read_text())
    assert said.versions["meshwright"] == "0.1.0"
    assert said.plan["mesh"] == {"fsdp": 2, "tensor": 2}


def test_the_config_is_valid_and_means_the_same():
    values = yaml.safe_load((FIXTURES / "gpt" / "config.yaml").read_text())
    config = Config.parse(values)
    settings = [*GPT, "mesh.fsdp=2", "mesh.tensor=2", "training.steps=2"]
    composed = validate(compose_config(settings, None))
    assert config == composed
    # Newer versions may have more keys; those there were keep their values.
    again = config.model_dump(mode="json")
    for section, content in values.items():
        inside = content.items() if isinstance(content, dict) else ()
        assert {key: again[section][key] for key, _ in inside} == dict(inside)
    plan = mw.Plan.from_yaml((FIXTURES / "gpt" / "plan.yaml").read_text())
    assert plan == make_plan(config, 4)


def test_a_page_shows_the_run(copied):
    folder = copied("gpt")
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "older_runs" in page
    run = read_run(folder)
    assert (run["result"]["steps"], run["facts"]["flops_per_step"]) == (SAVED, 786432)
    assert [event["step"] for event in run["events"]] == [0, SAVED, SAVED]
    assert {x for curve in run["curves"] for x, _ in curve["points"]} == {1, SAVED}
    assert "blocks.0.mlp.up.kernel" in page


@pytest.mark.parametrize("found", [FORMAT - 1, FORMAT + 1, None])
def test_a_checkpoint_of_another_format_is_refused_and_stays(copied, capfd, found):
    folder = copied("gpt")
    checkpoint = folder / "checkpoints" / str(SAVED)
    file = checkpoint / "passport" / "metadata"
    values = {k: v for k, v in json.loads(file.read_bytes()).items() if k != "format"}
    file.write_text(json.dumps(values if found is None else values | {"format": found}))
    # The format is believed if the checksums, which not every format need have, do not object.
    shutil.rmtree(checkpoint / "checksums")
    train = ["train", *GPT, "mesh.fsdp=2", "training.steps=4", f"hydra.run.dir={folder}"]
    for words in (["check", str(folder)], ["export", str(folder), "a.safetensors"], train):
        assert main(words) == 2
        said = capfd.readouterr().err
        assert f"the checkpoint {checkpoint} has another format" in said
        assert f"its format is {found or 'not known'}, and this version" in said
        assert f"reads format {FORMAT} only" in said
        assert "start a new run with hydra.run.dir=" in said
        assert "Traceback" not in said
    assert checkpoint.is_dir()


@pytest.mark.parametrize(
    "mesh",
    [
        ["mesh.data=8", "sharding.blocks=unroll"],
        ["mesh.fsdp=4", "mesh.tensor=2"],
    ],
)
@pytest.mark.full
def test_the_command_line_goes_on(copied, mesh):
    folder = copied("gpt")
    before, (losses, arrays) = read_lines(folder / "metrics.jsonl"), expected("gpt", RESUMED)
    overrides = [*GPT, *mesh, f"training.steps={RESUMED}", f"hydra.run.dir={folder}"]
    assert main(["train", *overrides]) == 0
    lines = read_lines(folder / "metrics.jsonl")
    assert lines[: len(before)] == before
    train = {line["step"]: line["loss"] for line in lines if line["split"] == "train"}
    np.testing.assert_allclose([train[u] for u in (1, 2, 3, 4)], losses, rtol=2e-5)
    assert [line["step"] for line in lines if line["split"] == "eval"] == [2, 4]
    assert_same(mw.read_params(folder), arrays, rtol=1e-4, atol=1e-6)
    events = read_lines(folder / "events.jsonl")
    assert [event["step"] for event in events if event["kind"] == "resume"] == [SAVED]
    assert CheckpointReader(folder / "checkpoints").metadata(RESUMED).format == FORMAT


def test_a_changed_setting_is_still_recognized(copied, capfd):
    folder = copied("gpt")
    changed = [*GPT, "optimizer.learning_rate=0.5", "training.steps=4", f"hydra.run.dir={folder}"]
    assert main(["train", *changed]) == 2
    assert "optimizer.learning_rate was 0.1 and is 0.5" in capfd.readouterr().err


def test_a_finished_run_is_restored_whole(copied):
    folder = copied("noisy")
    result = fit_noisy(folder, SAVED, mesh="data=2,fsdp=2", count=4)
    assert (result.steps, result.losses) == (SAVED, {})
    found = everything(result)
    assert {"counters/step", "counters/scale", "counters/good_steps"} <= set(found)
    assert_same(found, expected("noisy", SAVED)[1], rtol=0)


def test_the_trainer_goes_on(copied):
    losses, arrays = expected("noisy", RESUMED)
    result = fit_noisy(copied("noisy"), RESUMED, mesh="fsdp=8", count=8)
    assert list(result.losses) == [3, 4]
    # Half precision, and sums in another order on another mesh.
    np.testing.assert_allclose(list(result.losses.values()), losses, rtol=1e-3)
    # BatchNorm takes out this bias: its gradient is rounding alone, which Adam blows up.
    found, wanted = (
        {path: v for path, v in each.items() if not path.endswith("first.bias")}
        for each in (everything(result), arrays)
    )
    assert_same(found, wanted, rtol=0.02, atol=2e-3)
