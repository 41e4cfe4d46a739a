"""`meshwright eval`: how well a model predicts the text of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.cli.arguments import Arguments
from meshwright.cli.output import Output
from meshwright.cli.text_model import open_model
from meshwright.errors import ExitCode, UserError
from meshwright.runtime.activity import activity
from meshwright.text.json_text import parse_json


def run(arguments: Arguments, output: Output) -> int:
    """Score the file, and print nats and bits per token and byte."""
    path, file = arguments.words("a run or a folder", "a file", example="RUN text.txt")
    documents = read_documents(Path(file))
    from meshwright.generation.generate import make_generator
    from meshwright.generation.text_scores import score_documents

    model, settings = open_model(arguments, path)
    mesh = arguments.flags.get("--mesh")
    # It checks the model, and places it.
    made = make_generator(model, {}, tokenizer=settings, max_new_tokens=1, mesh=mesh)
    tokens = [made.text.encode(each) if isinstance(each, str) else each for each in documents]
    checked = [made.known(number, each) for number, each in enumerate(tokens)]
    length = arguments.number("--window", min(made.context, 1024), most=made.context, least=2)
    stride = arguments.number("--stride", 1, most=length) if arguments.has("--stride") else None
    texts = [each.encode() for each in documents if isinstance(each, str)]
    with activity(f"reading {file}"):
        score = score_documents(
            made.model,
            checked,
            length=length,
            stride=stride,
            num_bytes=sum(map(len, texts)) if len(texts) == len(documents) else None,
            placement=made.placement,
        )
    if output.as_json:
        output.result({**score.to_json(), "window": length})
    else:
        output.text(str(score))
    return ExitCode.DONE


def read_documents(file: Path) -> list[Any]:
    """Return the documents of a file: the text or the tokens of each line of JSON, or all of it."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file}", why=str(error)) from error
    if file.suffix not in (".jsonl", ".json"):
        return [text]
    found: list[Any] = []
    for number, line in enumerate(text.splitlines(), start=1):
        value = parse_json(line)
        own = value.get("text", value.get("tokens")) if isinstance(value, dict) else None
        if not isinstance(own, str | list):
            raise UserError(
                f"line {number} of {file} is not a document",
                why=line[:80],
                fix='write {"text": "Once"} or {"tokens": [1, 2]}',
            )
        found.append(own)
    return found
