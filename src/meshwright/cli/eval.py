"""`meshwright eval`: how well a model predicts the text of a file, or completes its prompts."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.cli.arguments import Arguments
from meshwright.cli.output import Output
from meshwright.cli.text_model import decimal, number_format, open_model, read_lines, read_text
from meshwright.errors import ExitCode, UserError, did_you_mean
from meshwright.runtime.activity import activity
from meshwright.text.units import counted

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
    from meshwright.generation.text_scores import score_documents
    from meshwright.generation.token_decoder import UNLIMITED

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
    stride = arguments.given_number("--stride", most=length)
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


PRESETS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "standard": {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
    "liberal": {"temperature": 0.85, "top_k": 2000, "top_p": 1.0},
}


def _preset_and_samples(arguments: Arguments) -> tuple[str, int]:
    preset = arguments.flags.get("--preset", "greedy")
    if preset not in PRESETS:
        hint = did_you_mean(preset, PRESETS) or f"write one of {', '.join(PRESETS)}"
        raise UserError(f"there is no preset `{preset}`", fix=hint)
    samples = arguments.number("--samples", 1 if preset == "greedy" else 8)
    if samples > 1 and preset == "greedy":
        raise UserError(
            f"--samples {samples} would all be the same",
            why="the preset is greedy, which takes the likeliest token",
            fix="write --preset standard",
        )
    return preset, samples


def run_with_rewards(arguments: Arguments, output: Output, path: str, file: str) -> int:
    """Complete the prompts of a file, score them, and print shares."""
    preset, samples = _preset_and_samples(arguments)
    import numpy as np

    from meshwright.data.corrupt import CorruptRecords
    from meshwright.data.prompts import PROMPT, PromptSource, read_prompts
    from meshwright.rewards.reward_set import read_rewards
    from meshwright.trainer.rollouts.completer import Completer

    out = arguments.flags.get("--out")
    seconds = decimal(arguments, "--reward-seconds")
    if seconds is not None and not seconds > 0:
        raise UserError(
            f"--reward-seconds {seconds:g} is not positive", fix="write --reward-seconds 10"
        )
    rewards = read_rewards(arguments.flags["--rewards"].split(","), seconds=seconds or 10.0)
    field = arguments.flags.get("--field", PROMPT)
    source = PromptSource(read_prompts(file, field, CorruptRecords("stop"), "--field"))
    columns = source.rows(np.arange(len(source)))
    rewards.check(columns)
    model, settings = open_model(arguments, path)
    completer = Completer(rewards, settings.tokenizer, settings.file)
    most = arguments.number("--max-new-tokens", settings.completion or 256, most=2**31 - 1)
    with activity(f"completing {counted(len(source), 'prompt')}") as report:
        rows = completer.complete(
            model,
            columns,
            report,
            max_new_tokens=most,
            samples=samples,
            seed=arguments.number("--seed", 0, least=0, most=2**32 - 1),
            batch_size=arguments.number("--batch-size", 256, most=2**20),
            mesh=arguments.flags.get("--mesh"),
            dtype=number_format(arguments, output, settings, path),
            **PRESETS[preset],
        )
        report("rewards")
        groups, scored = completer.score(columns, rows)
    rewards.processes.close()
    scored.check()
    for text in filter(None, [rewards.note, *scored.warnings()]):
        output.say(text)
    least = decimal(arguments, "--threshold")
    totals, least = rewards.total(scored.values), 1.0 if least is None else least
    found = summarize(groups, totals, least)
    if out is not None:
        _write(Path(out), groups, scored.values, totals, rewards.names)
    means = {n: _mean(scored.values[:, f]) for f, n in enumerate(rewards.names)}
    shares = ", ".join(f"{n} {v:.1%}" for n, v in found.items() if n != "reward")
    each = ", ".join(f"{name} {value:.3f}" for name, value in means.items())
    what = f"{counted(len(groups), 'prompt')} × {counted(samples, 'completion')}, {preset}"
    output.result(
        {**found, "rewards": means, "prompts": len(groups), "preset": preset},
        text=f"{shares}\nrewards: {each}\n{what}",
    )
    return ExitCode.DONE


def _write(path: Path, groups: Any, values: Any, totals: Any, names: Any) -> None:
    """Write a line for each completion: its prompt, its columns and its rewards."""
    from meshwright.text.json_text import write_atomically
    from meshwright.trainer.rollouts.completer import json_number

    size, lines = len(groups[0].completions), list[str]()
    for n, total in enumerate(totals):
        group = groups[n // size]
        each = {name: json_number(value) for name, value in zip(names, values[n], strict=True)}
        line = {
            "prompt": group.prompt,
            "columns": group.columns,
            "completion": group.completions[n % size],
            "reward": json_number(total),
            "rewards": each,
        }
        lines.append(json.dumps(line, ensure_ascii=False, default=str))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "\n".join(lines) + "\n")


def summarize(groups: Any, totals: Any, threshold: float) -> dict[str, float]:
    """Return pass@k for powers of two, the share of right majorities, and the mean reward.

    A completion is right if its reward reaches the threshold; one without a reward is not. pass@k
    is the chance that one of k completions, drawn from the n of a prompt, is right.
    """
    size = len(groups[0].completions)
    right = [[bool(value >= threshold) for value in row] for row in totals.reshape(-1, size)]
    found: dict[str, float] = {}
    for k in (2**n for n in range(size.bit_length())):
        chances = [1 - math.comb(size - sum(r), k) / math.comb(size, k) for r in right]
        found[f"pass@{k}"] = sum(chances) / len(chances)
    if size > 1:
        found["majority"] = sum(map(_majority, groups, right)) / len(groups)
    return {**found, "reward": _mean(totals)}


def _majority(group: Any, right: list[bool]) -> bool:
    """Whether the commonest answer is right; of several, the one that came first."""
    from meshwright.rewards.bundled import answer_of

    texts = [answer_of(c).strip() if isinstance(c, str) else str(c) for c in group.completions]
    return right[texts.index(Counter(texts).most_common(1)[0][0])]


def _mean(values: Any) -> float:
    known = [float(value) for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan
