"""`meshwright eval`: how well a model predicts the text of a file, or completes its prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.cli.arguments import Arguments
from meshwright.cli.output import Output
from meshwright.cli.reward_eval import run_with_rewards
from meshwright.cli.text_model import number_format, open_model, read_lines, read_text
from meshwright.errors import ExitCode, UserError
from meshwright.runtime.activity import activity

LONGEST = 1024
"""The most tokens that the model sees at once, unless another number is asked for."""


def run(arguments: Arguments, output: Output) -> int:
    """Score the file, and print nats and bits per token and byte."""
    path, file = arguments.words("a run or a folder", "a file", example="RUN text.txt")
    if arguments.has("--rewards"):
        return run_with_rewards(arguments, output, path, file)
    documents = read_documents(Path(file))
    import numpy as np

    from meshwright.generation.generate import make_generator
    from meshwright.generation.model_facts import UNLIMITED
    from meshwright.generation.text_scores import score_documents

    model, settings = open_model(arguments, path)
    mesh, dtype = arguments.flags.get("--mesh"), number_format(arguments, output, settings, path)
    # It checks the model, and places it.
    made = make_generator(model, tokenizer=settings, max_new_tokens=1, mesh=mesh, dtype=dtype)
    tokens, learned = list[Any](), list[Any]()
    for number, each in enumerate(documents):
        row = _conversation(each, number, made) if isinstance(each, dict) else None
        tokens.append(made.check(number, each if row is None else row.ids, whole=False))
        learned.append(np.ones(len(tokens[-1]), bool) if row is None else row.mask)
    context = made.room(arguments.number("--window", LONGEST, most=UNLIMITED))
    length = arguments.number("--window", min(context, LONGEST), most=context, least=2)
    stride = arguments.number("--stride", 1, most=length) if arguments.has("--stride") else None
    texts = [each.encode() for each in documents if isinstance(each, str)]
    with activity(f"reading {file}"):
        score = score_documents(
            made.model,
            tokens,
            length=length,
            stride=stride,
            num_bytes=sum(map(len, texts)) if len(texts) == len(documents) else None,
            placement=made.placement,
            learned=learned,
        )
    found = {**score.to_json(), "window": length, "dtype": dtype or "float32"}
    output.result(found, text=str(score))
    return ExitCode.DONE


def read_documents(file: Path) -> list[Any]:
    """Return the documents of a file: a text, tokens or a conversation a line, or all of it."""
    if file.suffix != ".jsonl":
        return [read_text(file)]
    example = '{"text": "Once"}, {"tokens": [1, 2]}, {"prompt": "1 + 1 =", "completion": " 2"} or '
    example += '{"messages": [{"role": "user", "content": "Hello"}, …]}'
    kinds: dict[str, Any] = {"text": str, "tokens": list, "messages": list}
    kinds["completion"] = (str, list)
    lines = read_lines(file, kinds, example)
    return [line.get("text", line.get("tokens", line)) for line in lines]


def _conversation(record: dict[str, Any], number: int, made: Any) -> Any:
    """Return the tokens of a conversation, and which of them are the assistant's."""
    from meshwright.data.chat_rows import ChatEncoder
    from meshwright.data.chat_source import TODAY, ChatFields

    made.text.encode("")  # Refuses a folder without a tokenizer.
    lists = any(isinstance(record.get(key), list) for key in ("messages", "completion"))
    template = replace(made.chat.chat, today=TODAY) if lists else None
    encoder = ChatEncoder(made.text.tokenizer, template, made.chat.loss_on)
    try:
        return encoder.row(ChatFields().read(record, encoder))
    except ValueError as error:
        raise UserError(f"conversation {number} cannot be read", why=str(error)) from None
