"""Draws docs/speed.svg: training speed on one GPU beside that of transformers, from the record.

python benchmarks/chart.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "benchmarks" / "results" / "gpu_peers.json"
CHART = ROOT / "docs" / "speed.svg"

NAMES = {
    "gpt2": "GPT-2 124M",
    "gpt2_medium": "GPT-2 355M",
    "gemma3_1b": "Gemma 3 1B",
    "llama3_1b": "Llama 3 1B",
    "gemma2_2b": "Gemma 2 2B",
    "vit_b": "ViT-B/16",
    "resnet50": "ResNet-50",
}
WIDTH, TOP, ROW, LEFT, UNIT = 760, 64, 40, 120, 330
OURS, PEER, INK, FAINT = "#2f6fdf", "#b9bec8", "#24292f", "#6b7280"


def main() -> None:
    CHART.write_text(chart(json.loads(RECORD.read_text())))


def chart(record: dict[str, Any]) -> str:
    """Return the chart: two bars for each model, the peer's of length one."""
    rows = [row for row in record["rows"] if "transformers" in row]
    height = TOP + ROW * len(rows) + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
        _text(16, 26, f"Training speed on one {record['gpu']}, sustained", INK, 15, weight=600),
        *_legend(),
    ]
    for number, row in enumerate(rows):
        lines += _row(row, TOP + ROW * number)
    foot = f"{record['versions']['note'].removeprefix('peer: ')} · {record['date']}"
    lines += [_text(16, height - 12, foot, FAINT, 11), "</svg>"]
    return "\n".join(lines) + "\n"


def _legend() -> list[str]:
    return [
        f'<rect x="{LEFT}" y="40" width="10" height="10" fill="{OURS}"/>',
        _text(LEFT + 16, 50, "Meshwright", FAINT, 12),
        f'<rect x="{LEFT + 110}" y="40" width="10" height="10" fill="{PEER}"/>',
        _text(LEFT + 126, 50, "transformers + torch.compile", FAINT, 12),
        _text(WIDTH - 16, 50, "peak memory, of the peer's", FAINT, 12, anchor="end"),
    ]


def _row(row: dict[str, Any], top: int) -> list[str]:
    ours, unit = row["meshwright"], row["unit"]
    speed = f"{row['ratio']:.2f}× · {ours[unit + '_per_second']:,} {unit}/s"
    return [
        _text(LEFT - 10, top + 20, NAMES[row["case"]], INK, 13, anchor="end"),
        f'<rect x="{LEFT}" y="{top + 3}" width="{UNIT * row["ratio"]:.1f}" height="16" rx="2" '
        f'fill="{OURS}"/>',
        f'<rect x="{LEFT}" y="{top + 21}" width="{UNIT}" height="8" rx="2" fill="{PEER}"/>',
        _text(LEFT + UNIT * row["ratio"] + 8, top + 16, speed, INK, 12),
        _text(WIDTH - 16, top + 20, f"{row['memory_ratio']:.0%}", INK, 12, anchor="end"),
    ]


def _text(
    x: float, y: float, words: str, color: str, size: int, *, anchor: str = "start",
    weight: int = 400,
) -> str:  # fmt: skip
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" fill="{color}" font-size="{size}" '
        f'font-weight="{weight}" text-anchor="{anchor}">{words}</text>'
    )


if __name__ == "__main__":
    main()
