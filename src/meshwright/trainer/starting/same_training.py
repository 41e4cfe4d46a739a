"""What a run from Python trains, as a checkpoint records it, and what has changed since."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import Setting, UserError
from meshwright.program.jaxpr.fingerprint import fingerprint
from meshwright.runtime.versions import own_code, package_versions
from meshwright.step.assemble import Assembled
from meshwright.tasks.grpo import GRPO
from meshwright.text.units import counted
from meshwright.trainer.starting.learning_rate import find_schedule, rate_at
from meshwright.trainer.starting.process_facts import optimizer_settings
from meshwright.trainer.starting.resume import CHANGEABLE
from meshwright.trainer.trainer_settings import TrainerSettings

SAMPLED_STEPS = (0, 1, 10, 100, 1000, 10_000)
"""Where schedules are compared: their code may differ where their settings do not."""
SHOWN = 4


def training_facts(trainer: TrainerSettings, assembled: Assembled) -> dict[str, Any]:
    """Return what says whether a later run trains the same, as JSON values.

    The loss is the digest of its traced program, which depends on the number of samples and on
    versions: it can be compared only where `traced_for` is the same.
    """
    plan, schedule = assembled.plan, find_schedule(trainer.optimizer)
    versions = package_versions()
    return {
        "loss": fingerprint(assembled.traced.closed),
        "traced_for": {
            "samples per microbatch": plan.batch.global_batch_size
            // plan.batch.gradient_accumulation_steps,
            "precision": plan.precision,
            "blocks": plan.sharding.blocks,
            "stages": [plan.size("pipe"), plan.num_chunks],
            "jax": versions.get("jax", ""),
            "flax": versions.get("flax", ""),
            "meshwright": own_code(),
        },
        "optimizer": optimizer_settings(trainer.optimizer),
        "rates": [] if schedule is None else [rate_at(schedule, n) for n in SAMPLED_STEPS],
        "clip_norm": trainer.clip_norm,
        "ema_decay": trainer.ema_decay,
        "seed": trainer.seed,
        "rollouts": {} if trainer.task is None else rollout_settings(trainer.task),
    }


def rollout_settings(task: GRPO) -> dict[str, Any]:
    """Return what decides completions and their scores: rewards by their names."""
    time_only = {key.rpartition(".")[2] for key in CHANGEABLE}
    found = task.model_dump(exclude={"rewards", "tokenizer", *time_only})
    return {name: list(v) if isinstance(v, tuple) else v for name, v in found.items()}


def check_same_average(before: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    """Refuse a checkpoint with a moving average for a run without one, and the reverse."""
    was, wanted = before.get("ema_decay"), now.get("ema_decay")
    if before and (was is None) != (wanted is None):
        raise UserError(
            f"ema_decay was {was} in the checkpoint {path} and is {wanted}",
            why="the average of the weights is a part of the state",
            fix=f"leave {Setting('training.ema_decay')} as it was, or start another run from these "
            f"parameters with {Setting('model.init_from', str(path))}",
        )


def training_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List what a run trains differently from the run of its checkpoint."""
    changes = [
        f"{name} was {before[name]} and is {now[name]}"
        for name in ("clip_norm", "ema_decay", "seed")
        if before[name] != now[name]
    ]
    pairs = zip(SAMPLED_STEPS, before["rates"], now["rates"], strict=False)
    rates = [each for each in pairs if not math.isclose(*each[1:], rel_tol=1e-6)]
    if rates:
        step, was, rate = rates[0]
        changes.append(
            f"the learning rate after {counted(step, 'step')} was {was:.6g} and is {rate:.6g}"
        )
    old, new = before["optimizer"], now["optimizer"]
    settings = [
        f"the optimizer's `{key}` was {old.get(key, 'not there')} and is "
        f"{new.get(key, 'not there')}"
        for key in dict.fromkeys([*old, *new])
        # As text where they differ: nan is not equal to itself.
        if old.get(key, "") != new.get(key, "") and str(old.get(key)) != str(new.get(key))
        # What optax calls the rate in its own settings has been said.
        if not (rates and key.endswith("step_size"))
    ]
    more = f"{len(settings) - SHOWN} more settings of the optimizer differ"
    changes += settings[:SHOWN] + [more] * (len(settings) > SHOWN)
    now_is = now["rollouts"]
    was = before.get("rollouts", now_is)
    changes += [
        f"{name} was {was.get(name)} and is {now_is.get(name)}"
        for name in dict.fromkeys([*was, *now_is])
        if was.get(name) != now_is.get(name)
    ]
    return [*changes, *loss_changes(before, now)]


def loss_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say whether the loss is another one, if that can be seen."""
    if not before or before["loss"] == now["loss"] or before["traced_for"] != now["traced_for"]:
        return []
    return ["the model or the loss computes something else than before"]


def not_compared(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say what of a checkpoint's run could not be compared with this one, and why."""
    if not before:
        return [
            "the checkpoint does not say with which loss and optimizer it was trained, so they "
            "were not compared"
        ]
    old, new = before["traced_for"], now["traced_for"]
    different = [name for name in new if old.get(name) != new[name]]
    if before["loss"] == now["loss"] or not different:
        return []
    return [
        "whether model and loss are those of the checkpoint was not checked: "
        f"{', '.join(different)} changed, and with that the traced program"
    ]
