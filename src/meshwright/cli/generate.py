"""`meshwright generate`: continues prompts, keeps a conversation, or works through a file."""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.cli.arguments import Arguments
from meshwright.cli.output import Output
from meshwright.cli.text_model import decimal, number_format, open_model, read_lines, read_text
from meshwright.errors import ExitCode, UserError
from meshwright.runtime.activity import activity
from meshwright.text.json_text import parse_json, write_atomically
from meshwright.text.units import counted

MAX_NEW_TOKENS = 256
_NUMBERS = ("temperature", "top-p", "min-p", "repetition-penalty")
_COUNTS = ("top-k", "min-new-tokens")
_ASKED = ("messages", "prompt", "tokens")
_KEYS = {"prompt": str, "tokens": list, "messages": list}
_EXAMPLE = '{"prompt": "Once"}, {"tokens": [1, 2]} or {"messages": [{"role": "user", …}]}'


def run(arguments: Arguments, output: Output) -> int:
    """Continue what was asked for, and print or write it."""
    (path,) = arguments.words("a run or a folder", example='RUN --prompt "Once"')
    modes = [flag for flag in ("--prompt", "--file", "--chat") if arguments.has(flag)]
    if not modes or ("--file" in modes and len(modes) > 1):
        raise UserError(
            "generate takes --prompt, --chat or --file",
            why=f"given: {' and '.join(modes) or 'none of them'}",
            fix='write --prompt "Once upon a time"',
        )
    # Files are read before the model is loaded.
    file = Path(arguments.flags.get("--file", ""))
    prompts = read_lines(file, _KEYS, _EXAMPLE) if "--file" in modes else []
    done = _written(arguments, output) if "--file" in modes else {}
    from meshwright.generation.generate import make_generator
    from meshwright.generation.text_settings import read_text_settings

    if "--chat" in modes and Path(path).is_dir():
        # Before the model is loaded, and anything is typed.
        read_text_settings(path).chat.check()
    model, settings = open_model(arguments, path)
    if "--chat" in modes or (prompts and all("messages" in prompt for prompt in prompts)):
        settings = replace(settings, answers=True)
    generator = make_generator(
        model,
        tokenizer=settings,
        max_new_tokens=arguments.number("--max-new-tokens", MAX_NEW_TOKENS, most=2**31 - 1),
        stop=arguments.flags.get("--stop", ()),
        samples=arguments.number("--samples", 1),
        seed=arguments.number("--seed", 0, least=0, most=2**32 - 1),
        batch_size=arguments.number("--batch-size", 64, most=2**20),
        mesh=arguments.flags.get("--mesh"),
        dtype=number_format(arguments, output, settings, path),
        **_sampling(arguments),
    )
    for remark in generator.remarks:
        output.say(remark)
    if arguments.has("--seed") and generator.sampling.greedy:
        output.say("--seed changes nothing: nothing is drawn without --temperature, such as 1")
    if "--file" in modes:
        return _file(generator, prompts, done, arguments, output)
    try:
        if "--chat" in modes:
            return _chat(generator, arguments, output)
        return _prompt(generator, arguments.flags["--prompt"], output)
    except KeyboardInterrupt:
        output.say("\nwhat is printed above is all there is; --file with --out keeps what is done")
        raise


def _prompt(generator: Any, prompt: str, output: Output) -> int:
    from meshwright.generation.generate import generated
    from meshwright.generation.text_settings import printable

    started, streams = time.perf_counter(), generator.samples == 1 and not output.as_json
    rows = generator(generator.read(prompt), _streamed(output) if streams else None)
    found = generated(generator, rows, started)
    if streams:
        output.text("\n")
    elif not output.as_json:
        output.text("\n".join(f"{each.sample}: {printable(str(each.text))}" for each in found))
    output.result(
        {
            "tokens_per_second": found.tokens_per_second,
            "tokens_per_second_compiled": found.pace.rate,
            "remarks": list(found.remarks),
            "continuations": [_line(each) for each in found],
        }
    )
    for remark in found.remarks[len(generator.remarks) :]:
        output.say(remark)
    new = counted(found.num_tokens, "token")
    output.say(f"{new}, {found.pace.describe(found.tokens_per_second)}, ended by {rows[0].ended}")
    return ExitCode.DONE


def _streamed(output: Output) -> Callable[[Any], None]:
    from meshwright.generation.text_settings import printable

    return lambda piece: output.stream(printable(piece.text))


def _chat(generator: Any, arguments: Arguments, output: Output) -> int:
    """Answer each line, with all lines before it."""
    from meshwright.generation.token_loop import Prompt

    system = arguments.flags.get("--system")
    messages = [{"role": "system", "content": system}] if system else []
    given = arguments.flags.get("--prompt")
    for number, said in enumerate(_lines() if given is None else [given]):
        messages.append({"role": "user", "content": said})
        tokens = generator.check(number, messages)
        stream = None if output.as_json else _streamed(output)
        (row,) = generator([Prompt(number, tokens)], stream)
        messages.append({"role": "assistant", "content": row.text})
        if not output.as_json:
            output.text("\n")
    output.result({"messages": messages})
    return ExitCode.DONE


