"""A request: one command with its composed config, its devices and its output."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.arguments import Arguments
from meshwright.cli.output import Output
from meshwright.config.compose import Composed, compose_config, parse_overrides, validate
from meshwright.config.origins import set_by_user
from meshwright.config.schema import Config
from meshwright.hardware import MEMORY_SHARE
from meshwright.inputs.plan_file import (
    KEY,
    apply_plan_file,
    made_for_settings,
    refuse_unnamed_model,
)
from meshwright.processes import process_count
from meshwright.processes.handshake import compare_processes, describe_own_devices
from meshwright.runtime.versions import own_code, package_versions
from meshwright.text.masking import mask_words
from meshwright.weights.resolve import resolve_weights

if TYPE_CHECKING:
    from meshwright.plan import Plan
    from meshwright.step.assemble import Assembled
    from meshwright.trainer import Trainer
    from meshwright.trees import Batch


@dataclass(frozen=True)
class Request:
    """The input of a command: its words and its config, as composed by Hydra and validated."""

    arguments: Arguments
    composed: Composed
    config: Config
    output: Output

    def plan(self) -> Plan:
        """Return the plan for the devices JAX has."""
        import jax

        from meshwright.plan import make_plan

        return make_plan(self.config, jax.device_count())

    def trainer(self, run_dir: Path | None = None) -> Trainer:
        """Return the trainer that the config describes, for the devices JAX has."""
        from meshwright.trainer import Trainer

        # The virtual devices and the settings of the plan are there already.
        decided = self.config.model_copy(update={"simulate": None, "plan": None})
        return Trainer.from_config(decided, run_dir=run_dir)

    def report_unused_settings(self, plan: Plan, *, steps_flag: str = "") -> list[str]:
        """Print and return remarks about settings that have no effect.

        ``steps_flag`` is the flag that says how many steps the command runs, if it has one.
        """
        from rich.text import Text

        from meshwright.plan import unused_settings

        remarks = unused_settings(self.config, plan)
        if steps_flag:
            remarks += [
                f"{text} only shapes the learning rate here; {steps_flag} N says how many steps run"
                for text in self.composed.overrides
                if text.lstrip("+").partition("=")[0] in DURATION
            ]
        for remark in remarks:
            self.output.say(Text(f"remark: {remark}"))
        return remarks


def make_request(arguments: Arguments, output: Output) -> Request:
    """Compose and validate the config, then prepare its devices."""
    arguments = replace(arguments, overrides=tuple(map(as_setting, arguments.overrides)))
    arguments = _as_planned(arguments)
    composed = compose(arguments)
    config = validate(composed)
    if arguments.command.needs_devices:
        composed = prepare_devices(config, composed)
        start_devices()
        _compare(arguments, config)
        if config.mesh.auto or config.training.micro_batch_size == "auto":
            from rich.text import Text

            from meshwright.cli.auto_settings import choose_settings

            keep_programs(config)
            config, composed, line = choose_settings(config, composed)
            output.say(Text(line))
    return Request(arguments, composed, config, output)


def _compare(arguments: Arguments, config: Config) -> None:
    """Compare what all processes are about to do, before they start their devices and after."""
    if process_count() == 1:
        return
    import jax

    from meshwright.launch.environments import count_gpus

    flags = ("jax_enable_x64", "jax_default_matmul_precision", "jax_platforms")
    compare_processes(
        {
            "command": arguments.command.name,
            **config.model_dump(mode="json"),
            "version": {**package_versions(), "meshwright code": own_code()},
            "jax": {name: jax.config.values.get(name) for name in flags},
            # Processes that start devices of different platforms would wait for each other.
            "devices": {"GPUs": count_gpus(os.environ)},
        }
    )
    compare_processes({"devices": describe_own_devices()})


def compose(arguments: Arguments) -> Composed:
    """Compose the config, and complete it from the files that model.weights and plan name."""
    overrides = [as_setting(text) for text in arguments.overrides]
    composed = compose_config(overrides, arguments.config_dir, arguments.config_file)
    resolved = resolve_weights(composed.values, saved=composed.config_file is not None)
    composed = replace(composed, values=resolved.values, read_from=resolved.origins)
    return _with_plan(composed)


def assemble_first(trainer: Trainer) -> tuple[Batch, Assembled]:
    """Return the first batch of a config's data, and the step for batches like it."""
    from meshwright.trainer.starting.given_data import first_batch, planned_batch_size

    assert trainer.defaults.recipe is not None
    batch = first_batch(trainer.defaults.recipe.data, planned_batch_size(trainer))
    return batch, trainer.assemble(batch)


