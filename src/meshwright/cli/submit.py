"""`meshwright launch --slurm` and `--kubernetes`: prints or submits the job of a cluster."""

from __future__ import annotations

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

from meshwright.cli.job_program import check_program
from meshwright.errors import EnvironmentProblem, ExitCode, UserError
from meshwright.launch.cluster_options import ClusterKind, ClusterOptions
from meshwright.launch.kubernetes import fixed_folder, manifest_text, manifests
from meshwright.launch.options import LaunchOptions
from meshwright.launch.slurm import LOG, sbatch_script
from meshwright.text.masking import mask_text, mask_words

if TYPE_CHECKING:
    from meshwright.config.compose import Composed


def submit(options: LaunchOptions, cluster: ClusterOptions) -> int:
    """Print the script or the manifest of a launch, or submit it."""
    _check_resumes(options.program)
    if cluster.kind is ClusterKind.SLURM:
        return _submit_slurm(options, cluster)
    return _submit_kubernetes(options, cluster)


def _check_resumes(program: tuple[str, ...]) -> None:
    for word in program:
        if word.startswith("resume=") and word not in ("resume=auto", "resume=must"):
            raise UserError(
                f"{word} does not go with a job of a cluster",
                why="when the cluster starts the job again, it resumes from its own run folder",
                fix="leave it out, and write hydra.run.dir=… to choose the folder, or "
                "model.init_from=… to start from the parameters of another run",
            )


def _submit_slurm(options: LaunchOptions, cluster: ClusterOptions) -> int:
    cwd = Path.cwd()
    composed = check_program(options, in_image=False)
    program, folder = _with_folder(options.program, composed, cluster.name)
    options = replace(options, program=program)
    if cluster.dry_run:
        shown = Path(mask_text(str(folder)))
        print(sbatch_script(*_masked(options, cluster), shown, cwd), end="")
        return ExitCode.DONE
    script = sbatch_script(options, cluster, folder, cwd)
    job = _run(["sbatch", "--parsable"], script, "job.sh").partition(";")[0]
    print(f"submitted SLURM job {job}")
    print(f"log: {cwd / LOG.replace('%j', job)}")
    print(f"run folder: {folder}")
    return ExitCode.DONE


def _submit_kubernetes(options: LaunchOptions, cluster: ClusterOptions) -> int:
    check_program(options, in_image=True)
    options = replace(options, program=fixed_folder(options.program, cluster))
    if options.program[0] == "train" and not cluster.claim:
        print(
            "remark: without --claim, checkpoints are lost with their pod, and a job that is "
            "restarted begins anew",
            file=sys.stderr,
        )
    if cluster.dry_run:
        print(manifest_text(manifests(*_masked(options, cluster))), end="")
        return ExitCode.DONE
    text = manifest_text(manifests(options, cluster))
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


def _masked(
    options: LaunchOptions, cluster: ClusterOptions
) -> tuple[LaunchOptions, ClusterOptions]:
    """Return the options without secrets, and say so if there were any."""
    program, sbatch = tuple(mask_words(options.program)), tuple(mask_words(cluster.sbatch))
    if (program, sbatch) != (options.program, cluster.sbatch):
        print(
            "remark: secrets are hidden in what --dry-run prints; without it, they are submitted",
            file=sys.stderr,
        )
    return replace(options, program=program), replace(cluster, sbatch=sbatch)


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
