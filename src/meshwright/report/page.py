"""Making the HTML page: the assets of this package around the data of the runs."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.runtime.versions import own_version
from meshwright.text.json_text import finite

_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("elements.js", "words.js", "chart.js", "tables.js", "sections.js",
            "labels.js", "page.js")  # fmt: skip


def make_page(runs: Sequence[dict[str, Any]], *, left_out: int = 0) -> str:
    """Return an HTML page about runs from `read_run`, with the first one in focus.

    The page loads nothing from elsewhere. The contents of the runs' files are only data to it:
    its content security policy allows no script but its own.

    Args:
        runs: one or more runs.
        left_out: number of further runs, which the page mentions.
    """
    script = "\n".join((_ASSETS / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    script = f'"use strict";\n{script}'
    data = {"version": own_version(), "left_out": left_out, "runs": list(runs)}
    parts = {
        # File names may contain bytes that are not text.
        "title": html.escape(_title(runs).encode(errors="replace").decode()),
        "style": (_ASSETS / "style.css").read_text(encoding="utf-8"),
        "script": script,
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        # Only "<" could end the element that contains the data.
        "data": json.dumps(finite(data), allow_nan=False).replace("<", "\\u003c"),
    }
    template = (_ASSETS / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _title(runs: Sequence[dict[str, Any]]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs · Meshwright"
    return f"{runs[0]['facts'].get('project', 'run')} {runs[0]['name']} · Meshwright"
