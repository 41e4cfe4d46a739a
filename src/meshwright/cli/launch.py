"""`meshwright launch`: a command or a script in several processes, here or on a cluster."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cli.arguments import Arguments, parse_arguments
from meshwright.errors import EnvironmentProblem, ExitCode, UserError
from meshwright.launch.kubernetes import fixed_folder, manifest_text, manifests
from meshwright.launch.merged_output import MergedOutput
from meshwright.launch.options import ClusterKind, LaunchOptions, parse_launch
from meshwright.launch.restarts import Attempts
from meshwright.launch.slurm import LOG, check_time_to_save, sbatch_script
from meshwright.launch.team import MachinesLeft, ProcessesLeft, Team
from meshwright.launch.whole_run import find_run, refuse_outer_launcher
from meshwright.text.masking import mask_text, mask_words

if TYPE_CHECKING:
    from meshwright.config.compose import Composed
    from meshwright.config.schema import Config


def _submit(options: LaunchOptions) -> int:
    """Print the script or the manifest of a launch, or submit it."""
    for word in options.program:
        if word.startswith("resume=") and word not in ("resume=auto", "resume=must"):
            raise UserError(
                f"{word} cannot be used with a cluster job",
                why="when the cluster restarts the job, it resumes from its own run folder",
                fix="leave it out, and write hydra.run.dir=… to choose the folder, or "
                "model.init_from=… to start from the parameters of another run",
            )
    if options.cluster is ClusterKind.SLURM:
        return _submit_slurm(options)
    return _submit_kubernetes(options)


def _submit_slurm(options: LaunchOptions) -> int:
    from meshwright.cli.request import compose
    from meshwright.config.compose import validate

    check_time_to_save(options)
    cwd = Path.cwd()
    arguments = _train_arguments(options)
    composed = None if arguments is None else compose(arguments)
    if composed is not None:
        config = validate(composed)
        _check_modules(config)
        _check_mesh(config, options)
    program, folder = _with_folder(options.program, composed, options.name)
    options = replace(options, program=program)
    if options.dry_run:
        print(sbatch_script(_masked(options), Path(mask_text(str(folder))), cwd), end="")
        return ExitCode.DONE
    script = sbatch_script(options, folder, cwd)
    job = _run(["sbatch", "--parsable"], script, "job.sh").partition(";")[0]
    print(f"submitted SLURM job {job}")
    print(f"log: {cwd / LOG.replace('%j', job)}")
    print(f"run folder: {folder}")
    return ExitCode.DONE


def _submit_kubernetes(options: LaunchOptions) -> int:
    if arguments := _train_arguments(options):
        config = _check_image_config(arguments)
        if config is not None:
            _check_mesh(config, options)
    options = replace(options, program=fixed_folder(options))
    if options.program[0] == "train" and not options.claim:
        print(
            "remark: without --claim, checkpoints are lost with their pod, and a job that is "
            "restarted starts from the beginning",
            file=sys.stderr,
        )
    if options.dry_run:
        print(manifest_text(manifests(_masked(options))), end="")
        return ExitCode.DONE
    text = manifest_text(manifests(options))
    print(_run(["kubectl", "create", "-f", "-"], text, "job.yaml"))
    return ExitCode.DONE


def _with_folder(
    program: tuple[str, ...], composed: Composed | None, name: str
) -> tuple[tuple[str, ...], Path]:
    """Return the program and its run folder, which is the same each time the job starts."""
    if composed is None:
        return program, Path("outputs").absolute() / name / f"{datetime.now():%Y-%m-%d/%H-%M-%S}"
    from meshwright.config.compose import quoted

    folder = composed.run_dir.absolute()
    value = str(folder) if re.fullmatch(r"[\w./-]+", str(folder)) else quoted(str(folder))
    others = (word for word in program if not word.startswith("hydra.run.dir="))
    return (*others, f"hydra.run.dir={value}"), folder


def _masked(options: LaunchOptions) -> LaunchOptions:
    """Return the options without secrets, and print a remark if there were any."""
    program, sbatch = tuple(mask_words(options.program)), tuple(mask_words(options.sbatch))
    if (program, sbatch) != (options.program, options.sbatch):
        print(
            "remark: secrets are hidden in what --dry-run prints; without it, they are submitted",
            file=sys.stderr,
        )
    return replace(options, program=program, sbatch=sbatch)


def _run(command: Sequence[str], text: str, file: str) -> str:
    """Run a program of the cluster, with the text as its input, and return what it prints."""
    program = command[0]
    if shutil.which(program) is None:
        by_hand = ["sbatch", file] if program == "sbatch" else ["kubectl", "create", "-f", file]
        raise EnvironmentProblem(
            f"{program} is not installed on this machine",
            fix=f"add --dry-run to the flags of launch, write its output to {file}, and run "
            f"`{shlex.join(by_hand)}` where {program} is installed",
        )
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{program} refused the job", why=done.stderr.strip())
    return done.stdout.strip()


def _train_arguments(options: LaunchOptions) -> Arguments | None:
    """Return the arguments of `train`, whose config is checked before the job waits in a queue."""
    if not options.is_own_command:
        return None
    arguments = parse_arguments(options.program)
    return arguments if arguments.command.name == "train" else None


def _check_mesh(config: Config, options: LaunchOptions) -> None:
    """Raise if the devices of the job cannot have the mesh or the batch, as `train` would."""
    from meshwright.plan import make_plan

    planned = config.mesh.auto or config.training.micro_batch_size == "auto"
    count = None if planned or config.simulate is not None else options.num_devices
    if count is not None:
        make_plan(config, count)


def _check_image_config(arguments: Arguments) -> Config | None:
    """Check the config of `train` as far as its files, which may be in the image, are here."""
    from meshwright.cli.request import compose
    from meshwright.config.compose import compose_config, validate

    for flag in ("--config-dir", "--config"):
        path = arguments.flags.get(flag)
        if path and not Path(path).exists():
            print(
                f"remark: the config is not checked, because {flag} {path} is not on this machine",
                file=sys.stderr,
            )
            return None
    composed = compose_config(arguments.overrides, arguments.config_dir, arguments.config_file)
    model = composed.values.get("model")
    weights = model.get("weights") if isinstance(model, dict) else None
    named = [path for path in (weights, composed.values.get("plan")) if path is not None]
    if all(Path(str(path)).exists() for path in named):
        composed = compose(arguments)
    return validate(composed)


def _check_modules(config: Config) -> None:
    """Raise if a module of the user's own that the config names does not exist here."""
    from meshwright.config.builders import check_module_exists

    training = config.training
    kinds = {
        f"{name}.kind": getattr(config, name).kind
        for name in ("model", "task", "data", "optimizer")
    }
    for key, kind in {**kinds, "training.eval_loss": training.eval_loss}.items():
        if kind is not None and ":" in kind:
            check_module_exists(f"{key}={kind}", kind)
    for name in training.callbacks:
        check_module_exists(f"training.callbacks=[{name}]", name)


def launch(words: Sequence[str]) -> int:
    """Start the processes and return the exit code of the last attempt.

    With --slurm or --kubernetes, submit a job that starts them.
    """
    options = parse_launch(words)
    if options.cluster is not None:
        return _submit(options)
    run = find_run(options, os.environ)
    if (options.nodes or 1) == 1:
        refuse_outer_launcher(options.nprocs, os.environ, is_shared=run.is_shared)
    # The file descriptor, because `sys.stderr` may have been replaced by a text-only stream.
    with open(2, "wb", buffering=0, closefd=False) as stderr:
        lines = MergedOutput(stderr)
        team: Team = ProcessesLeft(options, os.environ, run)
        if options.min_nodes is not None:
            team = MachinesLeft(options, os.environ, run, lines.notify)
        return Attempts(options, os.environ, stderr, team, lines.notify).run()
