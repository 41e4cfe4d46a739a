"""Settings of a run that do not go together."""

from __future__ import annotations

from meshwright.errors import ANY, Setting, UserError, did_you_mean
from meshwright.trainer.callbacks import EarlyStopping
from meshwright.trainer.fit_settings import FitSettings
from meshwright.trainer.programs import Programs


def check_rewinding(on_nonfinite: str, asked: FitSettings) -> None:
    """Refuse to rewind where nothing is saved."""
    if on_nonfinite != "rewind" or asked.saves:
        return
    if asked.run_dir is None:
        why, fix = "the run has no folder", f"write {Setting('hydra.run.dir', ANY)}"
    else:
        why, skip = Setting("checkpoint.enabled", False), Setting("training.on_nonfinite", "skip")
        fix = f"write {Setting('checkpoint.enabled', True)}, or {skip}"
    raise UserError(
        f"{Setting('training.on_nonfinite', 'rewind')} needs checkpoints to go back to",
        why=str(why),
        fix=fix,
    )


def check_early_stopping(asked: FitSettings, programs: Programs) -> None:
    """Refuse early stopping by evaluations or metrics that there are not."""
    watched = {each.metric for each in asked.callbacks if isinstance(each, EarlyStopping)}
    if not watched:
        return
    if asked.eval_data is None:
        raise UserError(
            "early stopping counts evaluations, and there is no data to evaluate on",
            fix=f"hold out data with {Setting('data.eval_fraction', ANY)}, or leave out early "
            "stopping",
        )
    if asked.eval_every is None:
        raise UserError(
            "early stopping counts evaluations, and there is only one, at the end",
            why=f"{Setting('training.eval_every')} is not set",
            fix=f"write {Setting('training.eval_every', ANY)} too",
        )
    names = ["loss"] if watched == {"loss"} else ["loss", *programs.evaluated_metrics()]
    for metric in sorted(watched.difference(names)):
        raise UserError(
            f"early stopping watches {metric!r}, which evaluations do not have",
            why=f"they have {', '.join(names)}",
            fix=did_you_mean(metric, names)
            or f'return it with the loss: return loss, {{"{metric}": …}}',
        )
