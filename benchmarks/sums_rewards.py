"""Learns sums from rewards, with several seeds and once with shuffled rewards; draws docs/grpo.svg.

Each seed first learns sums from examples until it is right about a third of the time, and then
from rewards alone. What is measured are sums that neither has seen.

    python benchmarks/sums_rewards.py [--seeds 3] [--steps 800]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import read_record, write_record

HERE = Path(__file__).parent
CHART = HERE.parent / "docs" / "grpo.svg"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 340, 56, 130, 48, 46
COLORS = ("#2f6fdf", "#1f9d76", "#8a5cd1", "#d1782f")
INK, FAINT, GRID = "#24292f", "#6b7280", "#e5e7eb"


def shuffled(completions: list[str], answer: list[str]) -> list[float]:
    """Give the rewards of a group to its completions at random: nothing can be learned from it."""
    right = [float(c == a) for c, a in zip(completions, answer, strict=True)]
    random.Random("".join(completions)).shuffle(right)
    return right


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=800)
    asked = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(asked.seeds):
            start = f"{folder}/start{seed}"
            seconds = train("sums_start", start, f"run.seed={seed}")
            runs.append(learn(f"seed {seed}", start, f"{folder}/seed{seed}", seed, asked.steps))
            runs[-1]["start_seconds"] = round(seconds, 1)
            print(json.dumps(runs[-1] | {"curve": "…"}), flush=True)
        names = ["grpo.rewards=[sums_rewards:shuffled]"]
        control = (f"{folder}/start0", f"{folder}/control", 0, asked.steps)
        runs.append(learn("shuffled rewards", *control, *names))
    write_record("sums_rewards", {"runs": runs})
    CHART.write_text(chart(read_record("sums_rewards")))


def learn(name: str, start: str, folder: str, seed: int, steps: int, *more: str) -> dict[str, Any]:
    """Learn from rewards, and return how held-out sums were answered on the way."""
    settings = (f"run.seed={seed}", f"model.init_from={start}", f"training.steps={steps}", *more)
    # The rewards of the control say nothing, so that the checkpoints are scored afterwards.
    keep = (f"checkpoint.keep_last={steps}", "checkpoint.every=80")
    seconds = train("sums_grpo", folder, *settings, *(keep if more else ()))
    if more:
        curve = [[step, score(folder, step)] for step in range(80, steps + 1, 80)]
    else:
        lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
        curve = [[line["step"], line["reward"]] for line in lines if line["split"] == "eval"]
    first = score(start, None)
    return {"name": name, "seconds": round(seconds, 1), "curve": [[0, first], *curve]}


def score(folder: str, step: int | None) -> float:
    """Return the share of held-out sums that a checkpoint answers exactly."""
    import numpy as np

    import meshwright as mw
    from meshwright.data.order import split_source
    from meshwright.data.prompts import SumSource

    held_out = split_source(SumSource(for_prompts=True), 0.1)[1]
    columns = held_out.rows(np.arange(len(held_out)))
    model = mw.load_model(folder, step=step)
    got = mw.generate(
        model, list(columns["prompt"]), max_new_tokens=4, stop_tokens=[10], batch_size=1024,
        tokenizer=SumSource.tokenizer,
    )  # fmt: skip
    return float(np.mean([a == b for a, b in zip(got.texts, columns["answer"], strict=True)]))


def train(experiment: str, folder: str, *settings: str) -> float:
    """Run a training, and return its seconds."""
    command = ("-m", "meshwright", "train", f"+experiment={experiment}", f"hydra.run.dir={folder}")
    paths = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    started = time.monotonic()
    subprocess.run(
        [sys.executable, *command, *settings], check=True, env={**os.environ, "PYTHONPATH": paths}
    )
    return time.monotonic() - started


def chart(record: dict[str, Any]) -> str:
    """Return the share of right answers by updates, one line for each run."""
    last = max(step for run in record["runs"] for step, _ in run["curve"])
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#ffffff"/>',
        _text(16, 26, "Held-out sums answered exactly, learned from rewards", INK, 15),
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 0.9, 1.0):
        y = _y(share)
        lines.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        lines.append(_text(LEFT - 8, y + 4, f"{share:.0%}", FAINT, anchor="end"))
    below = HEIGHT - BOTTOM + 18
    lines += [
        _text(_x(step, last), below, str(step), FAINT, anchor="middle")
        for step in range(0, last + 1, max(50, last // 6 // 50 * 50))
    ]
    lines.append(_text(WIDTH - RIGHT, HEIGHT - 8, "updates", FAINT, anchor="end"))
    for number, run in enumerate(record["runs"]):
        control = "shuffled" in run["name"]
        color = FAINT if control else COLORS[number % len(COLORS)]
        points = " ".join(f"{_x(s, last):.1f},{_y(v):.1f}" for s, v in run["curve"])
        dashes = ' stroke-dasharray="5 4"' if control else ""
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>'
        )
        row = TOP + 16 + 18 * number
        lines.append(_text(WIDTH - RIGHT + 12, row, run["name"], color))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _x(step: float, last: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / max(last, 1)


def _y(share: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)


def _text(
    x: float, y: float, words: str, color: str, size: int = 12, *, anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" font-size="{size}" '
        f'text-anchor="{anchor}">{words}</text>'
    )


if __name__ == "__main__":
    main()
