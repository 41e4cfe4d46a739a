"""Learns sums from rewards, with several seeds and once with shuffled rewards; draws docs/grpo.svg.

Each seed first learns 720 sums from examples, up to the last checkpoint that answers fewer than
half of the held-out sums, and then from rewards alone. Neither has seen what is measured.

    python benchmarks/sums_rewards.py [--seeds 3] [--steps 200] [--folder outputs/sums]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
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
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--folder", help="where runs are kept; those that are there are not repeated"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(asked.folder or temporary).absolute()
        runs = [learn(folder, f"seed {seed}", seed, asked.steps) for seed in range(asked.seeds)]
        names = "grpo.rewards=[sums_rewards:shuffled]"
        control = learn(folder, "shuffled rewards", 0, asked.steps, names)
    least = min(run["after_percent"] for run in runs)
    figures = {"steps": asked.steps, "least_after_percent": least, "runs": runs}
    write_record("sums_rewards", {**figures, "control": control})
    CHART.write_text(chart(read_record("sums_rewards")))


def learn(folder: Path, name: str, seed: int, steps: int, *more: str) -> dict[str, Any]:
    """Learn from rewards, and return how held-out sums were answered on the way."""
    done, own = folder / f"{name}.json", folder / name.replace(" ", "_")
    if done.is_file():
        return json.loads(done.read_text())
    began, first = folder / f"start_{seed}", f"run.seed={seed}"
    every = ("training.steps=240", "checkpoint.every=10", "checkpoint.keep_last=24")
    cost = (
        [0.0, 0.0]
        if (began / "config.yaml").exists()
        else train("sums_start", began, first, *every)
    )
    scores = {step: score(began, step) for step in saved(began) if step >= 100}
    start = max(step for step, share in scores.items() if share < 0.5)
    settings = (first, f"model.init_from={began / 'checkpoints' / str(start)}", *more)
    parts = (
        f"training.steps={steps}",
        f"checkpoint.every={steps // 10}",
        "checkpoint.keep_last=10",
    )
    later = train("sums_grpo", own, *settings, *parts)
    curve = [[0, scores[start]], *([step, score(own, step)] for step in saved(own))]
    run = {
        "name": name,
        "start_step": start,
        "before_percent": round(100 * scores[start], 1),
        "after_percent": round(100 * curve[-1][1], 1),
        "seconds": round(cost[0] + later[0], 1),
        "cpu_seconds": round(cost[1] + later[1], 1),
        "curve": curve,
    }
    done.write_text(json.dumps(run))
    print(json.dumps(run), flush=True)
    return run


def saved(folder: Path) -> list[int]:
    """Return the steps of the checkpoints of a run."""
    return sorted(int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdigit())


def score(folder: Path, step: int) -> float:
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
    right = [a == b for a, b in zip(got.texts, columns["answer"], strict=True)]
    return round(float(np.mean(right)), 4)


def train(experiment: str, folder: Path, *settings: str) -> list[float]:
    """Run a training, and return its seconds and those of processors."""
    command = ("-m", "meshwright", "train", f"+experiment={experiment}", f"hydra.run.dir={folder}")
    paths = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *command, *settings], check=True, env={**os.environ, "PYTHONPATH": paths}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return [time.monotonic() - started, cpu]


def chart(record: dict[str, Any]) -> str:
    """Return the share of right answers by updates, one line for each run."""
    runs = [*record["runs"], record["control"]]
    last = max(step for run in runs for step, _ in run["curve"])
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
    for number, run in enumerate(runs):
        control = run is record["control"]
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
