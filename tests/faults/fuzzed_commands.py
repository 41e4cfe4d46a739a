"""Runs random command lines, each in a forked process, and says which end in an internal error.

A mother process imports the commands once, and never starts JAX's devices, so that it may fork.

    python fuzzed_commands.py COUNT SEED
"""

import importlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from meshwright.cli.commands import COMMANDS
from meshwright.cli.main import main as run_command
from meshwright.config.base import field_paths
from meshwright.config.groups import GROUPS, group_options
from meshwright.config.schema import Config

SECONDS = 20.0
"""Longer than this, a command line is valid, and works: it is ended and counts as such."""
LEFT_OUT = ("launch", "drill", "submit", "doctor")
"""Commands that start processes, ask a cluster, or measure this machine."""
VALUES = (
    *("", "null", "nan", "inf", "-inf", "-1", "0", "1", "7", "1e999", "9" * 40, "0x10", "1_000"),
    *("true", "[]", "{}", "[[[", "{a:1", "'", '"', "\\", "a=b", "=", "~", "@", "%", "*", ",", ":"),
    *("é☃", "x" * 300, "../..", "/", "/dev/null", "/proc/self/mem", ".", "a/b", "${x}", "${"),
    *("${oc.env:HOME}", "[1,2]", "[-1]", "[Infinity]", "{a: 1}", "'a b'", "data.x", "os:system"),
    *("fsdp=2,tensor=2", "8xH100", "0xH100", "-1", "1e-3", "bfloat16", "auto", "never", "best"),
)


def command_line(chance: random.Random) -> list[str]:
    """Return a random command line, near to one that works."""
    names = [name for name in COMMANDS if name not in LEFT_OUT]
    command = COMMANDS[chance.choice(names)]
    words = [*command.arguments.split(), "simulate=2"] if command.composes else []
    keys, options = list(field_paths(Config)), group_options()
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        value = chance.choice(VALUES)
        kind = chance.choices(range(5), (2, 2, 1, 1, 6))[0]
        if kind == 0 and command.flags:
            flag = chance.choice(command.flags)
            words += [flag.name, value] if chance.random() < 0.7 else [flag.name]
        elif kind == 1:
            group = chance.choice(GROUPS)
            words.append(f"{group}={chance.choice([*options[group], value])}")
        elif kind == 2:
            words.append(value)
        elif kind == 3:
            words.append(chance.choice(["+", "~", "++", "--", "-"]) + chance.choice(keys))
        else:
            words.append(f"{chance.choice(keys)}={value}")
    if command.composes and chance.random() < 0.5:
        words += ["--cfg", "job"]
    return [command.name, *words]


def run(words: list[str], folder: Path) -> tuple[str, str]:
    """Return how a command line ended, and what it printed if that is wrong."""
    told = folder / "told"
    pid = os.fork()
    if pid == 0:
        # Its own group, so that what it starts ends with it.
        os.setpgid(0, 0)
        os.chdir(tempfile.mkdtemp(dir=folder))
        file = os.open(told, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(file, 1)
        os.dup2(file, 2)
        code = 99
        try:
            code = run_command(words)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    until = time.monotonic() + SECONDS
    while (found := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > until:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "works", ""
        time.sleep(0.005)
    code, text = os.waitstatus_to_exitcode(found[1]), told.read_text(errors="replace")
    wrong = code not in (0, 1, 2, 3, 4, 75) or "Traceback (most recent call last)" in text
    return f"exit {code}", text[-2000:] if wrong else ""


def main(count: int, seed: int) -> None:
    """Run command lines, and print those that end in an internal error."""
    for name, command in COMMANDS.items():
        if name not in LEFT_OUT:
            importlib.import_module(command.module)
    chance, ends, wrong = random.Random(seed), Counter[str](), 0
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(count):
            words = command_line(chance)
            end, text = run(words, Path(folder))
            ends[end] += 1
            if text:
                wrong += 1
                print("WRONG", end, words, text, sep="\n", flush=True)
    print(f"{count} command lines: {dict(sorted(ends.items()))}, {wrong} wrong", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
