"""What users read while they wait: stages with their times, on a terminal, in a pipe, in Python."""

import io
import json
import re
import time

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from quick import quick_module
from rich.console import Console

import meshwright as mw
from meshwright.cli.main import main
from meshwright.runtime.activity import activity, show_activities
from meshwright.tracking.progress import ProgressTracker

__all__ = ["quick_module"]
pytestmark = pytest.mark.usefixtures("quick_module")


@pytest.fixture(autouse=True)
def mention_everything(monkeypatch):
    monkeypatch.setattr("meshwright.runtime.activity.MENTIONED_SECONDS", 0.0)


@pytest.fixture
def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=60, highlight=False)


def stages(err: str) -> list[str]:
    return [line.partition(" … ")[0] for line in err.splitlines() if " … " in line]


def test_a_command_in_a_pipe_says_its_stages_on_stderr(capfd):
    assert main(["ledger", "model=mlp", "model.widths=[784,16,10]", "mesh.fsdp=8", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["mesh"] == {"fsdp": 8}
    assert stages(err) == [
        "starting JAX", "reading the data", "tracing the loss", "compiling the step"
    ]  # fmt: skip
    assert all(line.endswith(" s") for line in err.splitlines())
    assert "\x1b" not in err


@pytest.mark.parametrize(("progress", "shown"), [(True, True), (False, False), (None, False)])
def test_fit_says_its_stages_unless_it_is_quiet(progress, shown, capfd):
    trainer = mw.Trainer(
        model=lambda rngs: nnx.Linear(4, 4, rngs=rngs),
        loss=lambda model, batch: (model(batch) ** 2).mean(),
        optimizer=optax.sgd(0.1),
    )
    trainer.fit([np.ones((8, 4), np.float32)], steps=1, progress=progress)
    expected = ["tracing the loss", "compiling the step", "initializing the state"]
    assert stages(capfd.readouterr().err) == (expected if shown else [])


def test_a_terminal_shows_one_live_line_and_keeps_the_time(terminal):
    with show_activities(terminal), activity("compiling the step"):
        time.sleep(0.3)
        with activity("a part of it"):
            pass
    written = terminal.file.getvalue()
    assert "compiling the step … 0." in written
    assert "a part of it" not in written
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1
    # The live line is erased, and the last thing written is the whole time.
    assert written.split("\x1b[2K")[-1].count("compiling the step … 0.") == 1


def test_a_long_activity_in_a_pipe_says_that_it_goes_on(monkeypatch, capsys):
    monkeypatch.setattr("meshwright.runtime.activity.STILL_SECONDS", 0.02)
    with show_activities(), activity("compiling the step"):
        time.sleep(0.3)
    *still, last = capsys.readouterr().err.splitlines()
    assert 1 <= len(still) <= 4
    assert all(line.endswith(" s so far") for line in still)
    assert last.startswith("compiling the step … 0.3")


def test_a_failed_activity_leaves_the_word_to_its_error(capsys):
    with show_activities(), pytest.raises(OSError, match="full"), activity("saving"):
        raise OSError("the disk is full")
    with show_activities(), activity("saving again"):
        pass
    assert stages(capsys.readouterr().err) == ["saving again"]


def test_the_progress_bar_shows_what_a_step_waits_for(terminal, tmp_path):
    tracker = ProgressTracker(terminal, tmp_path, total_steps=2)
    with show_activities(terminal):
        tracker.start({})
        with activity("initializing the state"), terminal.capture() as captured:
            terminal.print(tracker.render())
        tracker.close({})
    assert "initializing the state … 0.0 s" in captured.get()
    # No second live line fights with the bar for the cursor.
    assert terminal.file.getvalue().count("\x1b[?25l") == 1


def test_a_long_evaluation_says_how_far_it_is(monkeypatch, capfd):
    monkeypatch.setattr("meshwright.runtime.activity.STILL_SECONDS", 0.001)

    class Slow:
        """Samples that take a while to read."""

        def __len__(self):
            return 40

        def rows(self, ids):
            time.sleep(0.1)
            return {"x": np.ones((len(ids), 4), np.float32)}

    trainer = mw.Trainer(
        model=lambda rngs: nnx.Linear(4, 4, rngs=rngs),
        loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
        optimizer=optax.sgd(0.1),
        devices=jax.devices()[:1],
    )
    data = {"x": np.ones((8, 4), np.float32)}
    trainer.fit(data, steps=0, batch_size=8, eval_data=Slow(), progress=True)
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("evaluating")]
    assert told
    # While it goes on only: its metrics say that it is over.
    pattern = r"evaluating(?:, (0|8|16|24|32|40) of 40 samples)? … .* so far"
    counts = [re.fullmatch(pattern, line)[1] for line in told]
    # A line before the first samples has no count.
    assert counts == sorted(counts, key=lambda count: int(count or 0)), told
    assert any(counts), told
