"""Notes below the tables of a report, and what is said if nothing fits."""

import html
from dataclasses import replace

import pytest
from closed_form import GPT2_MEDIUM, ClosedForm

from meshwright.errors import UserError
from meshwright.hardware import parse_hardware
from meshwright.planner.guidance.budget import Goal, PlanGoal
from meshwright.planner.guidance.plan_report import make_report
from meshwright.planner.guidance.plan_rows import (
    change_lines,
    in_columns,
    in_json,
    memory_note,
    plan_rows,
    report_json,
    scaling_note,
    scaling_rows,
)
from meshwright.planner.guidance.plan_text import report_text
from meshwright.planner.guidance.why_this_plan import nothing_fits
from meshwright.planner.search.candidates import FixedSettings, PlanTask
from meshwright.planner.search.search import search
from meshwright.planner.search.what_if import scaling_curve, what_ifs
from meshwright.report.plan_page import plan_page
from meshwright.text.columns import as_text

pytestmark = pytest.mark.usefixtures("command_line")

LARGE = ClosedForm(blocks=32, hidden=4096, heads=32, tokens=2048)


def task(hardware="8xA100-40GB", batch=32, **fixed):
    return PlanTask(parse_hardware(hardware), batch, FixedSettings(**fixed))


class NeedsFsdp(ClosedForm):
    """A model that only fits if its state is sharded over eight devices."""

    def _memory(self, plan):
        memory = super()._memory(plan)
        return memory if plan.size("fsdp") == 8 else replace(memory, working=10**12)


class NeedsHalf(ClosedForm):
    """A model whose attention only fits in half precision."""

    def _memory(self, plan):
        memory = super()._memory(plan)
        return memory if plan.precision == "bf16" else replace(memory, working=10**12)


def test_a_format_that_fits_is_named_before_a_larger_cluster():
    asked = replace(task(), precision="no")
    error = nothing_fits(NeedsHalf(), search(NeedsHalf(), asked))
    assert error.what == "no plan fits on 8xA100-40GB"
    assert error.fix.startswith("write precision=bf16: data=8, ")


def test_gradients_that_follow_the_peak_are_explained():
    memory = search(GPT2_MEDIUM, task(), top=1).best.memory
    assert memory_note(memory) == ""
    peak = "follow this peak, in memory that activations no longer need"
    later = replace(memory, gradients=0, all_gradients=10**9)
    assert memory_note(later) == f"1.0 GB of gradients {peak}"
    some = replace(memory, gradients=10**8, all_gradients=10**9)
    assert memory_note(some) == f"of 1.0 GB of gradients, the others {peak}"


def test_the_margin_of_plans_for_cpus_is_explained():
    memory = search(GPT2_MEDIUM, task(), top=1).best.memory
    note = memory_note(replace(memory, reserved=10**9))
    assert note == (
        "on CPUs only state, gradients and batch are predicted; as much again is left for "
        "everything else"
    )


def test_more_than_linear_scaling_is_explained_only_where_it_happens():
    assert scaling_note(scaling_curve(GPT2_MEDIUM, task())) == ""
    points = scaling_curve(LARGE, task("32xA100-80GB", 64))
    assert max(point.efficiency for point in points) > 1.01
    note = scaling_note(points)
    assert note.startswith("more than 100% per device: ")
    assert "devices have the memory for " in note
    few = next(point.num_devices for point in points if point.estimate)
    assert few > 1
    assert f" {few} devices run " in note


def test_a_goal_that_cannot_be_counted_is_refused_before_the_search(monkeypatch):
    monkeypatch.setattr("meshwright.planner.guidance.plan_report.search", None)
    images = ClosedForm(blocks=2, hidden=64, heads=2, tokens=1)
    with pytest.raises(UserError, match="1B tokens cannot be counted in steps"):
        make_report(images, task(), name="images", goal=PlanGoal(Goal(1e9, "tokens")))


def test_changes_that_change_nothing_are_one_sentence():
    found = what_ifs(GPT2_MEDIUM, search(GPT2_MEDIUM, task()))
    assert change_lines(found) == [
        "nothing that was tried: still data=8 with 160.0 GB of memory per device or 1200 GB/s "
        "between devices or a global batch of 128 samples"
    ]
    assert change_lines([]) == []
    changed = what_ifs(LARGE, search(LARGE, task()))
    assert change_lines(changed) == [str(each) for each in changed]


@pytest.mark.parametrize(
    "asked", [task("1xA100-40GB"), task(mesh={"data": 8, "fsdp": 1, "tensor": 1, "pipe": 1})]
)
def test_a_mesh_that_cannot_change_is_not_asked_about(asked):
    assert make_report(GPT2_MEDIUM, asked, name="gpt2").changes == []


@pytest.mark.parametrize(
    ("fixed", "asked", "words"),
    [
        ({"mesh": {"data": 8}}, 63, "56 or 64"),
        ({"mesh": {"data": 8}, "micro_batch_size": 3}, 64, "48 or 72"),
        (
            {"mesh": {"data": 8}, "micro_batch_size": 3, "gradient_accumulation_steps": 2},
            64,
            "48",
        ),
    ],
)
def test_a_batch_that_no_mesh_divides_comes_first_with_the_nearest_that_do(fixed, asked, words):
    with pytest.raises(UserError) as found:
        search(GPT2_MEDIUM, task(batch=asked, **fixed))
    assert "samples" in found.value.what
    assert "no mesh of 8xA100-40GB agrees with these settings" in found.value.why
    assert f"write training.global_batch_size={words}, or" in found.value.fix


def test_a_batch_smaller_than_the_devices_can_share_rows():
    with pytest.raises(UserError) as found:
        search(GPT2_MEDIUM, task(batch=4, mesh={"data": 8}))
    assert "global_batch_size=8, let several devices share each row (mesh.context=2), or" in (
        found.value.fix
    )


def test_a_batch_that_leaves_no_mesh_that_fits_is_blamed():
    error = nothing_fits(NeedsFsdp(), search(NeedsFsdp(), task(batch=63)))
    assert error.what.endswith(": 63 samples per step can only be divided over 1 of 8 devices")
    assert error.fix.startswith(
        "write training.global_batch_size=56 or 64 and 8xA100-40GB holds it: fsdp=8"
    )


def test_a_batch_is_not_blamed_for_a_model_that_is_too_large():
    error = nothing_fits(LARGE, search(LARGE, task("2xA100-40GB", 63)))
    assert error.what == "no plan fits on 2xA100-40GB"
    assert "the smallest cluster of A100-40GB" in error.fix


def test_devices_that_share_memory_are_no_remedy():
    error = nothing_fits(LARGE, search(LARGE, task("2xCPU", 8)))
    assert "devices of one host share its memory" in error.fix
    assert "CPU holds it" not in error.fix
    assert error.report["smallest_hardware"] is None
    several = nothing_fits(LARGE, search(LARGE, task("2x1xCPU", 8)))
    assert "the smallest cluster of CPU that holds it is" in several.fix


def test_the_terminal_and_the_page_show_the_rows_that_json_has():
    report = make_report(GPT2_MEDIUM, task(), name="gpt2")
    text, page = as_text(report_text(report)), plan_page(report)
    rows = [*plan_rows(report), *scaling_rows(report)]
    found = report_json(report)
    assert [*found["plans"], *found["scaling"]] == [in_json(row) for row in rows]
    for row in rows:
        shown = in_columns(row, ("communication", "idle"))
        assert all(cell in text for cell in shown.values())
        assert "".join(f"<td>{html.escape(cell)}</td>" for cell in shown.values()) in page
