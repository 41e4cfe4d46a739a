"""The page in a real browser: it draws, answers to the mouse and the keys, and asks for nothing."""

import json

import pytest
from report.browser import Browser, find_browser
from report.sample_runs import NUM_LOGGED, STEPS, write_run

from meshwright.report import make_page, read_run

pytestmark = pytest.mark.quick

if find_browser() is None:
    pytest.skip(
        "no Chromium, so the report page is not tried in a browser; `make browser` installs one",
        allow_module_level=True,
    )

SECTIONS = [
    "facts", "curves", "time", "memory", "mesh", "sharding", "ledger", "samples", "config", "events"
]  # fmt: skip
CHART = "document.querySelector('.chart')"


@pytest.fixture(scope="module")
def browser():
    opened = Browser(find_browser())
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Write the page of one run, of three, and of an empty one."""
    base = tmp_path_factory.mktemp("runs")
    runs = [
        write_run(base / "a"),
        write_run(base / "b", learning_rate=1e-3, mesh={"data": 2, "fsdp": 4}),
        write_run(base / "c", learning_rate=1e-4, mesh={"fsdp": 8}, profiled=False, finished=False),
    ]
    empty = base / "empty"
    empty.mkdir()
    (empty / "run.json").write_text("{}")
    staged = write_run(base / "d", mesh={"pipe": 4, "fsdp": 2})
    wanted = {"one": runs[:1], "three": runs, "empty": [empty], "staged": [staged]}
    for name, folders in wanted.items():
        (base / f"{name}.html").write_text(make_page([read_run(folder) for folder in folders]))
    return base


@pytest.fixture
def show(browser, pages):
    """Open a page; afterwards it must have been silent and asked for nothing but itself."""

    def open_page(name: str, **look) -> Browser:
        browser.open(pages / f"{name}.html", **look)
        return browser

    yield open_page
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith("data:")] == [browser.requests[0]]
    assert browser.requests[0].startswith("file:")


def texts(browser, selector: str) -> list[str]:
    script = f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)"
    return browser.evaluate(script)


def points(browser, selector: str) -> int:
    path = f"document.querySelector({json.dumps(selector)}).getAttribute('d')"
    return browser.evaluate(f"{path}.match(/[ML]/g).length")


@pytest.mark.parametrize(
    ("name", "width", "dark"),
    [
        ("one", 1300, False),
        ("three", 390, True),
        ("empty", 1300, False),
        pytest.param("one", 390, True, marks=pytest.mark.full),
        pytest.param("three", 1300, False, marks=pytest.mark.full),
        pytest.param("empty", 390, True, marks=pytest.mark.full),
    ],
)
def test_every_section_is_there_and_fits_the_screen(show, name, width, dark):
    browser = show(name, width=width, dark=dark)
    assert browser.evaluate("[...document.querySelectorAll('section')].map(e => e.id)") == SECTIONS
    assert not [text for text in texts(browser, ".missing") if "cannot be shown" in text]
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    colour = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in colour[4:-1].split(",")) / 3
    assert brightness < 60 if dark else brightness > 200


def test_curves_have_a_point_for_every_logged_value(show):
    browser = show("one")
    titles = texts(browser, "figcaption > span:first-child")
    assert titles[:4] == ["Loss", "accuracy", "Learning rate", "Gradient norm"]
    assert points(browser, ".chart path.line[data-split=train]") == NUM_LOGGED
    assert points(browser, ".chart path.line[data-split=eval]") == STEPS // 50
    drawn = browser.evaluate(
        "[...document.querySelectorAll('path.line')].map(p => p.getBBox().width)"
    )
    assert min(drawn) > 100


def test_pointing_at_a_chart_reads_the_values_there(show, pages):
    browser = show("one")
    x, y = browser.middle(".chart .plot svg")
    browser.mouse("mouseMoved", x, y)
    shown = browser.evaluate("document.querySelector('.reading').textContent")
    lines = [json.loads(line) for line in (pages / "a" / "metrics.jsonl").read_text().splitlines()]
    step = int(shown.split("train")[0].removeprefix("step "))
    assert abs(step - STEPS / 2) < 20
    loss = next(line["loss"] for line in lines if (line["split"], line["step"]) == ("train", step))
    assert float(shown.split("train ")[1].split("eval")[0]) == pytest.approx(loss, rel=1e-3)
    browser.mouse("mouseMoved", 2, 2)
    assert browser.evaluate("document.querySelector('.reading').textContent") == ""


def test_the_arrow_keys_read_the_values_too(show):
    browser = show("one")
    browser.evaluate("document.querySelector('.plot svg').focus()")
    for expected in (STEPS, STEPS - 2):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowLeft")
        shown = browser.evaluate("document.querySelector('.reading .at').textContent")
        assert shown == f"step {expected}"


def test_dragging_zooms_and_the_button_shows_all_again(show):
    browser = show("one")
    x, y = browser.middle(".chart .plot svg")
    browser.mouse("mouseMoved", x, y)
    browser.mouse("mousePressed", x, y)
    browser.mouse("mouseMoved", x + 100, y)
    browser.mouse("mouseReleased", x + 100, y)
    assert 5 < points(browser, ".chart path.line[data-split=train]") < NUM_LOGGED / 2
    browser.click(".chart .tools button:not([hidden])")
    assert points(browser, ".chart path.line[data-split=train]") == NUM_LOGGED


def test_smoothing_and_the_logarithm_redraw_the_curve(show):
    browser = show("one")
    line = f"{CHART}.querySelector('path.line[data-split=train]').getAttribute('d')"
    plain = browser.evaluate(line)
    browser.click(".chart .tools button:last-child")
    logarithmic = browser.evaluate(line)
    browser.evaluate(
        "(() => { const s = document.getElementById('smoothing'); s.value = 0.9;"
        "s.dispatchEvent(new Event('input')); })()"
    )
    smooth = browser.evaluate(line)
    assert len({plain, logarithmic, smooth}) == 3
    assert points(browser, ".chart path.line.faint") == NUM_LOGGED


def test_tables_filter_and_sort(show):
    browser = show("one")
    rows = "#sharding tbody tr"
    # The same parameters of four blocks share a row, and are found by their own paths too.
    assert len(texts(browser, rows)) == 5
    browser.type("#sharding input", "3.NORM")
    assert texts(browser, f"{rows} td:nth-child(-n+2)") == ["blocks.*.norm.scale", "256 (4×)"]
    assert texts(browser, "#sharding .note") == ["1 of 5 rows"]
    browser.evaluate("document.querySelector('#ledger details').open = true")
    browser.click("#ledger details th:last-child button")
    sizes = texts(browser, "#ledger details tbody td:last-child")
    assert sizes == sorted(sizes, reverse=True)
    browser.click("#ledger details th:last-child button")
    assert texts(browser, "#ledger details tbody td:last-child") == sorted(sizes)


def test_the_ledger_shows_what_overlaps(show, pages, tmp_path):
    browser = show("one")
    assert "50% of gathers, 0% of reductions" in texts(browser, "#ledger tbody td")
    assert "blocks.0, embed" in texts(browser, "#ledger tbody td")
    folder = write_run(tmp_path / "run")
    ledger = json.loads((folder / "ledger.json").read_text())
    earlier = {"overlapped", "overlapped_bytes", "overlap"}
    ledger["axes"] = {
        axis: {name: own[name] for name in own if name not in earlier}
        for axis, own in ledger["axes"].items()
    }
    del ledger["not_overlapped"]
    (folder / "ledger.json").write_text(json.dumps(ledger | {"overlap_unknown": "no GPU"}))
    page = pages / "earlier.html"
    page.write_text(make_page([read_run(folder)]))
    browser = show("earlier")
    assert "–" in texts(browser, "#ledger tbody td")
    assert texts(browser, "#ledger .note")[0].endswith("is not known: no GPU.")


def test_steps_that_were_not_finite_are_counted_and_listed(browser, tmp_path):
    folder = write_run(tmp_path / "run")
    own = {"kind": "incident", "loss": "nan", "grad_norm": "nan", "record": None, "time": 1.0}
    with (folder / "events.jsonl").open("a") as file:
        for step, action in ((5, "skip"), (6, "skip"), (9, "stop")):
            line = own | {"step": step, "batch": step - 1, "action": action}
            file.write(json.dumps(line | {"message": f"the loss is nan at step {step}"}) + "\n")
    page = tmp_path / "page.html"
    page.write_text(make_page([read_run(folder)]))
    browser.open(page)
    assert browser.errors == []
    assert "3 incidents" in texts(browser, "header .badge")
    assert "3 (skip 2, stop 1)" in " ".join(texts(browser, "#facts td"))
    assert "Steps that were not finite" in " ".join(texts(browser, "#events caption"))
    rows = [text for text in texts(browser, "#events tr") if text.startswith("9stop")]
    assert rows == ["9stopnannan8–"]


def test_settings_that_are_no_defaults_come_first(show):
    browser = show("one")
    origins = [text.split()[0] for text in texts(browser, "#config tbody td:last-child")]
    assert origins == sorted(origins, key=["override", "file", "default"].index)


def test_several_runs_are_overlaid_and_only_differences_listed(show):
    browser = show("three")
    loss = "[...document.querySelector('.chart').querySelectorAll('path.line[data-split=train]')]"
    assert browser.evaluate(f"new Set({loss}.map(p => getComputedStyle(p).stroke)).size") == 3
    keys = texts(browser, "#config tbody th")
    assert keys == ["optimizer.learning_rate", "mesh.data", "mesh.fsdp", "mesh.tensor"]
    assert "still running" in texts(browser, "#facts tbody tr")[0]
    browser.click("#mesh [role=tab]:nth-child(2)")
    assert browser.evaluate("document.querySelector('#mesh img').alt") == "Mesh data=2 × fsdp=4"
    assert browser.evaluate("document.querySelector('#mesh img').naturalWidth") > 100


def test_runs_are_named_by_what_differs_and_equal_rows_are_folded(show):
    browser = show("three")
    names = ["learning_rate=3e-4, fsdp=4 × tensor=2", "learning_rate=1e-3, data=2 × fsdp=4",
             "learning_rate=1e-4, fsdp=8"]  # fmt: skip
    # The loss on held-out data is lowest in two of them.
    best = [f"{names[0]} best", f"{names[1]} best", names[2]]
    assert texts(browser, "#facts > div:first-of-type > .scroll thead th") == best
    assert texts(browser, "#curves .legend li")[:3] == names
    assert texts(browser, "#mesh [role=tab]") == names
    shown = texts(browser, "#facts > div:first-of-type > .scroll tbody th")
    folded = texts(browser, "#facts .equal tbody th")
    assert {"Final loss", "Mesh"} <= set(shown)
    assert {"Seed", "Data", "Devices"} <= set(folded)
    assert not set(shown) & set(folded)
    assert browser.evaluate("document.querySelector('#facts .equal').open") is False
    # All three are sharded alike, so there is nothing to choose.
    assert texts(browser, "#sharding [role=tab]") == []
    assert texts(browser, "#sharding .above") == ["The same in all runs."]


def test_runs_with_the_same_settings_are_named_by_their_folders(browser, tmp_path):
    runs = [write_run(tmp_path / name) for name in ("first", "second")]
    page = tmp_path / "page.html"
    page.write_text(make_page([read_run(folder) for folder in runs]))
    browser.open(page)
    expected = [f"{tmp_path.name}/first", f"{tmp_path.name}/second"]
    assert texts(browser, "#curves .legend li")[:2] == expected
    runs.append(write_run(tmp_path / "third", learning_rate=0.02))
    page.write_text(make_page([read_run(folder) for folder in runs]))
    browser.open(page)
    assert texts(browser, "#curves .legend li")[:3] == [
        f"learning_rate=3e-4 ({expected[0]})", f"learning_rate=3e-4 ({expected[1]})",
        "learning_rate=0.02",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["three", "staged"])
def test_on_a_phone_only_boxes_scroll_sideways(show, name):
    browser = show(name, width=390, height=844)
    browser.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    x, y = browser.middle(".chart .plot svg")
    browser.mouse("mouseMoved", x - 60, y)
    assert texts(browser, ".chart:first-child .reading")[0].startswith("step ")
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    outside = browser.evaluate(
        "[...document.querySelectorAll('#page *')]"
        ".filter(e => !e.closest('.scroll, nav, svg, caption')"
        " && e.getBoundingClientRect().right > 390.5).map(e => e.outerHTML.slice(0, 80))"
    )
    assert outside == []
    boxes = "[...document.querySelectorAll('#sharding .scroll')]"
    assert browser.evaluate(f"{boxes}.every(e => e.scrollWidth > e.clientWidth)")
    # Paths break between their parts: no line ends inside of a word.
    cell = "document.querySelector('#sharding td.path')"
    assert browser.evaluate(f"{cell}.querySelectorAll('wbr').length") >= 3


def test_stages_are_listed_and_drawn(show):
    browser = show("staged", width=900)
    rows = "[...document.querySelectorAll('#mesh tbody tr')].map(row => row.cells.length)"
    assert browser.evaluate(rows) == [6] * 4
    drawn = "[...document.querySelectorAll('#mesh img')].map(i => [i.alt, i.naturalWidth > 0])"
    pictures = browser.evaluate(drawn)
    assert pictures == [["Mesh pipe=4 × fsdp=2", True], ["When each stage works", True]]
    assert browser.evaluate("document.documentElement.scrollWidth") <= 900


def test_the_values_are_there_as_a_table(show):
    browser = show("one")
    browser.evaluate("document.querySelector('.values').open = true")
    browser.wait_for("document.querySelector('.values tbody tr')")
    assert len(texts(browser, ".chart:first-child .values tbody tr")) == NUM_LOGGED
    assert browser.evaluate(f"{CHART}.querySelector('svg').getAttribute('aria-label')").startswith(
        "Loss by step: train ends at"
    )


def test_what_is_not_learned_of_a_sample_is_grey(show):
    browser = show("one")
    assert texts(browser, ".sample") == ["<user>hi & <b>you</b>\nhello"]
    assert texts(browser, ".sample .unlearned") == ["<user>hi & <b>you</b>\n"]


def test_an_empty_run_says_what_would_fill_each_section(show):
    browser = show("empty")
    empty = browser.evaluate(
        "[...document.querySelectorAll('section')].filter(e => e.querySelector('.missing'))"
        ".map(e => e.id)"
    )
    assert empty == SECTIONS[1:]


def test_whatever_stands_in_the_files_stays_text(browser, tmp_path):
    attack = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>"
    folder = write_run(tmp_path / "run", project=attack)
    facts = json.loads((folder / "run.json").read_text())
    facts["mesh_svg"] = (
        '<svg xmlns="http://www.w3.org/2000/svg" onload="top.hacked=1">'
        "<script>top.hacked=1</script></svg>"
    )
    facts["sharding"][0]["path"] = facts["plan"] = facts["remarks"][0] = attack
    (folder / "run.json").write_text(json.dumps(facts))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"split": attack, "step": 1, attack: 1.0, "loss": 2.0}) + "\n")
    (folder / "events.jsonl").write_text(json.dumps({"kind": attack, "message": attack}) + "\n")
    (folder / "config.json").write_text(json.dumps([{"key": attack, "value": attack}]))
    page = tmp_path / "page.html"
    page.write_text(make_page([read_run(folder)]))
    browser.open(page)
    assert browser.evaluate("typeof window.hacked") == "undefined"
    assert texts(browser, "h1")[0].startswith(attack)
    assert attack in texts(browser, "figcaption > span:first-child")
    assert browser.evaluate("document.querySelectorAll('img').length") == 1
    assert browser.errors == []


def test_a_strange_file_costs_its_section_only(browser, tmp_path):
    folder = write_run(tmp_path / "run")
    facts = json.loads((folder / "run.json").read_text())
    facts |= {"sharding": "yes", "mesh": 7, "devices": [], "remarks": 3, "memory_per_device": "x"}
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / "ledger.json").write_text('{"axes": [1, null], "lines": {"a": 1}}')
    (folder / "profile.json").write_text('{"shares": null, "collectives": 5}')
    page = tmp_path / "page.html"
    page.write_text(make_page([read_run(folder)]))
    browser.open(page)
    assert browser.evaluate("[...document.querySelectorAll('section')].map(e => e.id)") == SECTIONS
    assert points(browser, ".chart path.line[data-split=train]") == NUM_LOGGED
    assert browser.errors == []


def test_the_checks_of_these_tests_notice_errors_and_requests(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        "<img src='http://127.0.0.1:9/x.png'><script>console.error('no'); nothing()</script>"
    )
    browser.open(page)
    browser.evaluate("new Promise(done => setTimeout(done, 100))")
    assert "http://127.0.0.1:9/x.png" in browser.requests
    assert any("nothing is not defined" in error for error in browser.errors)
    assert any('"no"' in error for error in browser.errors)


def test_gaps_single_points_and_a_slow_first_step_are_drawn_inside_the_chart(browser, tmp_path):
    losses = [3.0, None, 2.0, 1.0]
    lines = [
        {"split": "train", "step": n, "loss": loss, "step_seconds": 9.0 if n == 1 else 0.1}
        for n, loss in enumerate(losses, start=1)
    ]
    lines.append({"split": "eval", "step": 4, "loss": 1.5, "all_gaps": None})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    page = tmp_path / "page.html"
    page.write_text(make_page([read_run(tmp_path)]))
    browser.open(page)
    path = "document.querySelector('.chart path.line').getAttribute('d')"
    assert browser.evaluate(f"{path}.replace(/[^ML]/g, '')") == "MML"
    assert browser.evaluate("document.querySelectorAll('.chart:first-child .dot').length") == 1
    number = texts(browser, "figcaption > span:first-child").index("Time per step")
    line = f"document.querySelectorAll('.chart')[{number}].querySelector('path')"
    box = browser.evaluate(f"(b => [b.x, b.y])({line}.getBBox())")
    assert box == pytest.approx([58, 10], abs=0.5)
    assert texts(browser, ".cut") == ["↑ 9 s, cut"]
    assert browser.errors == []


def test_equal_curves_show_through_each_other_constants_have_no_chart_and_the_best_is_marked(
    browser, tmp_path
):
    folders = [tmp_path / name for name in "abc"]
    for folder, low in zip(folders, (1.0, 1.0, 0.5), strict=True):
        folder.mkdir()
        lines = [{"split": "train", "step": n, "loss": low + 1 / n} for n in (1, 2, 3)]
        lines.append({"split": "eval", "step": 3, "loss": low, "eval_samples": 2170})
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        words = ["meshwright", "train", "data.path=two words/*.txt"]
        (folder / "run.json").write_text(json.dumps({"command": words}))
    page = tmp_path / "page.html"
    page.write_text(make_page([read_run(folder) for folder in folders]))
    browser.open(page)
    assert texts(browser, "figcaption > span:first-child") == ["Loss"]
    assert "Constant: Held-out samples 2,170." in texts(browser, "#curves .note")
    lines = "[...document.querySelectorAll('path[data-split=train]')]"
    dashes = browser.evaluate(f"{lines}.map(line => line.style.strokeDasharray)")
    assert dashes == ["", "14, 14", ""]
    assert any("a and" in note and "equal" in note for note in texts(browser, "#curves .note"))
    best = texts(browser, "#facts th:has(.badge.good)")
    assert len(best) == 1
    assert best[0].endswith("c best")
    assert "meshwright train 'data.path=two words/*.txt'" in texts(browser, "#facts td")
    assert browser.errors == []
