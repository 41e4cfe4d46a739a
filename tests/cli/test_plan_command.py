"""`meshwright plan` as a person types it: text, JSON, files, exit codes."""

import json
import shlex
from pathlib import Path

import pytest
import yaml
from closed_form import GPT2_MEDIUM, GPT3

from meshwright.cli.main import main
from meshwright.config.batch import solve_batch
from meshwright.config.schema import ShardingConfig
from meshwright.errors import UserError
from meshwright.inputs.plan_file import other_model, refuse_unnamed_model
from meshwright.plan import Plan


@pytest.fixture
def plan(capfd, monkeypatch):
    """Run `meshwright plan` and return (exit code, stdout, stderr)."""

    def call(*argv: str, estimator=GPT2_MEDIUM) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", "400")
        monkeypatch.setattr("meshwright.cli.plan.config_estimator", lambda *_: estimator)
        code = main(["plan", *argv])
        out, err = capfd.readouterr()
        return code, out, err

    return call


MEDIUM = ("model=gpt2_medium", "hardware=8xA100-40GB", "training.global_batch_size=32")


def test_it_says_what_to_do_and_why(plan):
    code, out, _ = plan(*MEDIUM, "precision=bf16")
    assert code == 0
    assert out.startswith("gpt2_medium, 353,501,184 parameters, on 8xA100-40GB; 32 samples")
    for text in (
        "data=8 (data parallel): 52.2 ms per step, 628k tokens/s, MFU 53%, 11.3 GB of 40.0 GB",
        "fits on one device, which has 36.0 GB for it",
        "16.0 bytes for each of 353,501,184 parameters",
        "█ parameters      1.4 GB",
        "computing                52.2 ms 100%",
        "8 times the devices are 7.3 times as fast, not 8",
        "nothing that was tried: still data=8 with 160.0 GB of memory per device or 1200 GB/s",
        "600 steps in 31.3 s, 0.0696 device-hours",
        "15 meshes are slower or less simple, such as",
    ):
        assert text in out


