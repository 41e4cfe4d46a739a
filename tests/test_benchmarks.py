"""The page of benchmarks shows what was measured."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"


def load(name):
    """Import a file of benchmarks/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


page = load("page")
RECORDED = [name for name in page.TABLES if (page.RESULTS / f"{name}.json").exists()]


def test_the_page_is_filled_from_the_records():
    text = page.PAGE.read_text()
    assert re.findall(r"<!-- figures: (\w+) -->", text) == list(page.TABLES)
    assert page.filled(text) == text, "run `python benchmarks/page.py`"


def test_the_chart_is_drawn_from_its_record():
    chart = load("chart")
    drawn = chart.chart(json.loads(chart.RECORD.read_text()))
    assert chart.CHART.read_text() == drawn, "run `python benchmarks/page.py`"


def test_every_benchmark_of_the_page_is_run_by_make():
    lines = (ROOT / "Makefile").read_text()
    assert [name for name in page.TABLES if f"benchmarks/{name}.py" not in lines] == []


@pytest.mark.parametrize("name", RECORDED)
def test_a_record_says_where_when_and_how_it_was_made(name):
    record = json.loads((page.RESULTS / f"{name}.json").read_text())
    script = f"benchmarks/{name}.py"
    assert record["command"].split()[:2] == ["python", script]
    assert {"cpu", "cores", "load"} <= set(record["hardware"])
    assert {"python", "jax", "jaxlib", "flax"} <= set(record["versions"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])


def test_shares_that_overlap_are_percentages():
    part = {"sent_bytes": 8, "overlapped_bytes": 2, "overlapped": 0.25}
    row = {"mesh": {"fsdp": 8}, "blocks": "scan", **part, "sent_bytes": 2**21}
    table = page.gpu_overlap({"rows": [row | {"overlap": {"all-gather": part}}]})
    assert table[-1] == "| fsdp=8 | `scan` | 2 MiB | 25% | – | 25% |"


def test_the_interval_of_a_median_has_the_ranks_of_the_textbook():
    """For 20 values the 6th and the 15th smallest enclose the median with 95%."""
    interval = load("record").median_interval
    assert interval(list(range(1, 21))) == (10.5, 6, 15)
    assert interval([7.0]) == (7.0, 7.0, 7.0)
