"""Checkpoints on disk: what is kept, what is refused, and what they hold."""

import shutil
import sys
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint._src.serialization import replica_slices
from safetensors.numpy import load_file

from meshwright.checkpoint import (
    CheckpointMetadata,
    CheckpointReader,
    CheckpointStore,
    export_safetensors,
    find_store,
    read_params,
)
from meshwright.checkpoint import store as store_module
from meshwright.checkpoint.damage import DamagedCheckpoint
from meshwright.cli.main import main
from meshwright.errors import UserError

pytestmark = pytest.mark.quick


def state(value):
    return {
        "params": {"up.kernel": np.full((2, 3), value, np.float32)},
        "counters": {"step": np.asarray(value, np.int32)},
    }


def save(store, step, loss=None):
    store.save(state(step), CheckpointMetadata(step=step, seed=1, global_batch_size=8), loss=loss)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with the checkpoints 3, 4 (the newest two) and 2 (the best)."""
    run = tmp_path_factory.mktemp("saved") / "run"
    store = CheckpointStore(run / "checkpoints", keep_last=2, keep_best=1)
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.3), (4, None)):
        save(store, step, loss)
    assert store.close().error is None
    return run


@pytest.fixture
def folder(saved, tmp_path):
    """The same run, to be changed."""
    return shutil.copytree(saved, tmp_path / "run")


def test_the_newest_and_the_best_are_kept(folder):
    store = CheckpointReader(folder / "checkpoints")
    assert store.steps() == [2, 3, 4]
    assert (store.latest(), store.best()) == (4, 2)
    assert store.metadata(3) == CheckpointMetadata(step=3, seed=1, global_batch_size=8)
    assert store.shapes(2) == {"params": {"up.kernel": (2, 3)}, "counters": {"step": ()}}
    restored = store.restore(3, state(0))
    np.testing.assert_array_equal(restored["params"]["up.kernel"], np.full((2, 3), 3))


def test_large_arrays_are_in_several_files_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "FILE_BYTES", 1 << 14)
    large = {"params": {"up": np.arange(1 << 16, dtype=np.float32).reshape(256, 256)}}
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(large, CheckpointMetadata(step=1, seed=1, global_batch_size=8))
    assert store.close().error is None
    sizes = [f.stat().st_size for f in tmp_path.rglob("d/*") if f.stat().st_size > 1 << 13]
    assert len(sizes) > 4
    # These numbers could be compressed to a part of that.
    assert sum(sizes) >= large["params"]["up"].nbytes
    found = CheckpointReader(tmp_path / "checkpoints").restore(1, large)
    np.testing.assert_array_equal(found["params"]["up"], large["params"]["up"])


def test_arrays_are_not_copied_to_page_locked_memory_on_gpus(tmp_path, monkeypatch):
    copied, copy = [], replica_slices.transfer_arrays_to_host

    def to_host(*args, **options):
        copied.append(options.get("enable_pinned_host_transfer", False))
        return copy(*args, **options)

    monkeypatch.setattr(replica_slices, "transfer_arrays_to_host", to_host)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    store = CheckpointStore(tmp_path / "run/checkpoints")
    store.save(
        {"params": {"up": jnp.ones((8, 128))}},
        CheckpointMetadata(step=1, seed=1, global_batch_size=8),
    )
    assert store.close().error is None
    assert copied == [False]


def test_only_a_save_that_is_waited_for_copies_several_arrays_at_a_time(tmp_path, monkeypatch):
    waited = []

    def noting(state, awaited):
        waited.append(awaited.wait(state["seconds"]))

    monkeypatch.setattr(store_module, "_bring_to_host", noting)
    store = CheckpointStore(tmp_path / "checkpoints")
    monkeypatch.setattr(store, "_write", lambda *_: None)
    metadata = CheckpointMetadata(step=1, seed=1, global_batch_size=8)
    store.save({"seconds": 60}, metadata)
    assert store.wait().error is None
    store.save({"seconds": 0}, metadata)
    while store.finished() is None:
        pass
    assert waited == [True, False]
    store.close()


def test_few_bytes_are_on_their_way_to_the_host(monkeypatch):
    done = []

    class Shard:
        replica_id, nbytes = 0, 8

        def __init__(self, name):
            self.data, self.name = self, name

        def copy_to_host_async(self):
            done.append(f"begin {self.name}")

    class Fake(SimpleNamespace):
        pass

    def end(shard):
        done.append(f"end {shard.name}")
        return shard

    monkeypatch.setattr(store_module.jax, "Array", Fake)
    monkeypatch.setattr(store_module, "np", SimpleNamespace(asarray=end))
    monkeypatch.setattr(store_module, "IN_FLIGHT_BYTES", 16)
    state = [Fake(addressable_shards=[Shard(name)]) for name in "abcd"]
    awaited = threading.Event()
    store_module._bring_to_host(state, awaited)
    assert done == [f"{verb} {name}" for name in "abcd" for verb in ("begin", "end")]
    done.clear()
    awaited.set()
    store_module._bring_to_host(state, awaited)
    assert done == [
        *("begin a", "begin b", "begin c", "end a", "begin d"),
        *("end b", "end c", "end d"),
    ]


def test_replicas_in_one_process_are_copied_to_the_host_once(tmp_path, monkeypatch):
    mesh = jax.make_mesh((8,), ("data",))
    array = jax.device_put(jnp.ones((1024, 2048)), NamedSharding(mesh, PartitionSpec()))
    read, slices = [], replica_slices.ReplicaSlice.data
    monkeypatch.setattr(
        replica_slices.ReplicaSlice,
        "data",
        lambda self: read.append(self.unsliced_data) or slices(self),
    )
    store = CheckpointStore(tmp_path / "checkpoints")
    metadata = CheckpointMetadata(step=1, seed=1, global_batch_size=8)
    store.save({"params": {"w": array}}, metadata)
    assert store.close().error is None
    (first,) = (each for each in read if isinstance(each, jax.Array))
    assert first is array.addressable_shards[0].data


def test_saving_small_arrays_of_replicas_compiles_nothing(tmp_path, caplog):
    mesh = jax.make_mesh((8,), ("data",))
    values = jnp.arange(37 * 8, dtype=jnp.float32).reshape(37, 8)
    held = {"params": {"w": jax.device_put(values, NamedSharding(mesh, PartitionSpec()))}}
    store = CheckpointStore(tmp_path / "checkpoints")
    jax.config.update("jax_log_compiles", True)
    try:
        store.save(held, CheckpointMetadata(step=1, seed=1, global_batch_size=8))
        assert store.close().error is None
    finally:
        jax.config.update("jax_log_compiles", False)
    assert "Compiling" not in caplog.text
    restored = CheckpointReader(tmp_path / "checkpoints").restore(1, held)
    np.testing.assert_array_equal(restored["params"]["w"], values)


def test_parameters_are_read_and_exported(folder, tmp_path, capfd):
    np.testing.assert_array_equal(read_params(folder)["up.kernel"], np.full((2, 3), 4))
    np.testing.assert_array_equal(
        read_params(folder / "checkpoints/2")["up.kernel"], np.full((2, 3), 2)
    )
    export_safetensors(folder, tmp_path / "model.safetensors", step=3)
    (name, array), *_ = load_file(tmp_path / "model.safetensors").items()
    assert name == "up.kernel"
    np.testing.assert_array_equal(array, np.full((2, 3), 3))
    assert main(["export", str(folder), str(tmp_path / "again.safetensors")]) == 0
    assert "1 tensors, 6 parameters" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "out"], "there is no folder"),
        (["{folder}", "out", "--step", "7"], "there is no checkpoint of step 7"),
        (["{folder}", "out", "--step", "x"], "--step x is not valid"),
        (["{folder}"], "export takes a run and a file"),
        (["{folder}/..", "out"], "there is no checkpoint in"),
    ],
)
def test_what_cannot_be_exported(folder, words, message, capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["export", *(word.format(folder=folder) for word in words)]) == 2
    assert message in capfd.readouterr().err


def test_a_run_its_checkpoints_and_one_of_them_are_found(folder):
    store = folder / "checkpoints"
    assert find_store(folder) == find_store(store) == (store, None)
    assert find_store(store / "3") == (store, 3)


def test_a_checkpoint_that_is_damaged_is_named(folder):
    for file in (folder / "checkpoints/4/passport").rglob("*"):
        if file.is_file():
            file.write_text("{")
    with pytest.raises(DamagedCheckpoint, match="checkpoints/4 is damaged\npassport: "):
        CheckpointReader(folder / "checkpoints").metadata(4)


def test_a_save_that_is_cut_off_leaves_no_checkpoint(folder):
    # What a killed process leaves: a temporary folder without its final name.
    (folder / "checkpoints/5.orbax-checkpoint-tmp-1/state").mkdir(parents=True)
    assert CheckpointReader(folder / "checkpoints").latest() == 4
    store = CheckpointStore(folder / "checkpoints")
    save(store, 5)
    assert store.close().error is None
    assert not list((folder / "checkpoints").glob("*tmp*"))


def test_an_old_checkpoint_of_which_a_part_is_deleted_is_not_listed(folder, monkeypatch):
    checkpoints = folder / "checkpoints"
    store = CheckpointStore(checkpoints, keep_last=1)
    with monkeypatch.context() as killed:
        # The process is killed when it has deleted one file.
        killed.setattr(
            "meshwright.checkpoint.store.shutil.rmtree",
            lambda path, **_: next(path.rglob("*metadata")).unlink(),
        )
        save(store, 5)
        store.close()
    assert (checkpoints / "deleted").is_dir()
    assert CheckpointReader(checkpoints).steps() == [5]
    again = CheckpointStore(checkpoints, keep_last=1)
    assert {path.name for path in checkpoints.iterdir()} == {"5"}
    again.close()


def test_a_save_that_fails_is_told_and_the_next_is_tried(folder, monkeypatch):
    store = CheckpointStore(folder / "checkpoints")

    def refuse(*_, **__):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store._manager, "save", refuse)
        save(store, 6)
        assert "no space left" in str(store.wait().error)
    save(store, 7)
    assert store.close().error is None
    assert 7 in CheckpointReader(folder / "checkpoints").steps()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write checkpoints"):
        CheckpointStore(tmp_path / "file/checkpoints")


def test_every_shard_is_saved_however_threads_take_turns(tmp_path):
    sharding = NamedSharding(jax.make_mesh((8,), ("fsdp",)), PartitionSpec("fsdp"))
    make = jax.jit(lambda: [jnp.arange(32.0) + n for n in range(60)], out_shardings=sharding)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        store = CheckpointStore(tmp_path / "checkpoints", keep_last=9)
        for step in range(1, 4):
            arrays = {"params": {f"w{n}": array for n, array in enumerate(make())}}
            store.save(arrays, CheckpointMetadata(step=step, seed=1, global_batch_size=8))
            assert store.wait().reason == ""
        store.close()
    finally:
        sys.setswitchinterval(interval)
    for step in range(1, 4):
        for name, array in read_params(tmp_path, step=step).items():
            np.testing.assert_array_equal(array, np.arange(32.0) + int(name[1:]))
