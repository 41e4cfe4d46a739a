"""The sbatch script of a launch: processes by srun, requeued when they are preempted or fail."""

import re
import shlex
import textwrap
from pathlib import Path

from meshwright.config.launchers import process_variables, split_address
from meshwright.errors import ExitCode, UserError
from meshwright.launch.flags import TIME_LIMIT
from meshwright.launch.options import LaunchOptions
from meshwright.processes import JOIN_TIMEOUT
from meshwright.text.units import counted

LOG = "slurm-%j.out"
_SIGNAL_LEAD = 60
"""How many seconds before the end SLURM sends a signal for which no time is given."""
_USR1_UNHANDLED = 128 + 10
"""Exit code of a process that SIGUSR1 ended before Python could handle it."""

# Each task runs under this program, which notes the exit code of the first task that ends in an
# error: srun reports the largest, and ends the others by SIGTERM, upon which they save and exit 75
# too. A preempted task counts as done for srun, so that it leaves the others time to save.
_TASK = f"""\
trap : USR1 TERM
"$@"
code=$?
if [ "$code" -ne 0 ]; then
  (set -o noclobber; echo "$code" > "$MESHWRIGHT_FIRST_EXIT") 2>/dev/null
fi
case "$code" in {int(ExitCode.PREEMPTED)} | {_USR1_UNHANDLED}) exit 0 ;; esac
exit "$code"
"""

_SCRIPT = r"""#!/bin/bash
{directives}
set -u
folder={folder}
mkdir -p "$folder" || exit 2
export MESHWRIGHT_FIRST_EXIT="$folder/slurm-$SLURM_JOB_ID.exit"
failures="$folder/slurm-$SLURM_JOB_ID.failures"
rm -f "$MESHWRIGHT_FIRST_EXIT"

# Variables of another launcher around sbatch would contradict SLURM's.
unset -v \
  {unset}
{coordinator}
export PYTHONUNBUFFERED=1
{join}# srun does not inherit it from sbatch.
if [ -n "${{SLURM_CPUS_PER_TASK:-}}" ]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi

srun --label --kill-on-bad-exit=1 --wait=0 bash -c {task} task \
  {command}
code=$?
# On network file systems, listing the folder shows the files of other machines.
ls "$folder" > /dev/null
if [ -s "$MESHWRIGHT_FIRST_EXIT" ]; then code=$(head -n 1 "$MESHWRIGHT_FIRST_EXIT"); fi
rm -f "$MESHWRIGHT_FIRST_EXIT"

case "$code" in
  0) exit 0 ;;
  {preempted} | {unhandled})
    echo "preempted: job $SLURM_JOB_ID is requeued and resumes"
    scontrol requeue "$SLURM_JOB_ID"
    exit "$code" ;;
  {bad_input})
    echo "exit code {bad_input}, a mistake in the input: job $SLURM_JOB_ID is not requeued"
    exit "$code" ;;
  {nothing_fits})
    echo "exit code {nothing_fits}, too little memory: job $SLURM_JOB_ID is not requeued"
    exit "$code" ;;
  {not_finite})
    echo "exit code {not_finite}, a step that is not finite: job $SLURM_JOB_ID is not requeued"
    exit "$code" ;;
esac
echo "$(date '+%Y-%m-%d %H:%M:%S') exit code $code" >> "$failures"
count=$(wc -l < "$failures")
if [ "$count" -le {max_restarts} ]; then
  echo "exit code $code: job $SLURM_JOB_ID is requeued, restart $count of {max_restarts}"
  scontrol requeue "$SLURM_JOB_ID"
else
  echo "exit code $code: job $SLURM_JOB_ID has failed $count times and is not requeued"
fi
exit "$code"
"""

_FIRST_NODE = r"""# The address by which SLURM knows the first node: its name need not resolve.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol --oneliner show node "$first" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
export MASTER_ADDR="${address:-$first}"
"""
# Jobs that share a machine get different ports.
_PORT = 'export MASTER_PORT="$((SLURM_JOB_ID % 4096 + 61440))"'


