"""Measures training on a JSON Lines file that is larger than the memory a process may take.

Two processes of one run train on the file; the largest memory of each is read from /proc. Then: a
second run, which finds the tokens in the cache; two runs that start at once, of which one writes
them; and writers that are killed at random times, after which another process must arrive at the
same bytes. The speed of tokenizing is compared with a bare loop over `tokenizers`, which gets its
texts from memory and writes nothing.

    python benchmarks/data_scale.py --gib 4     # the recorded size; a quarter by default
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from record import verdict, write_record
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from meshwright.data.record_formats import JsonLines

GIB, MIB = 2**30, 2**20
MAX_BYTES = GIB
"""The most memory a process may take."""
SPEED_MIB, KILL_MIB, SHARED_MIB = 12, 6, 256
"""How much of the file is read to measure the speed, by writers that are killed, and by two runs
that start at once."""
KILLS = 10
MIN_RATIO = 0.8
"""The least speed, as a part of that of the bare loop."""
TRAIN = (
    "model=gpt2_nano", "model.vocab_size=4096", "data=jsonl", "training.steps=20",
    "training.global_batch_size=8", "training.eval_batches=2", "training.sample_tokens=0",
)  # fmt: skip

WRITER = """
import sys
from meshwright.data import token_cache
from meshwright.data.record_formats import JsonLines
token_cache.NOTE_SECONDS = 0.1
path, tokenizer, cache = sys.argv[1:]
JsonLines(path=path, tokenizer=tokenizer, cache_dir=cache, sequence_length=128).source()
"""


def write_corpus(path: Path, size: int) -> None:
    """Write records of words with the frequencies of a language, in ever new orders."""
    generator = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwygpbvk"))
    words = ["".join(generator.choice(letters, n)) for n in generator.integers(2, 10, 20_000)]
    ranks = np.minimum(generator.zipf(1.3, 6_000_000) - 1, len(words) - 1)
    ends = np.cumsum(generator.geometric(1 / 150, 40_000))
    texts = (" ".join(map(words.__getitem__, part)) for part in np.split(ranks, ends) if len(part))
    lines = [json.dumps({"text": text, "source": "generated"}).encode() + b"\n" for text in texts]
    with open(path, "wb") as file:
        while file.tell() < size:
            shuffled = generator.permutation(len(lines))[: (size - file.tell()) // 500 + 1]
            file.write(b"".join(lines[number] for number in shuffled))


def train_tokenizer(path: Path, corpus: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(some_texts(corpus, 4 * MIB), trainer)
    tokenizer.save(str(path))


def some_texts(corpus: Path, size: int) -> Iterator[str]:
    with open(corpus, "rb") as lines:
        while lines.tell() < size and (line := lines.readline()):
            yield json.loads(line)["text"]


def speeds(corpus: Path, tokenizer: Path, folder: Path) -> dict[str, Any]:
    """Return the speed of tokenizing, of a bare loop, and their ratio, in turns."""
    part = first_lines(corpus, folder, SPEED_MIB)
    texts = list(some_texts(part, part.stat().st_size))
    library = Tokenizer.from_file(str(tokenizer))
    ours: list[float] = []
    bare: list[float] = []
    for turn in range(3):
        started = time.perf_counter()
        for begin in range(0, len(texts), 1024):
            for one in library.encode_batch(texts[begin : begin + 1024], add_special_tokens=False):
                assert one.ids is not None
        bare.append(time.perf_counter() - started)
        cache = folder / f"speed{turn}"
        started = time.perf_counter()
        JsonLines(
            path=str(part), tokenizer=str(tokenizer), cache_dir=str(cache), sequence_length=128
        ).source()
        ours.append(time.perf_counter() - started)
        shutil.rmtree(cache)
    size = part.stat().st_size / 1e6
    return {
        "mb_per_second": round(size / min(ours), 2),
        "bare_mb_per_second": round(size / min(bare), 2),
        "ratio": round(min(bare) / min(ours), 3),
    }


def start(folder: Path, name: str, corpus: Path, *, processes: int = 1) -> subprocess.Popen[str]:
    launch = ["launch", "--nprocs", str(processes), "--devices-per-process", "1", "--"]
    return subprocess.Popen(
        [sys.executable, "-m", "meshwright", *(launch if processes > 1 else []), "train", *TRAIN,
         f"data.path={corpus}", f"data.cache_dir={folder / 'cache'}",
         f"hydra.run.dir={folder / name}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


def watch(process: subprocess.Popen[str], started: float | None = None) -> dict[str, Any]:
    """Wait for a run; return its time, and the most memory of each of its training processes."""
    started, peaks = started or time.perf_counter(), dict[int, dict[str, int]]()
    while process.poll() is None:
        for pid in descendants(process.pid):
            for name, value in memory_of(pid).items():
                peak = peaks.setdefault(pid, {})
                peak[name] = max(peak.get(name, 0), value)
        time.sleep(0.1)
    assert process.returncode == 0, process.communicate()[1]
    # A launcher does not import JAX, and takes a fraction of that memory.
    training = [p for p in peaks.values() if p.get("VmHWM", 0) > 150 * MIB]
    return {
        "seconds": round(time.perf_counter() - started, 1),
        "peak_mib": [round(p["VmHWM"] / MIB) for p in training],
        "peak_anonymous_mib": [round(p["RssAnon"] / MIB) for p in training],
    }


def descendants(pid: int) -> list[int]:
    found, queue = [], [pid]
    while queue:
        found.append(queue.pop())
        try:
            text = Path(f"/proc/{found[-1]}/task/{found[-1]}/children").read_text()
        except OSError:
            continue
        queue += map(int, text.split())
    return found


def memory_of(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = dict(line.split(":", 1) for line in lines)
    return {n: int(fields[n].split()[0]) * 1024 for n in ("VmHWM", "RssAnon") if n in fields}


def entries(cache: Path) -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in cache.rglob("tokens.bin")}


def runs(corpus: Path, folder: Path) -> dict[str, Any]:
    """Train with two processes, then once more."""
    found: dict[str, Any] = {"two processes": watch(start(folder, "first", corpus, processes=2))}
    print(found, flush=True)
    before = entries(folder / "cache")
    found["second run"] = watch(start(folder, "second", corpus, processes=2))
    print(found["second run"], flush=True)
    assert entries(folder / "cache") == before, "the second run wrote tokens"
    shutil.rmtree(folder / "cache")
    return found


def two_at_once(corpus: Path, folder: Path) -> dict[str, Any]:
    """Start two runs on an empty cache."""
    part = first_lines(corpus, folder, SHARED_MIB)
    started = time.perf_counter()
    both = [start(folder, name, part) for name in ("one", "other")]
    found = [watch(process, started) for process in both]
    said = "".join(process.communicate()[1] for process in both).replace(f"{folder}/", "")
    assert len(entries(folder / "cache")) == 1, "both wrote tokens"
    return {
        "seconds": [run["seconds"] for run in found],
        "waiting": next((line for line in said.splitlines() if "by process" in line), ""),
    }


def first_lines(corpus: Path, folder: Path, mib: int) -> Path:
    part = folder / "part.jsonl"
    with open(corpus, "rb") as source, open(part, "wb") as file:
        while file.tell() < mib * MIB and (lines := source.readlines(MIB)):
            file.writelines(lines)
    return part


def kills(corpus: Path, tokenizer: Path, folder: Path) -> dict[str, Any]:
    """Kill writers at random times; compare what the next one arrives at, byte by byte."""
    part = first_lines(corpus, folder, KILL_MIB)

    def writer(cache: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", WRITER, str(part), str(tokenizer), str(cache)]
        return subprocess.Popen(command)

    started = time.perf_counter()
    assert writer(folder / "whole").wait() == 0
    seconds = time.perf_counter() - started
    wanted = next((folder / "whole").rglob("tokens.bin")).parent
    rng, killed, equal, resumed, complete = random.Random(0), 0, 0, 0, 0
    while killed < KILLS:
        cache = folder / f"killed{killed}"
        process = writer(cache)
        time.sleep(rng.uniform(0.2, 1) * seconds)
        process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            shutil.rmtree(cache)
            continue
        killed += 1
        done = (cache / wanted.name).exists()
        resumed += not done and bool(list(cache.rglob("progress.json")))
        complete += done
        assert writer(cache).wait() == 0
        same = filecmp.cmpfiles(
            wanted, cache / wanted.name, ["tokens.bin", "boundaries.bin"], False
        )
        equal += len(same[0]) == 2
        shutil.rmtree(cache)
    return {
        "killed": killed,
        "went_on_from_a_note": resumed,
        "complete_before": complete,
        "equal": equal,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=0.25)
    gib = parser.parse_args().gib
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus, tokenizer = folder / "corpus.jsonl", folder / "tokenizer.json"
        write_corpus(corpus, int(gib * GIB))
        train_tokenizer(tokenizer, corpus)
        print(f"{corpus.stat().st_size:,} bytes written", flush=True)
        found = runs(corpus, folder)
        found["two runs at once"] = two_at_once(corpus, folder)
        found["speed"] = speeds(corpus, tokenizer, folder)
        found["kills"] = kills(corpus, tokenizer, folder)
    record(gib, found)


def record(gib: float, found: dict[str, Any]) -> None:
    for key, value in found.items():
        print(f"{key:20}{value}")
    peak = max(found["two processes"]["peak_mib"]) * MIB
    ratio, equal = found["speed"]["ratio"], found["kills"]["equal"]
    write_record(
        "data_scale",
        {
            "command": f"python benchmarks/data_scale.py --gib {gib:g}",
            "settings": {"gib": gib, "tokens": "bytes in runs, 4096 BPE tokens elsewhere"},
            **found,
            "targets": {
                f"a process takes less than 1 GiB for a file of {gib:g} GiB": verdict(
                    peak, MAX_BYTES
                ),
                f"tokenizing has at least {MIN_RATIO:.0%} of the speed of a bare loop": verdict(
                    ratio, MIN_RATIO, at_most=False
                ),
                "after a writer is killed, the next one writes the same bytes": verdict(
                    equal, KILLS, at_most=False
                ),
            },
        },
    )


if __name__ == "__main__":
    main()