DURATION = ("training.steps", "training.max_duration")
"""The settings that say how long to train."""

DESCRIBING = ("model", "task", "data")
"""The groups of settings that describe what is trained."""


def setting_group(text: str) -> str:
    """Return the group that an override belongs to: ``model`` for ``+model.width=4``."""
    return re.split(r"[.=@]", text.lstrip("+~"), maxsplit=1)[0]


def describing(words: Sequence[str]) -> list[str]:
    """Return the settings that describe what is trained, except for those with secrets."""
    return [w for w in words if setting_group(w) in DESCRIBING and mask_words([w]) == [w]]


def check_planned_model(request: Request, num_parameters: int) -> None:
    """Refuse a plan that was made for another than the default model, if no model is written."""
    if not any(setting_group(word) == "model" for word in request.arguments.overrides):
        refuse_unnamed_model(request.config.plan, num_parameters)


def _as_planned(arguments: Arguments) -> Arguments:
    """Return the arguments, completed by what the plan that they name was made for.

    `train` is left alone: its command line has to name the model and the data.
    """
    paths = [text.partition("=")[2] for text in arguments.overrides if setting_group(text) == KEY]
    if arguments.command.name not in ("plan", "rehearse") or not paths:
        return arguments
    given = set(map(setting_group, arguments.overrides))
    given |= {"hardware"} if "simulate" in given else set()
    given |= set(DESCRIBING) if given & set(DESCRIBING) else set()
    more = [text for text in made_for_settings(paths[-1]) if setting_group(text) not in given]
    return replace(arguments, overrides=(*arguments.overrides, *more))


def as_setting(text: str) -> str:
    """Return an argument as a setting: a YAML file without a key is a plan."""
    is_file = "=" not in text and Path(text).suffix in (".yaml", ".yml")
    return f"{KEY}={text}" if is_file else text


def _with_plan(composed: Composed) -> Composed:
    """Return the config with the settings of its plan; a saved config has them already."""
    named = KEY in {override.key_or_group for override in parse_overrides(composed.overrides)}
    if composed.values.get(KEY) is None or (composed.config_file is not None and not named):
        return composed
    decided = set_by_user(validate(composed), composed)
    values, origins = apply_plan_file(composed.values, decided)
    return replace(composed, values=values, read_from={**composed.read_from, **origins})


def prepare_devices(config: Config, composed: Composed) -> Composed:
    """Simulate devices if asked and connect to other processes; must run before JAX starts.

    Folders become those of process 0, because their names contain the time.
    """
    from meshwright import processes
    from meshwright.launch.connect import connect_processes

    # JAX takes three quarters by default, and a plan may need more.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(MEMORY_SHARE))
    connect_processes(config.simulate)
    run_dir, sweep_dir = processes.broadcast([str(composed.run_dir), str(composed.sweep_dir)])
    return replace(composed, run_dir=Path(run_dir), sweep_dir=Path(sweep_dir))


def keep_programs(config: Config) -> None:
    """Turn the compilation cache on or off; unless it is set, this waits for the devices."""
    from meshwright.compiled.disk_cache import use_disk_cache

    use_disk_cache(config.compilation_cache)


def start_devices() -> None:
    """Start JAX's devices in a thread, if this is the only process.

    A GPU takes two seconds, and as long again until its first program runs. Whoever asks for
    devices meanwhile waits for them, and sees the error if they do not start. Several processes
    start theirs together, where each of them waits for the others.
    """
    # Two threads must not import it at once.
    import jax

    if process_count() == 1:
        # Not a daemon: a command that ends early must not leave in the middle of it.
        threading.Thread(target=_start, args=(jax,), name="device-start").start()


def _start(jax: Any) -> None:
    with suppress(Exception):
        if jax.default_backend() != "cpu":
            jax.random.key_data(jax.random.key(0)).block_until_ready()
