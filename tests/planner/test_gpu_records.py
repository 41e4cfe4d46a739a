"""Predictions for GPUs, against those that were recorded and the bytes of compiled programs."""

import importlib.util
import json
import math
import statistics
from functools import cache
from pathlib import Path

import pytest

import meshwright
from meshwright.config.compose import compose_config, validate
from meshwright.hardware import parse_hardware
from meshwright.plan import make_plan
from meshwright.planner.estimate.estimator import Estimator
from meshwright.planner.workload import gpu_rules
from meshwright.planner.workload.gpu_rules import Rule
from meshwright.recipe import make_recipe

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RULES = {name: each for name, each in vars(gpu_rules).items() if isinstance(each, Rule)}
BAR = 0.10
"""The error that is asked for, at most; where more is recorded, it must not grow."""
QUICK = (
    "GPT-2 124M, one GPU",
    "GPT-2 124M, fsdp=8, blocks=scan",
    "GPT-2 124M, data=2 × fsdp=4, 4 microbatches",
    "GPT-2 124M, pipe=2 × fsdp=4, 1f1b",
)
"""Plans for one model, of which each shows another rule; the others take a minute."""


def record(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def rows():
    return [
        pytest.param(row, id=row["case"], marks=() if row["case"] in QUICK else pytest.mark.full)
        for row in record("gpu_memory")["rows"]
    ]


@cache
def estimator(words):
    recipe = make_recipe(validate(compose_config(words)), 1)
    return Estimator(recipe.model, recipe.loss, recipe.optimizer, recipe.example_batch(1))


@pytest.mark.parametrize("row", rows())
def test_memory_of_gpus_is_predicted_as_recorded(row):
    words = [*row["words"].split(), "training.mixed_precision=bf16"]
    count = math.prod(int(word.split("=")[1]) for word in words if word.startswith("mesh."))
    plan = make_plan(validate(compose_config(words)), count)
    model = estimator(tuple(word for word in words if word.startswith("model")))
    memory = model.estimate(plan, parse_hardware(f"{count}xH200")).memory
    assert memory.compiled == pytest.approx(row["predicted_total_bytes"], rel=0.01)
    limit = max(BAR, abs(row["error"]) + 0.005)
    assert memory.compiled == pytest.approx(row["total_bytes"], rel=limit)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_names_the_record_that_shows_it(name):
    rule = RULES[name]
    found = record(rule.record)
    assert rule.jax == found["versions"]["jax"]
    assert any(rule.rows in row.get("case", "") for row in found["rows"])


def test_every_rule_is_named_where_it_is_applied():
    files = (Path(meshwright.__file__).parent / "planner").rglob("*.py")
    code = "".join(f.read_text(encoding="utf-8") for f in files if f.name != "gpu_rules.py")
    assert [name for name in RULES if name not in code] == []


def load(name):
    spec = importlib.util.spec_from_file_location(name, RESULTS.parent / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
@pytest.mark.parametrize("row", record("published_throughputs")["rows"][::4])
def test_published_throughputs_are_predicted_as_recorded(row):
    benchmark = load("published_throughputs")
    run = benchmark.Run(**{name: row[name] for name in benchmark.Run._fields})
    assert run in benchmark.RUNS
    assert benchmark.compared(run)["predicted"] == pytest.approx(row["predicted"], rel=0.01)


def test_published_throughputs_are_off_by_at_most_15_percent_in_the_median():
    rows = record("published_throughputs")["rows"]
    assert statistics.median(abs(row["error"]) for row in rows) <= 0.15


def test_times_are_those_of_runs_that_last():
    """GPT-2 124M with 32 rows took 62.9 ms in a minute of training, and 56 in its first second."""
    words = ("model=gpt2", "model.dropout=0")
    settings = ["training.mixed_precision=bf16", "training.micro_batch_size=32"]
    plan = make_plan(validate(compose_config([*words, *settings])), 1)
    step = estimator(words).estimate(plan, parse_hardware("1xH200")).time.step
    measured = next(r for r in record("gpu_peers")["rows"] if r["case"] == "gpt2")
    assert 1e3 * step == pytest.approx(measured["meshwright"]["ms"], rel=0.08)
