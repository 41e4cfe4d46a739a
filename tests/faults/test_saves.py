"""Rows 5, 8 and 13: saves that fail, checkpoints that are damaged, and full disks."""

import re
import shutil

import pytest
from faults.harness import RUN, checkpoints, launch, metrics, read_all

from meshwright.drill.fault_makers import IN_CHECKPOINT

pytestmark = [pytest.mark.full, pytest.mark.faults]

SLOWLY = "time.sleep(1 if step >= 5 else 0)"
"""A step is longer than a save."""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_background_save_that_raises_ends_the_run_by_the_next_step(tmp_path, undisturbed, rank):
    own = f"""
        from meshwright.checkpoint import store

        write = store.CheckpointStore._write

        def fail(self, state, metadata, loss):
            if metadata.step == 6 and RANK == {rank} and once("failed"):
                raise OSError(5, "Input/output error")
            write(self, state, metadata, loss)

        store.CheckpointStore._write = fail
    """
    failed = launch(tmp_path, own=own, code=SLOWLY, steps=100).finish()
    assert failed.code == 1, failed.err
    assert failed.first_error == f"[{rank}] error: the state after 6 steps could not be saved"
    assert "Input/output error; a checkpoint takes up to" in failed.err
    assert "resume from the previous checkpoint" in failed.err
    assert re.search(rf"launch: process {rank} ended with exit code 1 at step [78]: ", failed.err)
    assert failed.seconds_between(r"train +6/", "^launch: process") < 20
    assert max(metrics(failed.run)) <= 7
    assert max(checkpoints(failed.run)) == 3
    read_all(failed.run)
    again = launch(tmp_path, own=own).finish()
    assert again.code == 0, again.err
    assert "continuing after step 3" in again.err
    undisturbed().check_same(again)


FULL = """
    import resource
    from meshwright.checkpoint import store

    write = store.CheckpointStore._write

    def write_to_a_full_disk(self, state, metadata, loss):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if metadata.step == 6 and once(f"full{RANK}"):
            # No file may become larger than this, as on a full disk.
            resource.setrlimit(resource.RLIMIT_FSIZE, (40, before[1]))
        try:
            write(self, state, metadata, loss)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    store.CheckpointStore._write = write_to_a_full_disk
"""


def test_a_disk_that_gets_full_is_told_with_the_bytes_and_the_older_checkpoint_is_intact(
    tmp_path, undisturbed
):
    failed = launch(tmp_path, own=FULL, code=SLOWLY).finish()
    assert failed.code == 1, failed.err
    pattern = r"\[\d\] error: the state after 6 steps could not be saved"
    assert re.fullmatch(pattern, failed.first_error)
    pattern = r"File too large; a checkpoint takes up to [78]\.\d kB, and \S+ \S+ are free in "
    assert re.search(pattern, failed.err), failed.err
    assert checkpoints(failed.run) == [3]
    read_all(failed.run)
    again = launch(tmp_path, own=FULL).finish()
    assert again.code == 0, again.err
    assert "continuing after step 3" in again.err
    undisturbed().check_same(again)


def test_a_disk_without_room_for_a_checkpoint_is_refused_before_the_run(tmp_path):
    own = """
        import shutil

        usage = shutil.disk_usage
        shutil.disk_usage = lambda path: usage(path)._replace(free=1000)
    """
    done = launch(tmp_path, own=own).finish()
    assert done.code == 2, done.err
    assert done.first_error.endswith(f"error: there is no room for a checkpoint in {done.run}")
    assert re.search(r"it takes 7\.\d kB, and 1.0 kB are free", done.err)
    assert "train  1/" not in done.err


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("flipped-byte", "state/"),
        ("truncated-shard", "state/"),
        ("no-metadata", "passport/metadata"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(
    tmp_path, undisturbed, fault, name
):
    run = shutil.copytree(undisturbed().run, tmp_path / RUN)
    last, before = 10, 9
    assert checkpoints(run) == [before, last]
    IN_CHECKPOINT[fault](run / "checkpoints" / str(last))
    words = (f"resume={run}/checkpoints/{last}", "hydra.run.dir=other")
    asked = launch(tmp_path, words=words).finish()
    assert asked.code == 2, asked.err
    assert f"checkpoints/{last} is damaged" in asked.first_error
    again = launch(tmp_path).finish()
    assert again.code == 0, again.err
    warning = f"warning: the checkpoint {run}/checkpoints/{last} is damaged ("
    assert again.err.count(warning) == 1
    found = again.err.partition(warning)[2].partition("); it was renamed")[0]
    assert name in found, found
    assert f"it was renamed to {last}.damaged, and the run resumes from an earlier one" in again.err
    assert f"continuing after step {before}, from" in again.err
    undisturbed().check_same(again)
