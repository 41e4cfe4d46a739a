"""Damaged checkpoints: found by every command, named, set aside, and never used again."""

import json
import re
import shutil

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from quick import quick_module

import meshwright as mw
from meshwright.checkpoint import CheckpointReader, read_params
from meshwright.checkpoint.damage import DamagedCheckpoint, reading_error
from meshwright.cli.main import main
from meshwright.errors import UserError
from meshwright.trainer.starting.resume import find_resume_point

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")

ARRAYS = {"x": np.random.default_rng(0).normal(size=(32, 32)).astype("float32")}


def fit(folder, steps=4, mesh="fsdp=8", **settings):
    trainer = mw.Trainer(
        # Large enough for files of its own; small arrays are copied into Orbax's index.
        model=lambda rngs: nnx.Linear(32, 1024, rngs=rngs),
        loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
        optimizer=optax.adam(0.01),
        mesh=mesh,
        log_every=1,
        sharding=mw.ShardingConfig(min_shard_size=0),
    )
    return trainer.fit(
        ARRAYS,
        steps=steps,
        batch_size=16,
        run_dir=folder,
        checkpoint=mw.CheckpointConfig(every=2, keep_last=3),
        eval_data=ARRAYS,
        eval_batches=1,
        eval_every=2,
        progress=False,
        **settings,
    )


@pytest.fixture(scope="module")
def sound(tmp_path_factory, quick_module):
    """A run with the checkpoints 2 and 4."""
    folder = tmp_path_factory.mktemp("sound") / "run"
    fit(folder)
    return folder


@pytest.fixture(scope="module")
def structs(sound):
    """The arrays of its checkpoints, without their values."""
    reader = CheckpointReader(sound / "checkpoints")
    return {
        group: {path: jax.ShapeDtypeStruct(own.shape, own.dtype) for path, own in arrays.items()}
        for group, arrays in reader.read(2, reader.shapes(2)).items()
    }


@pytest.fixture
def run(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "run")


def largest_file(checkpoint):
    files = [file for file in (checkpoint / "state").rglob("*") if file.is_file()]
    return max(files, key=lambda file: file.stat().st_size)


def flip(file, *places):
    content = bytearray(file.read_bytes())
    for place in places or (0.5,):
        content[int(len(content) * place)] ^= 16
    file.write_bytes(bytes(content))


def flip_everywhere(checkpoint):
    for file in (checkpoint / "state/ocdbt.process_0/d").iterdir():
        flip(file, *(part / 100 for part in range(100)))


def events(run, kind):
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [line["message"] for line in lines if line["kind"] == kind]


def test_a_flipped_bit_is_found_by_check_export_and_resume(run, tmp_path, capfd):
    assert main(["check", str(run)]) == 0
    assert "2 checkpoints, 0 damaged" in capfd.readouterr().out
    flip_everywhere(run / "checkpoints/4")
    assert main(["check", str(run), "--json"]) == 1
    first, second = json.loads(capfd.readouterr().out)["checkpoints"]
    assert (first["step"], first["verdict"], first["problem"]) == (2, "sound", "")
    assert (second["step"], second["verdict"]) == (4, "damaged")
    assert first["arrays"] == len(CheckpointReader(run / "checkpoints").checksums(2).arrays)
    # Adam has two moments for each parameter, and there are two counters.
    assert first["bytes"] == 3 * sum(a.nbytes for a in read_params(run, step=2).values()) + 8
    assert "kernel" in second["problem"]
    assert main(["export", str(run), str(tmp_path / "out.safetensors")]) == 2
    assert "checkpoints/4 is damaged" in capfd.readouterr().err
    assert not (tmp_path / "out.safetensors").exists()
    with pytest.raises(DamagedCheckpoint, match="checkpoints/4 is damaged"):
        fit(tmp_path / "new", 6, resume=str(run / "checkpoints/4"))
    assert main(["check", str(run / "checkpoints/2")]) == 0


