"""The compilation cache between runs: a second run compiles nothing, and knows as much."""

import json
import os
import subprocess
import sys

import pytest
from quick import quick_module

from meshwright.cli.main import main

__all__ = ["quick_module"]
# tests/compiled/test_disk_cache.py shows the same in one process.
pytestmark = [pytest.mark.full, pytest.mark.usefixtures("quick_module")]

COUNTED = """
import collections, json, sys
import jax, pytest
from meshwright.cli.main import main
from meshwright.mesh.simulate import simulate_devices
from quick import compile_quickly

simulate_devices(8)
compile_quickly(pytest.MonkeyPatch())

events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.split("/")[-1]]))
code = main(sys.argv[2:])
json.dump(events, open(sys.argv[1], "w"))
sys.exit(code)
"""
NAMES = ("first", "second")
SETTINGS = (
    "model=mlp",
    "model.widths=[784,32,10]",
    "mesh.fsdp=8",
    "training.global_batch_size=8",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs in two processes, with one cache."""
    folder = tmp_path_factory.mktemp("cached")
    for name in NAMES:
        command = [*SETTINGS, f"compilation_cache={folder / 'programs'}"]
        command += ["training.steps=2", "training.eval_batches=1", "checkpoint.enabled=false"]
        command.append(f"hydra.run.dir={folder / name}")
        subprocess.run(
            [sys.executable, "-c", COUNTED, str(folder / f"{name}.json"), "train", *command],
            check=True,
            capture_output=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    return folder


def ledger_of(text):
    """A ledger as JSON, without what depends on the clock."""
    values = json.loads(text)
    assert values.pop("compile_seconds") >= 0
    return {name: values[name] for name in ("mesh", "sent_bytes", "axes", "lines", "temp_bytes")}


def test_the_second_run_compiles_nothing_and_trains_the_same(runs):
    first, second = (json.loads((runs / f"{n}.json").read_text()) for n in NAMES)
    assert first["cache_misses"] > 10
    assert "cache_misses" not in second
    assert second["cache_hits"] == second["compile_requests_use_cache"] >= first["cache_misses"]
    losses = [json.loads((runs / n / "result.json").read_text())["final_loss"] for n in NAMES]
    assert losses[0] == losses[1]


def test_commands_show_the_same_ledger_from_the_cache(runs, own_disk_cache, capfd):
    def shown(*command):
        capfd.readouterr()
        assert main([*command]) == 0
        return capfd.readouterr().out

    expected = ledger_of(shown("ledger", *SETTINGS, "--json"))
    assert {own["overlapped"] for own in expected["axes"].values()} == {None}
    seen = shown("inspect", *SETTINGS)
    for name in NAMES:
        assert ledger_of((runs / name / "ledger.json").read_text()) == expected
    cached = f"compilation_cache={runs / 'programs'}"
    assert ledger_of(shown("ledger", *SETTINGS, cached, "--json")) == expected
    assert shown("inspect", *SETTINGS, cached) == seen
    tables = []
    for name in NAMES:
        shown("report", str(runs / name))
        page = (runs / name / "report.html").read_text()
        reported = json.JSONDecoder().raw_decode(page.partition('"ledger": ')[2])[0]
        reported["compile_seconds"] = 0
        tables.append(reported)
    assert tables[0]["axes"]
    assert tables[0] == tables[1]
