"""Timelines drawn as text and as SVG."""

import functools
import io
from fractions import Fraction
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from meshwright.cli.inspect import pipeline_svg
from meshwright.config.batch import solve_batch
from meshwright.pipeline.schedule.operations import Times
from meshwright.pipeline.schedule.schedules import get_schedule
from meshwright.pipeline.schedule.timeline_drawing import TimelineDrawing, timeline_svg
from meshwright.plan import Plan

pytestmark = pytest.mark.quick


@functools.cache
def timeline_of(name, microbatches, stages):
    return get_schedule(name).table(microbatches, stages).timeline()


def lines_of(name, width=100, microbatches=4, stages=2):
    console = Console(width=width, file=io.StringIO())
    console.print(TimelineDrawing(timeline_of(name, microbatches, stages)))
    return console.file.getvalue().splitlines()


def test_the_terminal_shows_each_stage_and_where_it_waits():
    lines = lines_of("zb_h1")
    assert lines[0].rstrip() == "stage 0 F0 F1 ···I0 W0 F2 I1 W1 F3 I2 W2 I3 W3"
    assert lines[1].rstrip() == "stage 1 ···F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3"
    assert lines[2] == (
        "F forward  I input gradient  W weight gradient  · waiting (7.7%, simulated)"
    )


def test_the_default_of_four_stages_fits_eighty_columns_without_colour():
    lines = lines_of("1f1b", 80, microbatches=16, stages=4)
    assert len(lines) == 5
    assert lines[0] == "stage 0 FFFF··F··F··F" + "B─F" * 9 + "B─B─·B─·B─·B─B─B─"
    assert lines[3] == "stage 3 ···" + "FB─" * 16 + "······"


def test_chunks_are_told_apart_without_colour():
    lines = lines_of("interleaved", 80)
    assert lines[0].startswith("stage 0 F0F1f0f1····F2b0")
    assert "small letters: chunk 1" in lines[2]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1"])
@pytest.mark.parametrize("width", [18, 80, 130])
def test_a_stage_is_one_line_whatever_the_width(name, width):
    for microbatches, stages in ((4, 2), (16, 4), (32, 8)):
        lines = lines_of(name, width, microbatches, stages)
        rows = lines[:stages]
        assert [row.partition(" ")[0] for row in rows] == ["stage"] * stages
        assert len({len(row) for row in rows}) == 1
        assert len(rows[0]) <= width
        assert ("stands for" in "".join(lines)) == (" … " in rows[0])


def test_both_ends_are_shown_where_not_all_fits():
    lines = lines_of("gpipe", 30)
    assert lines[0] == "stage 0 FFFF···B0B1B2B3"
    short = lines_of("gpipe", 20)
    assert short[0] == "stage 0 FFFF· … B2B3"
    assert "(… stands for 6 of" in " ".join(short)


def test_unequal_stages_are_drawn_to_scale():
    times = Times(scale=(Fraction(1, 2), Fraction(3, 2)))
    timeline = get_schedule("gpipe").table(2, 2).timeline(times)
    first, second, _ = (line.plain for line in TimelineDrawing(timeline).lines(40))
    # Forward passes of 1 and 3 columns, backward passes of 2 and 6.
    assert first == "stage 0 FF···········B0····B1"
    assert second == "stage 1 ·F──F──B0    B1    ··"


def test_printing_shows_the_chart_and_the_ticks():
    table = get_schedule("interleaved").table(4, 2)
    assert str(table.timeline()).startswith("stage 0 F0")
    assert repr(table.timeline()) == ("Timeline(2 stages, 4 microbatches, 2 chunks, waits 11.1%)")
    assert repr(table) == "TickTable(2 stages, 4 microbatches, 2 chunks, 12 ticks)"
    lines = str(table).splitlines()
    assert lines[0] == "tick  stage 0  stage 1"
    assert lines[4] == "3     F1.1     F0.1 B0.1"
    assert len(lines) == 13


def test_the_svg_has_one_titled_rectangle_per_operation():
    timeline = get_schedule("interleaved").table(4, 2).timeline()
    root = ElementTree.fromstring(timeline_svg(timeline, "a < b"))
    groups = [e for e in root if e.tag.endswith("}g")]
    assert len(groups) == len(timeline.spans)
    titles = {group[0].text for group in groups}
    assert "backward of microbatch 3, chunk 1, stage 1" in titles
    width = float(root.get("width"))
    assert all(float(g[1].get("x")) + float(g[1].get("width")) <= width for g in groups)


def test_the_picture_in_the_documentation_is_what_is_drawn():
    timeline = get_schedule("zb_h1").table(8, 4).timeline()
    drawn = timeline_svg(timeline, "zb_h1, 4 stages, 8 microbatches")
    docs = Path(__file__).parents[3] / "docs"
    assert (docs / "pipeline.svg").read_text() == drawn
    batch = solve_batch(replicas=1, micro_batch_size=1, gradient_accumulation_steps=8)
    plan = Plan(mesh={"pipe": 4}, batch=batch, schedule="zb_h1", num_microbatches=8)
    assert pipeline_svg(plan) == drawn
