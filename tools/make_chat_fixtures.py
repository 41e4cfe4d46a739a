"""Write tests/fixtures/chat: the tokens and masks that transformers and TRL give conversations.

Needs packages that the project does not: ``pip install --no-deps --target FOLDER transformers trl``
and what they import, then ``PYTHONPATH=FOLDER:src:tests python tools/make_chat_fixtures.py
tests/fixtures/chat``. PyTorch is not needed.

The templates are those that TRL ships, each with marks around what the assistant says and without,
and those of the tests. ``cases.json`` has the digest of each template instead of its text, and for
each conversation the ids, what ``apply_chat_template`` marks, and where TRL begins to learn if the
last turn is a completion. A tokenizer is trained for it, with the special tokens of all templates.
`tests/data/test_chat_fixtures.py` compares.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import transformers
import trl
from chat_cases import CONVERSATIONS, OWN, TEMPLATES, digest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def main(target: Path) -> None:
    """Write the tokenizer and the cases."""
    shipped = Path(trl.__file__).parent / "chat_templates"
    texts = {
        f"{name}{ending}": (shipped / f"{name}{ending}.jinja").read_text()
        for name in TEMPLATES
        for ending in ("", "_training")
    } | OWN
    target.mkdir(parents=True, exist_ok=True)
    train(texts).save(str(target / "tokenizer.json"), pretty=False)
    names = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (target / "tokenizer_config.json").write_text(json.dumps(names) + "\n")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(target / "tokenizer.json"), **names
    )
    cases = {name: case(tokenizer, text) for name, text in texts.items()}
    versions = {each.__name__: each.__version__ for each in (transformers, trl)}
    content = {"versions": versions, "cases": cases}
    lines = json.dumps(content, separators=(",", ":")).replace('},"', '},\n"')
    (target / "cases.json").write_text(lines + "\n")


def train(texts: dict[str, str]) -> Tokenizer:
    """Train a byte-level tokenizer with the special tokens of all templates."""
    tokens = re.compile(r"<[|\uff5c/]?\w[^<>\s{}'\"]*>")
    found = {each for text in texts.values() for each in tokens.findall(text)}
    special = ["<bos>", "<eos>", *sorted(found - {"<bos>", "<eos>"})]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + 400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    said = [message["content"] for talk in CONVERSATIONS for message in talk]
    made.train_from_iterator([*said, "user assistant system\n\n"] * 3, trainer)
    return made


def case(tokenizer: Any, template: str) -> dict[str, Any]:
    """Return what a template makes of each conversation; null if it refuses it."""
    rows = list[Any]()
    for talk in CONVERSATIONS:
        try:
            whole = tokenizer.apply_chat_template(
                talk, chat_template=template, tokenize=True, return_dict=True,
                return_assistant_tokens_mask="generation %}" in template,
            )  # fmt: skip
            prompt = tokenizer.apply_chat_template(
                talk[:-1], chat_template=template, tokenize=True, return_dict=True,
                add_generation_prompt=True,
            )["input_ids"]  # fmt: skip
        except Exception:
            # Templates refuse roles, or call what only models with tools have.
            rows.append(None)
            continue
        ids = list(whole["input_ids"])
        same = [a == b for a, b in zip(prompt, ids, strict=False)]
        row = {"ids": ids, "completion": [*same, False].index(False), "prefix": all(same)}
        if "assistant_masks" in whole:
            row["mask"] = "".join(map(str, whole["assistant_masks"]))
        rows.append(row)
    return {"digest": digest(template), "rows": rows}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
