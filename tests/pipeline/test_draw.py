"""Timelines drawn as text and as SVG."""

import io
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console

from meshwright.pipeline.draw import render_timeline
from meshwright.pipeline.schedules import get_schedule
from meshwright.pipeline.svg import timeline_svg


def lines_of(name, width=100):
    console = Console(width=width, file=io.StringIO())
    console.print(render_timeline(get_schedule(name).table(4, 2).timeline(), width))
    return console.file.getvalue().splitlines()


def test_the_terminal_shows_each_stage_and_where_it_waits():
    lines = lines_of("zb_h1")
    assert lines[0].rstrip() == "stage 0 F0 F1 ···I0 W0 F2 I1 W1 F3 I2 W2 I3 W3"
    assert lines[1].rstrip() == "stage 1 ···F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3"
    assert "7.7%, simulated" in lines[2]


def test_a_narrow_terminal_says_what_it_leaves_out():
    lines = lines_of("gpipe", width=18)
    assert all(len(line) <= 18 for line in lines[:2])
    assert any("not shown" in line for line in lines)


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
    docs = Path(__file__).parents[2] / "docs"
    assert (docs / "pipeline.svg").read_text() == drawn
