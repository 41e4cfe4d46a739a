"""Faults of what a run reads and writes: damaged checkpoints, full disks, a NaN in a batch."""

import textwrap

from meshwright.drill.fault_makers import IN_CHECKPOINT
from meshwright.drill.launched import NotSurvived
from meshwright.drill.trial import SAME, Fault, Trial, largest_file
from meshwright.errors import ExitCode
from meshwright.text.units import human_bytes

_SET_ASIDE = "named, set aside, resumed from the previous checkpoint; refused if asked for by path"


def _check_damaged(trial: Trial) -> str:
    before = trial.reference.steps[1]
    step = trial.prepare(checkpoints=3)
    checkpoint = trial.run.checkpoints / str(step)
    IN_CHECKPOINT[trial.fault](checkpoint)
    other = trial.folder / "explicit"
    asked = trial.train(settings=[f"resume={checkpoint}"], run_dir=other, code=ExitCode.BAD_INPUT)
    asked.find(rf"error: .*{step} is damaged")
    launched = trial.train(code=0)
    found = launched.find(rf"the checkpoint \S*/{step} is damaged \((.+)\); it was renamed")
    went_on = int(launched.find(r"continuing after step (\d+)")[1])
    if went_on != before:
        raise NotSurvived(f"went on from step {went_on} instead of {before}")
    trial.check_same()
    cause = textwrap.shorten(found[1], 80, placeholder=" …")
    return f"found ({cause}), refused by name, resumed from step {before}, {SAME}"


def _logs_too_large(trial: Trial) -> str:
    run = trial.reference
    limit = largest_file(run) // 2
    logs = max(path.stat().st_size for path in run.path.iterdir() if path.is_file())
    if limit > 2 * logs:
        return ""
    return (
        f"a limit that stops files of {human_bytes(2 * limit)} in a checkpoint would also stop "
        f"logs of {human_bytes(logs)}"
    )


def _check_full_disk(trial: Trial) -> str:
    launched = trial.train(inject=True, code=1)
    launched.find(r"error: the state after \d+ steps could not be saved")
    found = launched.find(r"a checkpoint takes up to (.+), and (.+) are free in")
    return trial.resumed(launched, f"exit code 1, needed {found[1]} and free {found[2]} named")


def _check_no_folder(trial: Trial) -> str:
    blocked = trial.folder / "file"
    blocked.write_text("A file, in which no folder can be made.\n", encoding="utf-8")
    launched = trial.train(run_dir=blocked / "run", code=2)
    launched.check_silent_about("compiling the step")
    if str(blocked) not in "\n".join(line.text for line in launched.lines):
        raise NotSurvived(f"the folder is not named: {launched.problem()}")
    return "exit code 2 before compiling, the folder is named"


def _has_no_floats(trial: Trial) -> str:
    dtypes = trial.batch_dtypes
    if any(dtype.startswith(("float", "bfloat")) for dtype in dtypes):
        return ""
    return f"batches of {' and '.join(sorted(set(dtypes)))} cannot hold a NaN"


def _check_nan_batch(trial: Trial) -> str:
    step = trial.configuration.step
    launched = trial.train("--restarts=3", inject=True, settings=["training.on_nonfinite=stop"])
    launched.check_code(ExitCode.NOT_FINITE)
    launched.find(rf"error: .* at step {step}\b")
    launched.find(rf"batch {step - 1}\b")
    if not (trial.run.path / "incidents" / f"{step:06d}").is_dir():
        raise NotSurvived(f"step {step} was not recorded")
    if (saved := trial.run.steps[-1]) != step - 1:
        raise NotSurvived(f"step {saved} is saved instead of {step - 1}")
    return trial.resumed(launched, f"exit code 4 in all processes, recorded, step {step - 1} saved")


FAULTS = (
    Fault("flipped-byte", "a bit of the newest checkpoint is flipped", _SET_ASIDE, _check_damaged),
    Fault(
        "truncated-shard", "a file of the newest checkpoint is cut off", _SET_ASIDE, _check_damaged
    ),
    Fault(
        "no-metadata",
        "the metadata of the newest checkpoint are deleted",
        _SET_ASIDE,
        _check_damaged,
    ),
    Fault(
        "disk-full",
        "files cannot become larger while a checkpoint is written",
        "exit code 1 with the bytes needed and free; the previous checkpoint resumes",
        _check_full_disk,
        why_not=_logs_too_large,
    ),
    Fault(
        "no-folder",
        "an output folder that cannot be written to",
        "exit code 2 before anything is compiled",
        _check_no_folder,
        starts=0.5,
    ),
    Fault(
        "nan-batch",
        "a NaN in the part of a batch that the last process reads",
        "all stop before the step with exit code 4, record it, and save no NaN",
        _check_nan_batch,
        why_not=_has_no_floats,
    ),
)