def test_a_model_for_which_fewer_devices_are_faster_says_so_at_the_top(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["plan", "model=mlp", "hardware=8xH100"]) == 0
    head = capfd.readouterr().out.partition("why\n")[0]
    assert "1 device is faster than all 8: " in head
    assert "Write hardware=1xH100 training.global_batch_size=32." in head
    argv = ["hardware=1xH100", "training.global_batch_size=32"]
    assert main(["plan", "model=mlp", *argv, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["global_batch_size"] == 32
    assert not any("faster than all" in line for line in found["decision"])


def test_json_has_the_plans_in_order_and_every_other_mesh_with_a_reason(plan):
    budget = ("--tokens", "300B", "--price", "2.5")
    code, out, _ = plan(*MEDIUM, "--json", "--top", "3", *budget)
    found = json.loads(out)
    assert code == 0
    assert found["plans"][0]["mesh"] == {"data": 8}
    assert len(found["plans"]) == 3
    assert len(found["plans"]) + len(found["rejected"]) == 20
    assert all(each["reason"] for each in [*found["plans"], *found["rejected"]])
    first = found["plans"][0]
    memory = first["memory"]
    total = memory.pop("total")
    assert memory.pop("capacity") == 40 * 10**9
    assert sum(memory.values()) == total
    assert sum(first["time"].values()) == pytest.approx(first["step_time"])
    assert first["tokens_per_second"] == pytest.approx(32 * 1024 / first["step_time"])
    assert [point["devices"] for point in found["scaling"]] == [1, 2, 4, 8]
    assert [each["mesh"] for each in found["what_if"]] == [None] * 3
    # More memory and faster links change nothing; four times the batch takes longer.
    times = [each["step_time"] for each in found["what_if"]]
    assert times[:2] == pytest.approx([first["step_time"]] * 2)
    assert times[2] > 3 * first["step_time"]
    assert all(each["memory"] > 0 for each in found["what_if"])
    hours = 300e9 / first["tokens_per_second"] * 8 / 3600
    assert found["budget"]["device_hours"] == pytest.approx(hours, rel=1e-6)
    assert found["budget"]["usd"] == pytest.approx(2.5 * hours, rel=1e-6)


def test_settings_of_the_user_are_kept(plan):
    code, out, _ = plan(*MEDIUM, "mesh.tp=4", "sharding.remat=full", "pipeline=zb_h1", "--json")
    assert code == 0
    for each in json.loads(out)["plans"]:
        assert each["mesh"]["tensor"] == 4
        assert each["plan"]["sharding"]["remat"] == "full"
        assert each["plan"]["schedule"] in (None, "zb_h1")


def test_a_whole_mesh_is_one_plan(plan):
    code, out, _ = plan(*MEDIUM, "mesh=fsdp", "--json")
    found = json.loads(out)
    assert code == 0
    assert [each["mesh"] for each in found["plans"]] == [{"fsdp": 8}]
    assert found["rejected"] == []


def test_another_plan_is_compared_in_words(plan):
    code, out, _ = plan(*MEDIUM, "--compare", "mesh.tensor=4")
    assert code == 0
    assert "data=2 × tensor=4 costs 30.2% more than data=8 (68 ms per step, not 52.2 ms)" in out
    assert "20.1 ms more of exposed all-reduces inside layers over tensor" in out
    assert "tensor parallelism where data parallelism fits" in out


def test_all_settings_after_compare_belong_to_the_other_plan(plan):
    code, out, _ = plan(*MEDIUM, "--compare", "mesh.tensor=4", "mesh.data=1", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["compared"]["plan"]["mesh"] == {"fsdp": 2, "tensor": 4}
    assert found["plans"][0]["mesh"] == {"data": 8}
    assert len(found["plans"]) + len(found["rejected"]) > 4
    quoted = plan(*MEDIUM, "--compare", "mesh.tensor=4 mesh.data=1", "--json")[1]
    assert json.loads(quoted)["compared"] == found["compared"]
    code, _, err = plan("model=gpt2_medium", "--compare", "mesh.data=8", "hardware=8xH100")
    assert code == 2
    assert "write hardware=… before --compare" in err


def test_comparing_another_model_is_refused(plan):
    code, _, err = plan(*MEDIUM, "--compare", "model.num_blocks=3")
    assert code == 2
    assert "--compare cannot change model.num_blocks" in err


def test_a_plan_that_does_not_fit_is_compared_too(plan):
    code, out, _ = plan(
        "model=gpt2_medium",
        "hardware=64xA100-80GB",
        "training.global_batch_size=64",
        "--compare",
        "mesh.data=-1",
        estimator=GPT3,
    )
    assert code == 0
    assert "replicating a model that does not fit: each device needs 2.8 TB and has 80.0 GB" in out


def test_nothing_fits_names_the_smallest_cluster(plan):
    argv = ("model=gpt2_medium", "hardware=8xA100-40GB", "training.global_batch_size=64", "--json")
    code, out, err = plan(*argv, estimator=GPT3)
    assert code == 3
    assert "no plan fits on 8xA100-40GB" in err
    assert "the smallest cluster of A100-40GB that holds it is 11x8xA100-40GB" in err
    found = json.loads(out)
    assert found["plans"] == []
    assert found["smallest_hardware"] == "11x8xA100-40GB"
    assert (
        "for a global batch of 88 samples instead of 64, which can be divided over 88 devices"
        in err
    )
    assert found["smallest_global_batch_size"] == 88
    assert all(each["reason"] for each in found["rejected"])


def test_settings_that_do_not_fit_are_not_blamed_on_the_cluster(plan):
    fixed = ("mesh.data=1024", "training.global_batch_size=1024", "--json")
    code, out, err = plan("model=gpt2_medium", "hardware=1024xA100-80GB", *fixed, estimator=GPT3)
    assert code == 3
    assert "leave the settings of mesh and microbatches out and 5x8xA100-80GB holds it" in err
    assert json.loads(out)["smallest_hardware"]


def test_the_page_loads_nothing_and_escapes_names(plan, tmp_path):
    page = tmp_path / "plan.html"
    own = tmp_path / "conf" / "model"
    own.mkdir(parents=True)
    (own / "a&b.yaml").write_text("kind: gpt\nnum_blocks: 2\n")
    code, _, _ = plan(
        "model='a&b'", *MEDIUM[1:], "--html", str(page), "--config-dir", str(own.parent)
    )
    text = page.read_text()
    assert code == 0
    assert "<title>a&amp;b on 8xA100-40GB · Meshwright</title>" in text
    assert "http-equiv" in text
    assert "src=" not in text.replace("-src ", "")
    assert text.count("plan-row") > 10
    assert "<title>1 device: " in text
    assert "<script" not in text
    assert 'class="mw-mesh"' in text


def test_the_plan_is_written_for_train(plan, tmp_path):
    file = tmp_path / "plan.yaml"
    code, _, err = plan(*MEDIUM, "--out", str(file))
    assert code == 0
    assert Plan.from_yaml(file.read_text()).mesh == {"data": 8}
    assert f"meshwright train model=gpt2_medium plan={file}\n" in err
    assert other_model(str(file), 353_501_184) == []
    (warning,) = other_model(str(file), 1000)
    assert "made for gpt2_medium with 353,501,184 parameters, and this model has 1,000" in warning
    refuse_unnamed_model(str(file), 353_501_184)
    with pytest.raises(UserError, match="no model is given") as refused:
        refuse_unnamed_model(str(file), 1000)
    assert "write model=gpt2_medium" in str(refused.value.fix)
    # Like a plan that was made in Python, which has no settings for its model.
    known = {"model": "the model", "parameters": 5, "hardware": "8xA100-40GB"}
    head = file.read_text().partition("made_for")[0]
    file.write_text(head + yaml.safe_dump({"made_for": known}))
    code, _, err = plan(str(file))
    assert code == 2
    assert "was made for the model, and no model is given" in err
    for edited in ("made_for: 3\n", "made_for: {parameters: many}\n", ""):
        file.write_text(file.read_text().partition("made_for")[0] + edited)
        assert other_model(str(file), 1000) == []


def test_the_command_that_is_printed_has_no_setting_of_the_plan_and_works(
    tmp_path, capfd, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    own = tmp_path / "my conf" / "model"
    own.mkdir(parents=True)
    (own / "small.yaml").write_text("kind: mlp\nwidths: [784, 8, 10]\n")
    size = ["model=small", "model.widths=[784,16,10]"]
    words = [*size, "task=classification", "data=synthetic", "simulate=8"]
    planned = ["mesh=fsdp", "precision=bf16", "training.global_batch_size=16", "sharding.zero=2"]
    flags = ["--config-dir", str(own.parent)]
    rest = ["training.steps=1", "checkpoint=none", "hydra.run.dir=run"]
    argv = ["model=mlp", *words, *planned, *rest, *flags, "--out", "my plan.yaml"]
    assert main(["plan", *argv]) == 0
    (line,) = (w for w in capfd.readouterr().err.splitlines() if w.startswith("to train with"))
    command = shlex.split(line.partition(": ")[2])
    given = command[command.index("train") :]
    assert given == ["train", *flags, *words, *rest, "plan=my plan.yaml"]
    assert main(given) == 0
    trained = Plan.from_yaml(Path("run/plan.yaml").read_text())
    assert trained == Plan.from_yaml(Path("my plan.yaml").read_text())


def test_a_plan_file_is_estimated_for_the_hardware_and_the_model_it_was_made_for(plan, tmp_path):
    file = str(tmp_path / "plan.yaml")
    own = ("mesh=fsdp", "sharding.remat=full", "precision=bf16")
    assert plan(*MEDIUM, *own, "--out", file)[0] == 0
    made = Plan.from_yaml(Path(file).read_text())
    for name in (file, f"plan={file}"):
        code, out, _ = plan(name, "--json")
        found = json.loads(out)
        assert code == 0
        assert (found["model"], found["hardware"]) == ("gpt2_medium", "8xA100-40GB")
        assert [Plan.model_validate(each["plan"]) for each in found["plans"]] == [made]
    # In the same format, data=8 is as fast as without the file.
    code, out, _ = plan(file, "--compare", "mesh.data=8", "--json")
    assert json.loads(out)["compared"]["plan"]["precision"] == "bf16"
    code, out, _ = plan(*MEDIUM, "mesh.data=8", "--compare", file, "--json")
    assert code == 0
    assert Plan.model_validate(json.loads(out)["compared"]["plan"]) == made
    code, _, err = plan(file, "hardware=4xA100-40GB")
    assert code == 2
    assert f"plan={file} is for 8 devices, and 4xA100-40GB has 4" in err


def test_without_hardware_it_plans_for_what_is_there(plan):
    code, out, _ = plan("model=gpt2_nano", "simulate=4", "--json")
    assert code == 0
    assert json.loads(out)["hardware"] == "4xCPU"
    code, out, _ = plan("model=gpt2_nano", "--json")
    assert json.loads(out)["hardware"] == "8xCPU"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["hardware=8xA1000"], "unknown chip `A1000`"),
        (["hardware=8"], "write it as 8xH100"),
        (["hardware=8xH100", "mesh.fsdp=0"], "1 leaves it unused"),
        (["hardware=8xA100-40GB", "mesh.tensor=3"], "  mesh.tensor=3, which does not divide 8"),
        (
            ["hardware=8xA100-40GB", "mesh.context=4", "mesh.pipe=2"],
            "mesh.context=4 cannot be combined with mesh.pipe=2",
        ),
        (["hardware=8xA100-40GB", "--memory-share", "2"], "--memory-share 2 is not valid"),
        (["hardware=8xA100-40GB", "--tokens", "many"], "`many` is not an amount of training"),
        (["hardware=8xA100-40GB", "--tokens", "1B", "--epochs", "2"], "are both given"),
        (["hardware=8xA100-40GB", "--top", "0"], "--top 0 is not valid"),
        (["hardware=local", "simulate=4"], "hardware=local contradicts simulate=4"),
        (
            ["training.micro_batch_size=automatic"],
            "`training.micro_batch_size=automatic` is not valid\n  input should be a valid "
            "integer, unable to parse string as an integer or 'auto'\n  did you mean `auto`?",
        ),
        (
            ["hardware=8xA100-40GB", "mesh.data=8", "training.global_batch_size=7"],
            "write training.global_batch_size=8, let several devices share each row (mesh.context)",
        ),
        (
            ["hardware=8xA100-40GB", "--out", "/nowhere/plan.yaml"],
            "cannot write /nowhere/plan.yaml",
        ),
    ],
)
def test_mistakes_are_told_in_one_message(plan, argv, message):
    code, _, err = plan(*argv)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Write a plan with every kind of setting."""
    path = tmp_path_factory.mktemp("plans") / "plan.yaml"
    made = Plan(
        mesh={"pipe": 2, "fsdp": 4},
        batch=solve_batch(replicas=4, global_batch_size=32, gradient_accumulation_steps=8),
        sharding=ShardingConfig(remat="full", blocks="scan"),
        schedule="zb_h1",
        num_microbatches=8,
        precision="bf16",
    )
    path.write_text(made.to_yaml())
    return path


def settings(capfd, *argv: str) -> tuple[int, dict, str]:
    code = main(["train", "model=gpt2_nano", *argv, "--cfg", "job"])
    out, err = capfd.readouterr()
    return code, yaml.safe_load(out) or {}, err


def test_train_takes_the_plan(file, capfd):
    code, config, _ = settings(capfd, f"plan={file}", "mesh.fsdp=4")
    assert code == 0
    assert config["mesh"] == {
        **dict.fromkeys(("data", "context", "tensor"), 1), "pipe": 2, "fsdp": 4, "auto": False
    }  # fmt: skip
    assert config["training"]["global_batch_size"] == 32
    assert config["training"]["micro_batch_size"] == 1
    assert config["sharding"]["remat"] == "full"
    assert config["pipeline"]["schedule"] == "zb_h1"
    assert config["precision"]["compute"] == "bf16"


def test_settings_that_contradict_the_plan_are_refused_with_both_values(file, capfd):
    mixed = "training.mixed_precision=fp16"
    code, _, err = settings(capfd, f"plan={file}", "mesh.tensor=2", "mesh.fsdp=4", mixed)
    assert code == 2
    assert f"error: plan={file} contradicts mesh.tensor=2 and {mixed}\n" in err
    assert "mesh.tensor is 1 in the plan; precision.compute is bf16 in the plan\n" in err
    assert "mesh.fsdp" not in err
    again = f"training.global_batch_size=32 mesh.tensor=2 {mixed} --out {file}"
    assert f"plan again with them: meshwright plan {again}\n" in err


def test_settings_that_a_written_plan_leaves_out_are_taken(tmp_path, capfd):
    path = tmp_path / "plan.yaml"
    batch = {"global_batch_size": 8, "micro_batch_size": 1, "replicas": 8}
    written = {"mesh": {"fsdp": 8}, "batch": {**batch, "gradient_accumulation_steps": 1}}
    path.write_text(yaml.safe_dump({**written, "sharding": {"zero": 2}}))
    words = ("sharding.blocks=scan", "precision=bf16", "kernels=none")
    code, config, _ = settings(capfd, f"plan={path}", *words)
    assert code == 0
    assert config["sharding"]["blocks"] == "scan"
    assert config["sharding"]["zero"] == 2
    assert config["precision"]["compute"] == "bf16"
    assert config["kernels"] == "none"
    code, _, err = settings(capfd, f"plan={path}", "sharding.zero=3")
    assert code == 2
    assert "sharding.zero is 2 in the plan" in err


def test_a_yaml_file_by_itself_is_a_plan(file, capfd):
    assert main(["config", str(file)]) == 0
    by_itself = capfd.readouterr().out
    assert main(["config", f"plan={file}"]) == 0
    assert capfd.readouterr().out == by_itself


def test_a_missing_or_foreign_plan_is_refused(tmp_path, capfd):
    code, _, err = settings(capfd, "plan=nowhere.yaml")
    assert code == 2
    assert "cannot read plan=nowhere.yaml" in err
    other = tmp_path / "other.yaml"
    other.write_text("a: 1\n")
    code, _, err = settings(capfd, f"plan={other}")
    assert code == 2
    assert f"plan={other} is not a plan" in err


def test_another_number_of_devices_asks_for_another_plan(tmp_path, capfd):
    path = tmp_path / "plan.yaml"
    path.write_text(
        Plan(mesh={"data": 4}, batch=solve_batch(replicas=4, global_batch_size=8)).to_yaml()
    )
    assert main(["inspect", "model=mlp", f"plan={path}"]) == 2
    err = capfd.readouterr().err
    assert "the mesh does not match the 8 devices" in err
    assert f"the mesh is that of plan={path}: train on as many devices" in err


@pytest.mark.full
def test_a_run_trains_with_the_plan_and_can_be_run_again_without_its_file(
    tmp_path, capfd, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    batch = solve_batch(replicas=8, global_batch_size=16)
    wanted = Plan(mesh={"data": 2, "fsdp": 4}, batch=batch, sharding=ShardingConfig(zero=2))
    Path("plan.yaml").write_text(wanted.to_yaml())
    tiny = ("model=mlp", "data=synthetic", "training.steps=1", "checkpoint=none")
    assert main(["train", *tiny, "plan=plan.yaml", "hydra.run.dir=run"]) == 0
    assert Plan.from_yaml(Path("run/plan.yaml").read_text()) == wanted
    origins = json.loads(Path("run/config.json").read_text())
    assert {each["key"]: each["from"] for each in origins}["mesh.fsdp"] == "plan.yaml"
    Path("plan.yaml").unlink()
    capfd.readouterr()
    assert main(["train", "--config", "run", "--cfg", "job"]) == 0
    assert yaml.safe_load(capfd.readouterr().out)["mesh"]["fsdp"] == 4


@pytest.mark.full
def test_the_plan_in_the_readme_is_the_one_that_is_printed(capfd, monkeypatch):
    block = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    block = block.partition("$ meshwright plan ")[2].partition("```")[0]
    words, *shown = block.strip().splitlines()
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["plan", *words.split()]) == 0
    printed = capfd.readouterr().out
    assert len(shown) > 5
    assert [line for line in shown if line != "…" and line not in printed] == []