def test_a_run_goes_on_from_the_newest_sound_one(run, sound, tmp_path):
    flip(largest_file(run / "checkpoints/4"))
    resumed = fit(run, 6)
    whole = fit(shutil.copytree(sound, tmp_path / "whole"), 6)
    assert list(resumed.losses) == [3, 4, 5, 6]
    for own, other in zip(resumed.state.params, whole.state.params, strict=True):
        np.testing.assert_array_equal(np.asarray(own), np.asarray(other))
    (warning,) = [text for text in events(run, "warning") if "damaged" in text]
    assert "checkpoints/4 is damaged (" in warning
    assert "renamed to 4.damaged" in warning
    assert CheckpointReader(run / "checkpoints").steps() == [2, 4, 6]
    assert (run / "checkpoints/4.damaged").is_dir()
    # It is not looked at again.
    fit(run, 7)
    assert len([text for text in events(run, "warning") if "damaged" in text]) == 1


def test_a_loaded_model_is_that_of_the_newest_sound_one(run):
    flip_everywhere(run / "checkpoints/4")
    build = lambda rngs: nnx.Linear(32, 1024, rngs=rngs)  # noqa: E731
    with pytest.warns(UserWarning, match=r"checkpoints/4 is damaged .*that of step 2 instead"):
        model = mw.load_model(run, model=build)
    np.testing.assert_array_equal(model.kernel[...], read_params(run, step=2)["kernel"])
    assert (run / "checkpoints/4").is_dir(), "reading renames nothing"
    for asked in ({"step": 4}, {"run": run / "checkpoints/4"}):
        with pytest.raises(UserError, match="checkpoints/4 is damaged"):
            mw.load_model(**{"run": run, "model": build, **asked})
    flip_everywhere(run / "checkpoints/2")
    with pytest.raises(UserError, match="every checkpoint in") as caught:
        mw.load_model(run, model=build)
    assert "4: " in caught.value.why
    assert "2: " in caught.value.why


def _rename(run, other):
    shutil.rmtree(run / "checkpoints/4")
    shutil.copytree(run / "checkpoints/2", run / "checkpoints/4")


def _copy(run, other):
    shutil.rmtree(run / "checkpoints/4")
    shutil.copytree(other / "checkpoints/4", run / "checkpoints/4")


def _mix(run, other):
    shutil.rmtree(run / "checkpoints/4/passport")
    shutil.copytree(run / "checkpoints/2/passport", run / "checkpoints/4/passport")


def _flip_array_metadata(run, other):
    flip(run / "checkpoints/4/state/array_metadatas/process_0", 0)


@pytest.fixture(scope="module")
def other(tmp_path_factory, sound):
    """The same checkpoints of another run."""
    folder = tmp_path_factory.mktemp("other") / "run"
    fit(folder)
    return folder


@pytest.mark.parametrize(
    ("misplace", "said"),
    [
        (_rename, "it is the checkpoint of step 2 under another number"),
        (_copy, "it is a checkpoint of another run"),
        (_mix, "passport/metadata differs from what was saved"),
        (_flip_array_metadata, "array_metadatas/process_0"),
    ],
)
def test_what_is_not_this_checkpoint_is_found_by_all_alike(
    run, other, tmp_path, capfd, misplace, said
):
    misplace(run, other)
    path = run / "checkpoints/4"
    assert main(["check", str(run), "--json"]) == 1
    assert said in json.loads(capfd.readouterr().out)["checkpoints"][-1]["problem"]
    assert main(["export", str(path), str(tmp_path / "out.safetensors")]) == 2
    assert said in capfd.readouterr().err
    with pytest.raises(DamagedCheckpoint, match="is damaged") as caught:
        mw.load_model(path, model=lambda rngs: nnx.Linear(32, 1024, rngs=rngs))
    assert said in caught.value.why
    point = find_resume_point("auto", run)
    assert (point.step, point.damaged[0].step) == (2, 4)
    assert said in point.damaged[0].problem


def test_a_run_and_its_copy_keep_their_checkpoints(run, tmp_path):
    moved = run.rename(tmp_path / "elsewhere")
    assert main(["check", str(moved)]) == 0
    before = (moved / "run.id").read_text()
    assert list(fit(moved, 5).losses) == [5]
    assert (moved / "run.id").read_text() == before
    # A folder that does not say which run it is takes any.
    (moved / "run.id").unlink()
    assert main(["check", str(moved)]) == 0


def test_on_another_mesh_the_checksums_are_those_of_the_old_one(run):
    assert list(fit(run, 5, mesh="data=2,fsdp=2,tensor=2").losses) == [5]
    flip(largest_file(run / "checkpoints/5"), 0.3)
    assert list(fit(run, 6, mesh="fsdp=2,tensor=4").losses) == [5, 6]


