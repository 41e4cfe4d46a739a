"""Training in two real processes of two devices each: resumed bit for bit, on any other layout."""

import json
from pathlib import Path

import jax
import numpy as np
from real_processes import run_processes
from trainer.trained_in_processes import DATA, HELD_OUT, trainer

PROGRAM = Path(__file__).with_name("trained_in_processes.py").read_text()


def test_two_processes_resume_bit_for_bit_and_one_process_goes_on(tmp_path):
    said = run_processes(PROGRAM, [str(tmp_path)], count=2)
    assert said[0] == said[1]
    assert said[0]["parts"] == said[0]["whole"]
    assert said[0]["same"]
    assert all(said[0]["same"])
    assert said[0]["eval"][0] == said[0]["eval"][1]
    # The last 5 of 37 samples do not divide over the mesh.
    error = (np.asarray(said[0]["predicted"]) - HELD_OUT["x"][:, ::-1]) ** 2
    assert said[0]["samples"] == 37
    np.testing.assert_allclose(said[0]["eval"][0], error.mean(), rtol=1e-6)
    assert "a list_iterator cannot feed 2 processes" in said[0]["iterable"]
    lines = (tmp_path / "parts/events.jsonl").read_text().splitlines()
    assert [e["step"] for e in map(json.loads, lines) if e["kind"] == "resume"] == [2]
    # One process on other devices reads what two wrote, and goes on with the same samples.
    alone = trainer("data=2", devices=jax.devices()[:2]).fit(
        DATA,
        steps=4,
        batch_size=8,
        run_dir=tmp_path / "alone",
        resume=str(tmp_path / "parts/checkpoints/2"),
    )
    np.testing.assert_allclose(list(alone.losses.values()), said[0]["whole"][2:], rtol=1e-5)