def _lines() -> Iterator[str]:
    """Yield what the user types, until the end of the input."""
    asks = sys.stdin.isatty()
    while True:
        if asks:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _file(
    generator: Any,
    prompts: list[dict[str, Any]],
    done: dict[int, Any],
    arguments: Arguments,
    output: Output,
) -> int:
    """Continue the prompts of a file that are not written yet, batch by batch."""
    from meshwright.generation.token_loop import Prompt

    # What decides the tokens of a prompt, besides the model.
    decides = (generator.sampling, generator.max_new_tokens, generator.stops, generator.seed)
    asked = hashlib.sha256(repr(decides).encode()).hexdigest()[:12]
    for number, (prompt, digest) in done.items():
        same = number < len(prompts) and prompts[number] == prompt
        if not same or digest != asked:
            raise UserError(
                f"{arguments.flags['--out']} was written for other "
                + ("settings" if same else "prompts"),
                why="sampling, stops, seed or --max-new-tokens were others"
                if same
                else f"its prompt {number} is {json.dumps(prompt)[:80]}",
                fix="name another file, or remove this one",
            )
    left = [number for number in range(len(prompts)) if number not in done]
    if done:
        output.say(f"{len(done):,} of {counted(len(prompts), 'prompt')} were written before")
    asked = {n: next(prompts[n][key] for key in _ASKED if key in prompts[n]) for n in left}
    read = [Prompt(n, generator.check(n, prompt)) for n, prompt in asked.items()]
    size, started, tokens = max(1, generator.batch_size // generator.samples), time.monotonic(), 0
    with activity("generating") as progress, _opened(arguments, output) as write:
        for start in range(0, len(read), size):
            try:
                rows = generator(read[start : start + size])
            except KeyboardInterrupt:
                kept = arguments.flags.get("--out")
                where = f" and in {kept}; the same command continues there" if kept else ""
                said = f"{len(done) + start:,} of {counted(len(prompts), 'prompt')} are done"
                output.say(said + (where or "; --out keeps them"))
                raise
            lines = [
                {"input": prompts[row.prompt.number], **_line(row), "settings": asked}
                for row in rows
            ]
            # All at once, so that Ctrl-C leaves whole prompts.
            write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
            tokens += sum(len(row.tokens) for row in rows)
            rate = tokens / (time.monotonic() - started)
            count = len(done) + min(start + size, len(read))
            progress(f"{count:,}/{len(prompts):,} prompts, {rate:,.0f} tokens/s")
    rate = tokens / max(time.monotonic() - started, 1e-9)
    summary = {"prompts": len(left), "new_tokens": tokens, "tokens_per_second": rate}
    if arguments.has("--out"):
        output.result(summary)
    said = generator.pace.describe(rate)
    output.say(f"{counted(len(left), 'prompt')}, {counted(tokens, 'token')}, {said}")
    for remark in sorted(generator.notes):
        output.say(remark)
    return ExitCode.DONE


def _written(arguments: Arguments, output: Output) -> dict[int, Any]:
    """Return the prompts whose samples are all written, and drop what a killed process left."""
    path = Path(arguments.flags.get("--out", ""))
    if not arguments.has("--out") or not path.exists():
        return {}
    found: dict[int, list[Any]] = {}
    for line in read_text(path).splitlines():
        value = parse_json(line)
        if isinstance(value, dict) and "input" in value and "index" in value:
            found.setdefault(value["index"], []).append(
                (value["input"], value.get("settings"), line)
            )
    samples = arguments.number("--samples", 1)
    whole = {number: lines for number, lines in found.items() if len(lines) == samples}
    kept = "".join(f"{line[-1]}\n" for lines in whole.values() for line in lines)
    if kept != read_text(path) and not output.silent:
        write_atomically(path, kept)
    return {number: lines[0][:2] for number, lines in whole.items()}


@contextmanager
def _opened(arguments: Arguments, output: Output) -> Generator[Callable[[str], None]]:
    """Yield a function that writes text to --out at once, or to stdout without it."""
    if not arguments.has("--out") or output.silent:
        yield output.stream
        return
    path = Path(arguments.flags["--out"])
    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}", why=str(error)) from error
    with file:

        def write(text: str) -> None:
            file.write(text)
            file.flush()

        yield write


def _line(row: Any) -> dict[str, Any]:
    """Return a row as JSON has it."""
    names = ("sample", "text", "tokens", "log_probs", "ended")
    return {"index": row.prompt.number, **{name: getattr(row, name) for name in names}}


def _sampling(arguments: Arguments) -> dict[str, Any]:
    """Return the settings of sampling that were given."""
    given: dict[str, Any] = {name: decimal(arguments, f"--{name}") for name in _NUMBERS}
    given |= {name: arguments.given_number(f"--{name}", most=2**31, least=0) for name in _COUNTS}
    if text := arguments.flags.get("--stop-tokens"):
        words = text.replace(",", " ").split()
        if not all(word.isdecimal() for word in words):
            raise UserError(f"--stop-tokens {text} is not valid", fix="write --stop-tokens 1,2")
        given["stop-tokens"] = tuple(map(int, words))
    return {name.replace("-", "_"): value for name, value in given.items()}
