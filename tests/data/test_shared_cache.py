"""The cache among processes: one writes, others wait, and what goes wrong with its folder."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from meshwright.cli.main import main
from meshwright.data import build_once
from meshwright.data.build_once import BuildLock
from meshwright.data.record_formats import JsonLines
from meshwright.data.text_source import text_source
from meshwright.runtime import activity

pytestmark = pytest.mark.quick

READ = """
import sys, time, resource
from meshwright.data import documents, record_formats, token_cache
record_formats.BLOCK_BYTES, documents.BATCH_SIZE, token_cache.NOTE_SECONDS = 2000, 2000, 0
real = token_cache.tokenized
def slowly(*arguments):
    for batch in real(*arguments):
        print("batch", flush=True)
        time.sleep(float(sys.argv[3]))
        yield batch
token_cache.tokenized = slowly
record_formats.JsonLines(path=sys.argv[1], cache_dir=sys.argv[2], sequence_length=32).source()
print("done", flush=True)
"""


def read_in_process(path, cache, seconds):
    return subprocess.Popen(
        [sys.executable, "-c", READ, str(path), str(cache), str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
    )


def content(cache):
    return {
        path.name: path.read_bytes()
        for path in Path(cache).rglob("*.bin")
        if path.name in ("tokens.bin", "boundaries.bin")
    }


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "t.jsonl"
    random = np.random.default_rng(0)
    texts = ["x" * int(size) for size in random.integers(1, 200, 300)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_one_process_writes_another_waits_and_takes_over_if_it_is_killed(corpus, tmp_path):
    cache = tmp_path / "cache"
    writer = read_in_process(corpus, cache, 0.05)
    assert [writer.stdout.readline() for _ in range(4)] == ["batch\n"] * 4
    told: list[str] = []
    lock = BuildLock(next(cache.glob("*.lock")))
    assert not lock.acquire()
    assert lock.holder().startswith(f"by process {writer.pid}: ")
    waiting = threading.Timer(0.3, writer.send_signal, [signal.SIGKILL])
    waiting.start()
    with lock.held(told.append):
        assert writer.wait() == -signal.SIGKILL
    assert told[0].startswith(f"by process {writer.pid}: ")
    assert not list(cache.rglob("entry.json"))
    settings = {"path": str(corpus), "sequence_length": 32}
    JsonLines(**settings, cache_dir=str(cache)).source()
    JsonLines(**settings, cache_dir=str(tmp_path / "undisturbed")).source()
    assert content(cache) == content(tmp_path / "undisturbed")
    assert not list(cache.glob("*.partial*"))


@pytest.mark.full
def test_killed_writers_never_change_the_tokens(corpus, tmp_path):
    JsonLines(
        path=str(corpus), sequence_length=32, cache_dir=str(tmp_path / "undisturbed")
    ).source()
    wanted = content(tmp_path / "undisturbed")
    random = np.random.default_rng(1)
    for number in range(5):
        cache = tmp_path / str(number)
        writer = read_in_process(corpus, cache, 0.02)
        writer.stdout.readline()
        time.sleep(random.uniform(0, 0.3))
        writer.kill()
        assert writer.wait() != 0
        # Two at once go on: one of them writes.
        both = [read_in_process(corpus, cache, 0) for _ in range(2)]
        assert [process.wait(timeout=60) for process in both] == [0, 0]
        assert content(cache) == wanted


def test_whoever_waits_reads_who_writes_and_how_far_it_is(corpus, tmp_path, monkeypatch, capfd):
    """The lock of the tokens is held by this process, in place of another."""
    monkeypatch.setattr(activity, "MENTIONED_SECONDS", 0.0)
    monkeypatch.setattr(build_once, "POLL_SECONDS", 0.02)
    settings = {"path": str(corpus), "sequence_length": 32, "cache_dir": str(tmp_path / "cache")}
    tokens = Path(JsonLines(**settings).source().tokens.filename).parent
    shutil.rmtree(tokens)
    lock = BuildLock(tokens.with_suffix(".lock"))
    assert lock.acquire()
    monkeypatch.setattr(build_once, "STATUS_SECONDS", 0.0)
    lock.say("1.2 MiB of 4.0 MiB, 0.1 MiB/s, 28 s left")
    threading.Timer(0.3, lock.release).start()
    with activity.show_activities(), activity.activity("reading the data"):
        JsonLines(**settings).source()
    line = next(x for x in capfd.readouterr().err.splitlines() if x.startswith("reading"))
    # The last that is told is what the process has done itself, once the lock was free.
    assert line.startswith(f"reading the data, tokenizing data.path={corpus}, ")
    assert told_by_waiting(lock) == (
        f"by process {os.getpid()}: 1.2 MiB of 4.0 MiB, 0.1 MiB/s, 28 s left"
    )


def told_by_waiting(lock):
    """Return the first that is told while the lock is held."""
    told: list[str] = []
    assert lock.acquire()
    lock.say("1.2 MiB of 4.0 MiB, 0.1 MiB/s, 28 s left")
    threading.Timer(0.2, lock.release).start()
    with BuildLock(lock.path).held(told.append):
        return told[0]


SMALL = ("model=gpt2_nano", "model.vocab_size=256", "model.context_length=16", "training.steps=1")


def test_a_full_disk_is_told_with_the_bytes_and_leaves_nothing(tmp_path, capfd):
    """A limit on the size of files stands for the end of the disk."""
    corpus, cache = tmp_path / "t.txt", tmp_path / "cache"
    corpus.write_bytes(b"some words\n" * 400_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**21, before[1]))
    try:
        code = main(["train", *SMALL, f"data.path={corpus}", f"data.cache_dir={cache}"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    err = capfd.readouterr().err
    assert code == 1
    assert f"error: the tokens of the data cannot be stored in {cache}\n" in err
    assert "  File too large: about 4.4 MB are needed, and " in err
    assert "data.cache_dir=…" in err
    assert "Traceback" not in err
    assert [path.name for path in cache.iterdir() if path.name != "files"] == []


@pytest.mark.parametrize("named", [True, False])
def test_a_folder_that_cannot_be_written_to(corpus, tmp_path, monkeypatch, capfd, named):
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "cache"
    if named:
        settings = ["data=jsonl", f"data.path={corpus}", f"data.cache_dir={place}"]
        assert main(["train", *SMALL, *settings]) == 2
        err = capfd.readouterr().err
        assert f"error: the tokens of the data cannot be stored in data.cache_dir={place}\n" in err
        assert "  Not a directory: " in err
        return
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    with pytest.warns(UserWarning, match="they go to a temporary folder"):
        source = JsonLines(path=str(corpus), sequence_length=32).source()
    folder = Path(source.tokens.filename).parent
    assert folder.parent.name.startswith("meshwright-tokens-")
    assert source.tokens[0] == ord("x")


def test_a_cache_that_may_only_be_read_is_used(corpus, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    settings = {"path": str(corpus), "cache_dir": str(cache)}
    first = JsonLines(**settings, sequence_length=32).source()

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(BuildLock, "acquire", refuse)
    again = JsonLines(**settings, sequence_length=32).source()
    assert again.fingerprint() == first.fingerprint()
    # The packing of other rows is computed in memory.
    other = JsonLines(**settings, sequence_length=16).source()
    assert len(other) > len(first)
    assert len(list(cache.glob("*rows-of*"))) == 1


def test_the_users_cache_folder_is_the_default(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    source = text_source(path=str(corpus), sequence_length=32)
    folder = tmp_path / "home" / "meshwright" / "tokens"
    assert Path(source.arrays[0].filename).is_relative_to(folder)
    assert not list(folder.glob("*.lock"))
    abandoned = folder / f"{'0' * 32}.partial"
    abandoned.mkdir()
    os.utime(abandoned, (0, 0))
    text_source(path=__file__, sequence_length=32)
    assert not abandoned.exists()
