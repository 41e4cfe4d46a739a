"""`meshwright profile` as a person meets it."""

import json

import pytest
from quick import quick_compilation

from meshwright.cli.main import main

TINY = (
    "model=mlp",
    "model.widths=[784,16,16,10]",
    "optimizer=sgd",
    "sharding.min_shard_size=0",
    "simulate=8",
    "mesh.fsdp=4",
    "mesh.tensor=2",
    "training.global_batch_size=16",
)


pytestmark = pytest.mark.usefixtures(quick_compilation.__name__)


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(["profile", *words])
        return code, *capfd.readouterr()

    return call


def test_it_tells_and_writes_where_the_time_goes(run, tmp_path):
    code, out, err = run(*TINY, "--steps", "2", "--json")
    assert code == 0, err
    told = json.loads(out)
    written = json.loads((tmp_path / "profile" / "profile.json").read_text())
    assert written == told | {"trace": "trace"}
    assert list((tmp_path / "profile" / "trace").glob("plugins/profile/*/*.xplane.pb"))
    assert told["steps"] == 2
    assert len(told["devices"]) == 8
    assert sum(told["shares"].values()) == pytest.approx(1)
    axes = {axis for c in told["collectives"] for axis in c["axis"].split("×")}
    assert axes == {"fsdp", "tensor"}
    assert all(c["bytes"] for c in told["collectives"])


@pytest.mark.full
def test_scaling_is_measured_beside_what_is_predicted(run):
    mesh = "mesh.fsdp=4", "mesh.tensor=2", "mesh.data=1"
    words = [word for word in TINY if word != "training.global_batch_size=16"]
    code, out, err = run(*words, *mesh, "--scaling", "--steps", "2", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert [each["num_devices"] for each in told["points"]] == [1, 2, 4, 8]
    assert [each["mesh"] for each in told["points"]] == [
        {},
        {"tensor": 2},
        {"fsdp": 2, "tensor": 2},
        {"fsdp": 4, "tensor": 2},
    ]
    first = told["points"][0]
    for each in told["points"]:
        assert each["seconds"] > 0
        assert each["predicted_seconds"] > 0
        per_device = each["per_second"] / each["num_devices"]
        assert each["efficiency"] == pytest.approx(per_device / first["per_second"])
        replicas = each["mesh"].get("fsdp", 1)
        assert each["units"] == first["units"] * replicas


@pytest.mark.parametrize("steps", ["0", "many"])
def test_a_wrong_number_of_steps_is_refused(run, steps):
    code, _, err = run(*TINY, "--steps", steps)
    assert code == 2
    assert f"--steps {steps} is not valid" in err


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_compiled(run, tmp_path):
    (tmp_path / "taken").write_text("a file")
    code, _, err = run(*TINY, "--out", "taken")
    assert code == 2
    assert "cannot write a trace to taken/trace" in err
    assert "compiling" not in err
