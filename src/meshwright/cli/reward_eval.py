"""`meshwright eval --rewards`: how often a model's completions of prompts are right."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from meshwright.cli.arguments import Arguments
from meshwright.cli.output import Output
from meshwright.cli.text_model import decimal, number_format, open_model
from meshwright.errors import ExitCode, UserError, did_you_mean
from meshwright.runtime.activity import activity
from meshwright.text.units import counted

PRESETS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "standard": {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
    "liberal": {"temperature": 0.85, "top_k": 2000, "top_p": 1.0},
}


def run_with_rewards(arguments: Arguments, output: Output, path: str, file: str) -> int:
    """Complete the prompts of a file, score them, and print shares."""
    preset = arguments.flags.get("--preset", "greedy")
    if preset not in PRESETS:
        hint = did_you_mean(preset, PRESETS) or f"write one of {', '.join(PRESETS)}"
        raise UserError(f"there is no preset `{preset}`", fix=hint)
    import numpy as np

    from meshwright.data.prompts import PROMPT, prompt_source
    from meshwright.rewards.reward_set import read_rewards
    from meshwright.trainer.rollouts.completer import Completer

    rewards = read_rewards(arguments.flags["--rewards"].split(","))
    source = prompt_source(path=file, field=arguments.flags.get("--field", PROMPT))
    columns = source.rows(np.arange(len(source)))
    rewards.check([name for name in columns if name != PROMPT])
    model, settings = open_model(arguments, path)
    completer = Completer(rewards, settings.tokenizer, settings.file)
    samples = arguments.number("--samples", 1 if preset == "greedy" else 8)
    with activity(f"completing {counted(len(source), 'prompt')}") as report:
        rows = completer.complete(
            model,
            columns,
            report,
            max_new_tokens=arguments.number("--max-new-tokens", 256, most=2**31 - 1),
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
    for text in filter(None, [rewards.note, *scored.warnings()]):
        output.say(text)
    least = decimal(arguments, "--threshold")
    found = summarize(groups, rewards.total(scored.values), 1.0 if least is None else least)
    means = {n: _mean(scored.values[:, f]) for f, n in enumerate(rewards.names)}
    shares = ", ".join(f"{n} {v:.1%}" for n, v in found.items() if n != "reward")
    each = ", ".join(f"{name} {value:.3f}" for name, value in means.items())
    what = f"{counted(len(groups), 'prompt')} × {counted(samples, 'completion')}, {preset}"
    output.result(
        {**found, "rewards": means, "prompts": len(groups), "preset": preset},
        text=f"{shares}\nrewards: {each}\n{what}",
    )
    return ExitCode.DONE


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