def sbatch_script(launch: LaunchOptions, folder: Path, cwd: Path) -> str:
    """Return the sbatch script of a launch.

    The run folder stays the same after each requeue; the log is written to the working directory.
    """
    join = "" if launch.join_timeout is None else f"export {JOIN_TIMEOUT}={launch.join_timeout:g}\n"
    others = sorted(name for name in process_variables() if not name.startswith("SLURM_"))
    return _SCRIPT.format(
        directives="\n".join(f"#SBATCH {option}" for option in _options(launch, cwd)),
        folder=shlex.quote(str(folder)),
        unset=" \\\n  ".join(textwrap.wrap(" ".join(others), 98)),
        coordinator=_coordinator(launch.coordinator),
        join=join,
        task=shlex.quote(_devices(launch) + _TASK),
        command=shlex.join(launch.command),
        preempted=int(ExitCode.PREEMPTED),
        unhandled=_USR1_UNHANDLED,
        bad_input=int(ExitCode.BAD_INPUT),
        nothing_fits=int(ExitCode.NOTHING_FITS),
        not_finite=int(ExitCode.NOT_FINITE),
        max_restarts=launch.restarts,
    )


def limit_seconds(text: str) -> int | None:
    """Return a time limit as SLURM reads it, in whole minutes; None if there is none."""
    written = TIME_LIMIT.fullmatch(text)
    if written is None:
        return None
    parts = [int(part) for part in written["parts"].split(":")]
    if written["days"]:
        hours, minutes, seconds = [*parts, 0, 0][:3]
        hours += 24 * int(written["days"][:-1])
    else:
        first = [0] if len(parts) < 3 else []
        hours, minutes, seconds = [*first, *parts, 0][:3]
    # SLURM rounds up to minutes, and takes zero for no limit.
    return -(-(3600 * hours + 60 * minutes + seconds) // 60) * 60 or None


def check_time_to_save(launch: LaunchOptions) -> None:
    """Raise if a job would be asked to save before it starts; options of sbatch count."""
    time, lead = launch.time, launch.save_seconds
    for option in launch.sbatch:
        name, _, value = option.partition("=")
        if name == "--time":
            time = value
        elif name == "--signal":
            _, at, seconds = value.partition("@")
            lead = int(seconds) if at and seconds.isdecimal() else _SIGNAL_LEAD
    limit = limit_seconds(time)
    if limit is None or limit > lead:
        return
    raise UserError(
        f"--time {time} is too short for a job that has to save {lead} seconds before its end",
        why=f"it is {counted(limit, 'second')}, so the job would have to save as soon as it starts",
        fix=f"write a longer --time, or --save-seconds {max(limit // 3, 1)}",
    )


def _options(launch: LaunchOptions, cwd: Path) -> list[str]:
    """Return sbatch's options; the user's own come last, and count."""
    named = {
        "job-name": launch.name,
        "nodes": str(launch.nodes or 1),
        "ntasks-per-node": str(launch.nprocs),
        "time": launch.time,
        "partition": launch.partition,
        "account": launch.account,
        "gpus-per-node": "" if launch.gpus_per_node is None else str(launch.gpus_per_node),
        "chdir": _quoted_path(cwd),
        "output": LOG,
        "open-mode": "append",
        # To the processes, not to this script.
        "signal": f"USR1@{launch.save_seconds}",
    }
    return [*(f"--{k}={v}" for k, v in named.items() if v), "--requeue", *launch.sbatch]


def _quoted_path(path: Path) -> str:
    """Return a path as sbatch reads it in a script: in double quotes where it needs any."""
    text = str(path)
    if not text.isprintable():
        raise UserError(
            f"sbatch cannot start in the folder {text!r}", fix="submit from another folder"
        )
    if re.fullmatch(r"[\w./+@=-]+", text):
        return text
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _coordinator(address: str) -> str:
    """Return the lines that set the address of process 0."""
    if not address:
        return _FIRST_NODE + _PORT
    host, port = split_address("--coordinator", address, default_port=0)
    return f"export MASTER_ADDR={shlex.quote(host)}\n" + (
        f"export MASTER_PORT={port}" if port else _PORT
    )


def _devices(launch: LaunchOptions) -> str:
    """Return what a task exports for the devices of its process."""
    each, gpus = launch.devices_per_process, launch.gpus_per_node
    if gpus is None:
        return "" if each is None else f"export JAX_NUM_CPU_DEVICES={each}\n"
    if gpus % launch.nprocs or (each or 1) * launch.nprocs > gpus:
        raise UserError(
            f"{counted(launch.nprocs, 'process')} with "
            f"{counted(each or 1, 'GPU')} each cannot share {counted(gpus, 'GPU')}",
            why="all processes of a machine have the same number of GPUs",
            fix=f"write --gpus-per-node {(each or 1) * launch.nprocs}, or another --nprocs",
        )
    each = each or gpus // launch.nprocs
    if launch.nprocs == 1 and each == gpus:
        return ""
    first = f"$((SLURM_LOCALID * {each}))"
    return f"""\
export JAX_LOCAL_DEVICE_IDS="$(seq -s, {first} $((SLURM_LOCALID * {each} + {each - 1})))"
"""