def _damaged_files():
    riskiest = {"_CHECKPOINT_METADATA": "cut off", "passport/metadata": "missing"}
    riskiest |= {"metrics/metrics": "cut off", "checksums/process_0.json": "missing"}
    riskiest |= {"state/_METADATA": "cut off", "state/manifest.ocdbt": "missing"}
    for name, riskier in riskiest.items():
        for how in ("missing", "cut off"):
            usual = how == riskier and name.startswith(("checksums", "state", "passport"))
            yield pytest.param(name, how, marks=() if usual else pytest.mark.full)


@pytest.mark.parametrize(("name", "how"), list(_damaged_files()))
def test_a_file_of_the_checkpoint_is_damaged(run, structs, name, how):
    file = run / "checkpoints/4" / name
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    reader = CheckpointReader(run / "checkpoints")
    assert main(["check", str(run / "checkpoints/4")]) == 1
    with pytest.raises(DamagedCheckpoint):
        reader.metadata(4), reader.shapes(4), reader.restore(4, structs)


def test_a_truncated_shard_is_named(run, capfd):
    files = list((run / "checkpoints/4/state/ocdbt.process_0/d").iterdir())
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert main(["check", str(run), "--json"]) == 1
    problem = json.loads(capfd.readouterr().out)["checkpoints"][1]["problem"]
    # Either a file, or an array that is in it.
    named = r"(state/ocdbt.process_0/d/\w+|(params|optimizer)\.\S+)"
    assert re.match(f"{named} cannot be read: ", problem), problem
    assert "is not valid for value of size" in problem


def test_metadata_that_changed_is_not_believed(run):
    file = run / "checkpoints/4/passport/metadata"
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(DamagedCheckpoint, match="passport/metadata differs from what was saved"):
        CheckpointReader(run / "checkpoints").metadata(4)
    assert list(fit(run, 5).losses) == [3, 4, 5]


def test_if_every_checkpoint_is_damaged_nothing_starts_over(run):
    for step in (2, 4):
        flip(largest_file(run / "checkpoints" / str(step)))
    for _ in range(2):
        with pytest.raises(UserError, match=r"every checkpoint in .* is damaged"):
            fit(run, 6)
    assert main(["check", str(run)]) == 1


def test_an_error_of_the_machine_is_no_damage(tmp_path):
    for error in (PermissionError("no"), ValueError("RESOURCE_EXHAUSTED: out of memory")):
        assert not isinstance(reading_error(tmp_path, 1, error), DamagedCheckpoint)
    assert isinstance(reading_error(tmp_path, 1, ValueError("DATA_LOSS")), DamagedCheckpoint)


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "check takes one run"), (["nowhere"], "there is no folder")],
)
def test_what_cannot_be_checked(words, message, capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["check", *words]) == 2
    assert message in capfd.readouterr().err


@pytest.mark.full
def test_no_flipped_bit_in_any_file_goes_unnoticed_and_changes_an_array(run):
    checkpoint = run / "checkpoints/4"
    reader = CheckpointReader(run / "checkpoints")
    good = reader.read(4, reader.shapes(4))
    for file in sorted(f for f in checkpoint.rglob("*") if f.is_file()):
        content = file.read_bytes()
        for at in (0.0, 0.2, 0.5, 0.8, 0.99):
            if not content:
                continue
            flip(file, at)
            try:
                reader.metadata(4)
                again = reader.read(4, reader.shapes(4))
            except DamagedCheckpoint:
                pass
            else:
                jax.tree.map(np.testing.assert_array_equal, again, good)
            file.write_bytes(content)


def test_checkpoints_that_are_gone_are_missed(sound, tmp_path, capfd):
    shutil.copytree(sound, tmp_path / "run")
    shutil.move(tmp_path / "run/checkpoints", tmp_path / "away")
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    with pytest.raises(UserError, match=r"are gone\n.*it has saved step 2, 4, and none is there"):
        fit(tmp_path / "run", steps=6)
    assert main(["check", str(tmp_path / "run")]) == 2
    assert "are gone" in capfd.readouterr().err
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before
    assert find_resume_point("never", tmp_path / "run") is None
