"""Tokens and masks of conversations are those of transformers and TRL."""

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
from chat_cases import CONVERSATIONS, OWN, TEMPLATES, digest

from meshwright.data.chat_rows import ChatEncoder
from meshwright.data.chat_template import ChatTemplate
from meshwright.data.tokenizer import FileTokenizer

pytestmark = pytest.mark.quick

FOLDER = Path(__file__).parent.parent / "fixtures/chat"
CASES = json.loads((FOLDER / "cases.json").read_text())["cases"]


def template_of(name):
    """Return a template: of the project, or of an installed TRL (or where TRL_TEMPLATES says)."""
    if name in OWN:
        return OWN[name]
    spec = importlib.util.find_spec("trl")
    installed = Path(spec.origin).parent / "chat_templates" if spec and spec.origin else None
    folder = os.environ.get("TRL_TEMPLATES") or installed
    if folder is None:
        pytest.skip("the templates of TRL are not here")
    text = (Path(folder) / f"{name}.jinja").read_text()
    if digest(text) != CASES[name]["digest"]:
        pytest.skip("another version of TRL is installed")
    return text


def test_there_are_twelve_templates_each_with_and_without_marks():
    assert len(TEMPLATES) == 12
    assert set(CASES) == {*OWN, *TEMPLATES, *(f"{name}_training" for name in TEMPLATES)}
    assert all(CASES[name]["digest"] == digest(text) for name, text in OWN.items())


@pytest.mark.parametrize("name", CASES)
def test_ids_and_masks_are_those_of_other_libraries(name):
    names = {"bos_token": "<bos>", "eos_token": "<eos>"}
    template = ChatTemplate(template_of(name), names)
    encoder = ChatEncoder(FileTokenizer(str(FOLDER)), template)
    for talk, known in zip(CONVERSATIONS, CASES[name]["rows"], strict=True):
        if known is None:
            with pytest.raises(ValueError, match="the template fails"):
                encoder.conversation(talk)
            continue
        every = ChatEncoder(encoder.tokenizer, template, "all")
        np.testing.assert_array_equal(every.row(every.conversation(talk)).ids, known["ids"])
        if "mask" in known:
            row = encoder.row(encoder.conversation(talk))
            assert "".join(map(str, row.mask.astype(int))) == known["mask"]
        row = encoder.row(encoder.completion(talk[:-1], talk[-1:]))
        np.testing.assert_array_equal(row.ids, known["ids"])
        np.testing.assert_array_equal(row.mask, np.arange(len(row.ids)) >= known["completion"])
        assert row.joined != known["prefix"]
