"""The page as a file: complete in itself, and safe whatever the data says."""

import base64
import hashlib
import json
import re

import pytest

from meshwright.report import make_page

pytestmark = pytest.mark.quick


def run(**parts):
    empty = {"facts": {}, "result": None, "curves": [], "profile": None, "ledger": None}
    return {"name": "a/b", "path": "/a/b", "config": [], "events": [], **empty, **parts}


def embedded(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])


def test_the_page_holds_its_data_style_and_script():
    page = make_page([run(facts={"project": "p"}), run()], left_out=3)
    assert "{{" not in page
    assert embedded(page)["left_out"] == 3
    assert embedded(page)["runs"][0]["facts"] == {"project": "p"}
    assert not re.search(r'(?:src|href)="(?!data:|#)', page)
    assert not re.search(r"@import|url\(", page)


def test_the_policy_allows_the_pages_own_script_alone():
    page = make_page([run()])
    script = re.search(r"<script>(.*?)</script>", page, re.S)[1]
    allowed = re.search(r"script-src 'sha256-([^']+)'", page)[1]
    assert base64.b64decode(allowed) == hashlib.sha256(script.encode()).digest()


def test_data_cannot_end_its_element_or_fill_in_the_template():
    attack = "</script><script>alert(1)</script> {{style}} & \u2028 \ud800"
    page = make_page([run(name=attack, facts={"project": attack, attack: attack})])
    assert "<script>alert" not in page
    assert page.count("</script>") == 2
    assert page.count("<style>") == 1
    page.encode()
    assert embedded(page)["runs"][0]["facts"][attack] == attack


def test_numbers_that_json_cannot_hold_do_not_break_the_page():
    page = make_page([run(facts={"flops_per_step": float("nan"), "peak": float("inf")})])
    assert embedded(page)["runs"][0]["facts"] == {"flops_per_step": None, "peak": None}
