"""Tokens of a resumed run: those it began with, also if its tokenizer is gone."""

import json
import shutil
from dataclasses import replace

import pytest
from tokenizer_folders import BOS, DONE, NAMES, make_folder

import meshwright as mw
from meshwright.checkpoint import CheckpointMetadata
from meshwright.config.schema import Config
from meshwright.trainer.starting.resume import ResumePoint
from meshwright.trainer.starting.start import _hf_files
from meshwright.weights.kept import token_ids


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Return what makes a trainer that resumes a run whose data had a fingerprint."""
    folder = make_folder(tmp_path / "f", template="<bos> $A", tokenizer_config=NAMES)
    texts = ["the mesh has an axis", "an axis", "<bos> the mesh"] * 9
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    sizes = {"num_blocks": 1, "hidden_size": 8, "num_heads": 2}

    def make(dataset=None, **data):
        given = {"tokenizer": str(folder), "cache_dir": str(tmp_path / "cache"), **data}
        values = {
            "model": {"kind": "gpt", **sizes, "vocab_size": 256, "context_length": 8},
            "task": {"kind": "language_modeling"},
            "data": {"kind": "jsonl", "path": str(tmp_path / "t.jsonl"), **given},
            "optimizer": {"kind": "sgd", "schedule": "constant", "warmup_steps": 0},
            "training": {"global_batch_size": 8},
        }
        metadata = CheckpointMetadata(step=1, seed=0, dataset=dataset or "", global_batch_size=8)
        point = None if dataset is None else ResumePoint(tmp_path, 1, metadata, same_run=True)
        found = "meshwright.trainer.from_config.find_resume_point"
        monkeypatch.setattr(found, lambda *_: point)
        trainer = mw.Trainer.from_config(Config.parse(values), run_dir=tmp_path / "run")
        return trainer, trainer.defaults.recipe.config_data.train

    return make


def test_a_run_whose_tokenizer_is_gone_has_kept_what_ends_documents(make, tmp_path):
    trainer, data = make()
    (tmp_path / "f" / "chat_template.jinja").write_text("{{ messages }}")
    kept = _hf_files(trainer, replace(trainer.defaults, data=data), None)
    (tmp_path / "run" / "hf").mkdir(parents=True)
    for name, content in kept.items():
        (tmp_path / "run" / "hf" / name).write_text(content)
    assert json.loads(kept["tokenizer_config.json"]) == NAMES
    assert kept["chat_template.jinja"] == "{{ messages }}"
    assert token_ids(kept) == {"bos_token_id": BOS, "eos_token_id": DONE}
    assert token_ids({}) == {"bos_token_id": None, "eos_token_id": None}
    shutil.rmtree(tmp_path / "f")
    again = make(data.fingerprint())[1]
    assert again.fingerprint() == data.fingerprint()
    assert again.tokenizer.marks == data.tokenizer.marks
