"""The examples run as they are, print what they promise, and agree with one device."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from quick import quick_module

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LIMIT_SECONDS = 240

PRINTED = {
    "accumulation": ("largest difference from the whole batch at once", 1),
    "data_parallel": ("8 devices, each with 8 of 64 samples and all 9,610 parameters", 1),
    "fsdp": ("parameters: 168,192 of 1,315,072 bytes on each device, 1/7.8", 1),
    "hybrid": ("fsdp=4,tensor=2 is proven equal to one device", 4),
    "linen": ("a Linen model on fsdp=4,tensor=2", 2),
    "mixed_precision": ("bf16: computes in bfloat16, weights in float32", 0),
    "pipeline": ("4 stages, 8 microbatches: efficiency 73%", 2),
    "several_processes": ("process 0 of 1: 8 of 8 devices, columns 0 to 256 of up.kernel", 0),
    "tensor_parallel": ("the rules agree with what was derived", 2),
    "vae": ("codes (64, 20), mean error of a reconstructed pixel 0", 1),
}
"""A line of each example, and how many differences from one device it prints."""

EVERYDAY = ("several_processes",)


def name_of(path):
    return path.stem


def test_every_example_is_checked_here_and_listed():
    assert {path.stem for path in EXAMPLES} == set(PRINTED)
    listed = (ROOT / "docs" / "examples.md").read_text()
    assert [path.name for path in EXAMPLES if f"examples/{path.name}" not in listed] == []


@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_examples_are_short_and_say_first_what_they_show(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 60
    assert "\nShows " in text.split('"""')[1]


@pytest.mark.parametrize(
    "name", [n if n in EVERYDAY else pytest.param(n, marks=pytest.mark.full) for n in PRINTED]
)
def test_an_example_agrees_with_one_device(name, monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "120")
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    out = capfd.readouterr().out
    line, count = PRINTED[name]
    assert line in out
    found = [float(text) for text in re.findall(r"\b\d\.\de[-+]\d\d\b", differences(out))]
    assert len(found) >= count
    assert all(gap < 2e-5 for gap in found), out


@pytest.mark.full
def test_accumulation_saves_memory_and_fewer_reductions_save_bytes(capfd):
    runpy.run_path(str(ROOT / "examples" / "accumulation.py"), run_name="__main__")
    rows = [line.replace(",", "").split() for line in capfd.readouterr().out.splitlines()[1:5]]
    microbatches, reductions, temporary, sent = ([int(row[n]) for row in rows] for n in range(4))
    assert (microbatches, reductions) == ([1, 4, 4, 4], [1, 4, 2, 1])
    assert all(after < temporary[0] / 2 for after in temporary[1:])
    # Each reduction sends all gradients once more; the loss adds a few bytes.
    assert [round(each / sent[0], 3) for each in sent] == reductions


def differences(out):
    """Return the lines about differences; other precisions may differ more than rounding."""
    return "\n".join(line for line in out.splitlines() if "from float32" not in line)


@pytest.mark.full
def test_a_second_process_changes_nothing(tmp_path):
    script = str(ROOT / "examples" / "several_processes.py")
    launcher = ["-m", "meshwright.launch", "--nprocs=2", "--devices-per-process=4"]
    both = printed([*launcher, script])
    assert "process 0 of 2: 4 of 8 devices, columns 0 to 128 of up.kernel" in both
    assert "process 1 of 2: 4 of 8 devices, columns 128 to 256 of up.kernel" in both
    losses = [re.search(r"loss (\S+) → (\S+)", out).groups() for out in (both, printed([script]))]
    for together, alone in zip(*losses, strict=True):
        assert float(together) == pytest.approx(float(alone), rel=1e-5)


def printed(words):
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
